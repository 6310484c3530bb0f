"""What is known by class of requests has an end, and forgets pipelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from builders import PIPELINE, request
from tilework.core.request import cost_key, step_key
from tilework.policy.toolkit.known_demands import ByClass


def test_what_was_set_first_is_dropped() -> None:
    known = ByClass[Any, int](2)
    for number, steps in enumerate((1, 2, 1, 3)):
        known[cost_key(request("a", steps=steps))] = number
    assert [key.steps for key in known] == [2, 3]


def test_what_was_not_set_for_longest_is_dropped() -> None:
    known = ByClass[Any, int](2)
    for number, steps in enumerate((1, 2, 1, 3)):
        known.renew(cost_key(request("a", steps=steps)), number)
    assert {key.steps: number for key, number in known.items()} == {1: 2, 3: 3}


def test_a_pipeline_is_forgotten_whatever_follows_it_in_a_key() -> None:
    asked = request("a")
    other = replace(asked, pipeline="other")
    known = ByClass[Any, int]()
    for one in (asked, other):
        for key in (cost_key(one), step_key(one), (cost_key(one), 1), (step_key(one), ""), (one.pipeline, one.shape)):
            known[key] = 1
    assert known.forget("other")
    assert not known.forget("other")
    assert list(known) == [
        cost_key(asked),
        step_key(asked),
        (cost_key(asked), 1),
        (step_key(asked), ""),
        (PIPELINE, asked.shape),
    ]
