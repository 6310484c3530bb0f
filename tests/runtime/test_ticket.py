"""What scheduling learns of a request from its spec and its terms."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

import tiny
from builders import job
from fake_engine import INFO
from tilework.core.model import TRUE_SCALE, Argument, ArgumentKind, ArgumentValue
from tilework.core.request import DEFAULT_TERMS, OnMiss, Request, Terms
from tilework.runtime.ticket import Wanted


def wanted(
    two_passes: bool = True, guidance_scale: float = 4.0, negative_prompt: str | None = None, **arguments: ArgumentValue
) -> Request:
    spec = tiny.spec(guidance_scale=guidance_scale, negative_prompt=negative_prompt, arguments=arguments)
    one = Wanted(uid="u", model="", spec=spec, arrival_ns=0, deadline_ns=None, terms=DEFAULT_TERMS)
    scale = Argument(name=TRUE_SCALE, kind=ArgumentKind.NUMBER, low=1.0, high=30.0, default=4.0)
    return one.request(replace(INFO, two_passes=two_passes, arguments=(*INFO.arguments, scale)))


@pytest.mark.parametrize(
    ("request_", "passes"),
    [
        (wanted(), 1.0),
        (wanted(two_passes=False, true_cfg_scale=3.0), 1.0),
        (wanted(two_passes=False, negative_prompt="", true_cfg_scale=1.0), 1.0),
        (wanted(two_passes=False, negative_prompt="", true_cfg_scale=3.0), 2.0),
        (wanted(two_passes=False, negative_prompt=""), 2.0),
        (wanted(two_passes=False), 1.0),
        (wanted(two_passes=False, negative_prompt="dogs"), 2.0),
        (wanted(two_passes=False, negative_prompt="dogs", true_cfg_scale=1.0), 1.0),
        (wanted(skip_guidance_layers=(1,)), 1.095),
        (wanted(skip_guidance_layers=(1,), skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0), 1.5),
        (wanted(guidance_scale=1.0, skip_guidance_layers=(1,)), 1.0),
    ],
)
def test_arguments_that_add_passes_make_steps_longer(request_: Request, passes: float) -> None:
    assert request_.passes == pytest.approx(passes)
    assert job(0, request_).may_share == (passes == 1)


def test_a_request_has_the_terms_that_its_call_was_given() -> None:
    terms = Terms(
        on_miss=OnMiss.DROP,
        tenant="a",
        priority="batch",
        weight=0.5,
        tenant_weight=2.0,
        room=0.25,
        promise_share=0.75,
    )
    one = Wanted(uid="u", model="", spec=tiny.spec(), arrival_ns=0, deadline_ns=9, terms=terms).request(INFO)
    names = [field.name for field in fields(Terms)]
    assert all(getattr(terms, name) != getattr(DEFAULT_TERMS, name) for name in names), "each differs from the default"
    assert [getattr(one, name) for name in names] == [getattr(terms, name) for name in names]
