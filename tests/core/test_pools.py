"""Pools: devices of a node that serve the same pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from tilework.core.pools import Pools, is_devices, unknown_device

POOLS = Pools({"a": (0, 1, 2), "b": (1, 2, 5)})
"""What the others serve is served by all."""


def test_devices_that_serve_the_same_are_one_pool() -> None:
    numbers = [POOLS.number(0, device_id) for device_id in range(7)]
    assert numbers[1] == numbers[2], "both serve a and b"
    assert numbers[3] == numbers[4] == numbers[6], "they serve neither"
    assert len(set(numbers)) == 4
    assert not {POOLS.number(1, device_id) for device_id in range(7)} & set(numbers), "pools lie in nodes"


def test_without_devices_of_their_own_each_node_is_a_pool() -> None:
    pools = Pools({})
    assert [pools.number(node, 3) for node in range(3)] == [0, 1, 2]
    assert (pools.within("a"), pools.widest("a"), pools.parts("a", range(3))) == (None, None, [None])
    assert pools.serves(7, "a")


def test_a_pipeline_is_served_in_each_of_its_pools_and_is_as_wide_as_the_widest() -> None:
    assert [POOLS.serves(device_id, "a") for device_id in range(4)] == [True, True, True, False]
    assert (POOLS.widest("a"), POOLS.widest("b"), POOLS.widest("c")) == (2, 2, None)
    assert sorted(map(sorted, POOLS.parts("b", range(7)))) == [[1, 2], [5]]  # type: ignore[arg-type]
    assert sorted(map(sorted, POOLS.parts("c", range(4)))) == [[0], [1, 2], [3]]  # type: ignore[arg-type]


def test_pipelines_of_which_no_device_is_left_are_unserved() -> None:
    assert POOLS.unserved(("a", "b", "c"), (5, 6)) == {"a"}
    assert POOLS.unserved(("a", "b", "c"), ()) == {"a", "b", "c"}


@pytest.mark.parametrize("value", [[], [0, 0], [-1], [True], [1.0], ["0"], "01", None, 0])
def test_devices_are_a_list_of_ids_each_once(value: Any) -> None:
    assert not is_devices(value)
    assert is_devices([2, 0])


def test_the_first_unknown_device_is_found() -> None:
    assert unknown_device((0, 4, 3), 3) == 4
    assert unknown_device((0, 2), 3) is None
    assert unknown_device(None, 1) is None
