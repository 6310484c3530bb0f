"""Requests of one shape that share forward passes in the generic family end as those that are alone in theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diffusers.models.autoencoders.vae import AutoencoderMixin
from torch import Tensor

import tiny
from quick import quick
from tilework.core.wire.spec import Spec
from tilework.patches.layout import pack
from tilework.pipelines.components import denoisers_of
from tilework.pipelines.family import Values
from tilework.pipelines.stock import shared_calls
from tilework.pipelines.stock.answers import rebuilt
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.pipelines.support.record import served_classes
from zoo import requests
from zoo.registry import ZOO, build

TOLERANCE = 1e-5
QUICK = ("qwen-image", "z-image", "wan22", "sdxl-inpaint")
MODELS = [name for name, model in ZOO.items() if model.class_name in served_classes()]


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@contextmanager
def counted(modules: Iterable[Any]) -> Iterator[list[int]]:
    """The number of calls of these, one after another."""
    calls: list[int] = []
    hooks = [one.register_forward_hook(lambda *_: calls.append(1)) for one in modules]
    yield calls
    for hook in hooks:
        hook.remove()


def latents(made: StockPipeline, specs: list[Spec], *, together: bool) -> list[Tensor]:
    """What the sampler gives each in its last step. The first request is a step ahead of the others."""
    states: list[Any] = [requests.begin(made, spec)[1] for spec in specs]
    made.step(states[:1])
    while running := [state for state in states if state.steps_done < state.num_steps]:
        if together:
            made.step(running, pack)
        else:
            for state in running:
                made.step([state])
    answers = [rebuilt(state.walk.mark().samplers[0]) for state in states]
    return [answer[0] if isinstance(answer, tuple) else answer["prev_sample"] for answer in answers]


@pytest.mark.parametrize("name", quick(QUICK, MODELS))
def test_shared_passes_change_nothing_but_rounding(name: str) -> None:
    pipeline = build(ZOO[name])
    made = StockPipeline(pipeline, name, {}, "")
    first, second, third = (requests.spec_of(ZOO[name], made, seed) for seed in (1, 2, 3))
    if not second.prompt.startswith("{"):  # Bria's are JSON.
        second = replace(second, prompt="two blue birds on a branch")
    specs = [first, second, third]
    with counted(denoisers_of(pipeline).values()) as apart:
        alone = latents(made, specs, together=False)
    with counted(denoisers_of(pipeline).values()) as shared:
        together = latents(made, specs, together=True)
    _, loop, *_ = made.info.stages
    assert loop.batchable == (len(shared) < len(apart)), "it must be told whether passes are shared"
    for one, other in zip(alone, together, strict=True):
        assert (one - other).abs().max() <= TOLERANCE * one.abs().max()


@pytest.mark.parametrize("name", quick(QUICK, MODELS))
def test_shared_decodes_change_nothing_but_rounding(name: str) -> None:
    pipeline = build(ZOO[name])
    made = StockPipeline(pipeline, name, {}, "")
    specs = [requests.spec_of(ZOO[name], made, seed) for seed in (1, 2)]
    decode, decoded = made.info.stages[2], [looped(made, spec) for spec in specs]
    decoders = [part.decoder for part in pipeline.components.values() if isinstance(part, AutoencoderMixin)]
    with counted(decoders) as apart:
        alone = [requests.pixels(made, spec, requests.shipped(one)) for spec, one in zip(specs, decoded, strict=True)]
    with counted(decoders) as shared:
        together = made.run(decode.name, specs, decoded)
    assert decode.batchable == (len(shared) < len(apart)) or not made.info.stages[1].batchable
    for spec, one, other in zip(specs, alone, together, strict=True):
        pixels = np.frombuffer(made.image(spec, other).pixels, np.uint8)
        assert np.abs(one.astype(int) - pixels).max() <= 1


def looped(made: StockPipeline, spec: Spec) -> Values:
    """What the loop of a request writes."""
    state: Any = requests.begin(made, spec)[1]
    while state.steps_done < state.num_steps:
        made.step([state])
    return made.finish(state)


def test_decodes_whose_rows_are_mixed_up_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    part = shared_calls._part
    monkeypatch.setattr(shared_calls, "_part", lambda answer, rows: part(answer, slice(0, rows.stop - rows.start)))
    with pytest.raises(AssertionError):
        test_shared_decodes_change_nothing_but_rounding("z-image")


def test_a_pass_whose_rows_are_mixed_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = StockPipeline(build(ZOO["chroma"]), "chroma", {}, "")
    specs = [requests.spec_of(ZOO["chroma"], made, seed) for seed in (1, 2)]
    alone = latents(made, specs, together=False)
    part = shared_calls._part
    monkeypatch.setattr(shared_calls, "_part", lambda answer, rows: part(answer, slice(0, rows.stop - rows.start)))
    together = latents(made, specs, together=True)
    assert (alone[1] - together[1]).abs().max() > 100 * TOLERANCE * alone[1].abs().max()
