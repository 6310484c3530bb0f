"""The class of a request, by which costs are known."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from builders import request
from tilework.core.graph.stage import ResultKind
from tilework.core.request import RequestClass, Shape, StepClass, cost_key, step_key


def test_requests_that_cost_the_same_have_one_class() -> None:
    one, other = request("a", 0.0, steps=4), request("b", 3.0, steps=4, slo_s=9.0, tenant="other")
    assert cost_key(one) is cost_key(other)
    assert step_key(one) == step_key(replace(one, steps=5))
    assert cost_key(one) != cost_key(replace(one, steps=5))
    copy = RequestClass(step_key(one), 4)
    assert copy == cost_key(one), "also if its own is forgotten, since clients choose the shapes"
    assert hash(copy) == hash(cost_key(one))


@pytest.mark.parametrize("name", StepClass._fields)
def test_every_field_of_a_class_tells_requests_apart(name: str) -> None:
    others = {"pipeline": "other", "shape": Shape(8, 16), "guided": False, "preview_every": 2, "passes": 2.0}
    others |= {"exact": True, "loras": ("a",), "result": ResultKind.VIDEO, "cache": "patch"}
    assert cost_key(replace(request("a"), **{name: others[name]})) != cost_key(request("a"))


def test_the_class_follows_from_the_other_fields() -> None:
    """So it is neither compared nor logged."""
    (own,) = [field for field in fields(request("a")) if field.name == "cost_class"]
    assert not own.init
    assert not own.compare
