"""Mixes of requests in cost tables: their part of the file, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import table
from tilework.core.request import Shape
from tilework.cost.mixes import Day, MixBlock, Mixes
from tilework.cost.table import BadCostTable, merged
from tilework.cost.table_file import parse_table, table_json

GIVEN: dict[str, Any] = {
    "mixes": {"calm": {"64x64": 3, "128x64x5": 1.5}, "wild": {"128x128": 1}},
    "dynamic": [
        {"from_min": 0, "to_min": 2, "calm": 1},
        {"from_min": 2, "to_min": 2.5, "rate_factor": 3, "calm": 0.2, "wild": 0.8},
    ],
    "diurnal": {"mix": "wild", "peak": 2},
}
MIXES = Mixes(
    by_name={"calm": {Shape(64, 64): 3, Shape(64, 128, 5): 1.5}, "wild": {Shape(128, 128): 1}},
    dynamic=(
        MixBlock(from_min=0, to_min=2, rate_factor=1.0, weights={"calm": 1}),
        MixBlock(from_min=2, to_min=2.5, rate_factor=3, weights={"calm": 0.2, "wild": 0.8}),
    ),
    diurnal=Day(mix="wild", peak=2),
)


def parsed(**changes: Any) -> Mixes:
    return parse_table(table_json(table()) | GIVEN | changes).mixes


def test_a_table_with_mixes_survives_its_file() -> None:
    full = replace(table(), mixes=MIXES)
    assert parsed() == MIXES
    assert parse_table(table_json(full)) == full
    assert not table_json(table()).keys() & GIVEN.keys(), "files without mixes stay as they were"


def test_a_joined_table_has_no_mixes() -> None:
    assert merged([replace(table(), mixes=MIXES), table(pipeline="other")]).mixes == Mixes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixes": [1]}, "mixes is [1]; expected an object by name"),
        ({"mixes": {"calm": 3}}, "mixes.calm is 3; expected an object of weights by size, as 1024x1024"),
        ({"mixes": {"calm": {}}}, "mixes.calm is {}; expected an object of weights by size, as 1024x1024"),
        ({"mixes": {"calm": {"64": 1}}}, "mixes.calm: '64' is no shape; write WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES"),
        ({"mixes": {"calm": {"64x64": -1}}}, "mixes.calm.64x64 is -1; expected a weight of at least 0"),
        ({"mixes": {"calm": {"64x64": "1"}}}, "mixes.calm.64x64 is '1'; expected a weight of at least 0"),
        ({"mixes": {"calm": {"64x64": True}}}, "mixes.calm.64x64 is True; expected a weight of at least 0"),
        ({"mixes": {"calm": {"64x64": 0}}}, "mixes.calm has no weight above 0; give one at least"),
        ({"mixes": {"trace": {"64x64": 1}}}, "mixes has 'trace', a name that has another meaning;"),
        ({"dynamic": 3}, "dynamic is 3; expected a list of blocks with from_min, to_min and weights of mixes"),
        ({"dynamic": [3]}, "dynamic[0] is 3; expected an object with from_min, to_min and weights of mixes"),
        ({"dynamic": [{"to_min": 2, "calm": 1}]}, "dynamic[0].from_min is None; expected 0, since blocks follow each"),
        ({"dynamic": [{"from_min": 0, "calm": 1}]}, "dynamic[0].to_min is None; expected minutes after 0"),
        ({"dynamic": [{"from_min": 0, "to_min": 0, "calm": 1}]}, "dynamic[0].to_min is 0; expected minutes after 0"),
        (
            {"dynamic": [GIVEN["dynamic"][0], {"from_min": 3, "to_min": 4, "calm": 1}]},
            "dynamic[1].from_min is 3; expected 2, since blocks follow each other from 0",
        ),
        (
            {"dynamic": [{"from_min": 0, "to_min": 2, "rate_factor": 0, "calm": 1}]},
            "dynamic[0].rate_factor is 0; expected a number above 0",
        ),
        (
            {"dynamic": [{"from_min": 0, "to_min": 2, "clam": 1}]},
            "dynamic[0] has 'clam', which is no mix; did you mean calm? use one of calm, wild",
        ),
        (
            {"dynamic": [{"from_min": 0, "to_min": 2, "calm": float("nan")}]},
            "dynamic[0].calm is nan; expected a weight of at least 0",
        ),
        ({"dynamic": [{"from_min": 0, "to_min": 2}]}, "dynamic[0] has no weight above 0; give one at least"),
        ({"diurnal": "calm, a sine"}, "diurnal is 'calm, a sine'; expected an object with mix and peak, the highest"),
        ({"diurnal": {"mix": "warm", "peak": 2}}, "diurnal.mix is 'warm', which is no mix; use one of calm, wild"),
        ({"diurnal": {"mix": "calm"}}, "diurnal.peak is None; expected the highest rate over the lowest, at least 1"),
        ({"diurnal": {"mix": "calm", "peak": 0.5}}, "diurnal.peak is 0.5; expected the highest rate over the lowest"),
        (
            {"mixes": {}, "dynamic": []},
            "diurnal.mix is 'wild', which is no mix; use one of those that mixes has (none)",
        ),
    ],
)
def test_a_mistake_is_named_with_field_value_and_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadCostTable) as caught:
        parsed(**changes)
    assert str(caught.value).startswith(message)
