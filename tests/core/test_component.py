"""Components on a device: what is loaded and dropped before a work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.core.component import Component, Memory, num_bytes

A, B, C = Component("a", 1), Component("b", 2), Component("c", 4)
COMPONENTS = [Component(str(index), size) for index, size in enumerate((1, 2, 2, 3, 4))]


def test_what_is_lacking_is_loaded() -> None:
    change = Memory(7, (A,)).used((A, B))
    assert (change.drops, change.loads) == ((), (B,))
    assert change.memory.components == (A, B)
    assert change.memory.free_bytes == 4


def test_the_least_recently_used_make_room() -> None:
    memory = Memory(7, (A, B, C)).used((A,)).memory
    assert memory.components == (B, C, A), "used last"
    assert memory.used((Component("d", 1),)).drops == (B,)
    assert memory.used((Component("d", 3),)).drops == (B, C)


def test_what_is_named_goes_before_the_least_recently_used() -> None:
    memory, new = Memory(7, (A, B, C)), Component("d", 2)
    assert memory.used((new,), (B,)).drops == (B,)
    assert memory.used((new,), (Component("e", 1), C, A)).drops == (C,), "and no more than must be"
    assert memory.used((Component("d", 3),), (B,)).drops == (B, A)
    assert memory.used((A, new), (A, B)).drops == (B,), "not what the work needs"
    assert not memory.used((A,), (B,)).drops, "there is no need"


def test_what_the_work_needs_is_not_dropped_for_it() -> None:
    change = Memory(6, (A, C)).used((A, Component("d", 5)))
    assert change.drops == (C,)


def test_memory_without_a_limit_drops_nothing() -> None:
    memory = Memory()
    for component in (A, B, C):
        change = memory.used((component,))
        assert not change.drops
        memory = change.memory
    assert memory.components == (A, B, C)
    assert memory.free_bytes is None


def test_equal_components_are_loaded_once() -> None:
    assert Memory(1).can_hold((A, A))
    assert Memory(1).used((A, A)).loads == (A,)


def test_what_never_fits_is_a_bug_of_the_caller() -> None:
    assert not Memory(5).can_hold((B, C))
    with pytest.raises(AssertionError, match="6 bytes do not fit into 5"):
        Memory(5).used((B, C))


@given(st.lists(st.sets(st.sampled_from(COMPONENTS), max_size=2).map(sorted), max_size=30), st.integers(7, 12))
def test_memory_is_never_exceeded_and_always_has_what_the_latest_work_needs(
    works: list[list[Component]], total_bytes: int
) -> None:
    memory, there = Memory(total_bytes), set[Component]()
    for wanted in works:
        change = memory.used(wanted)
        assert not there & set(change.loads), "nothing is loaded twice"
        assert set(change.drops) <= there - set(wanted)
        there = there - set(change.drops) | set(change.loads)
        memory = change.memory
        assert set(memory.components) == there >= set(wanted)
        assert len(memory.components) == len(there)
        assert num_bytes(there) <= total_bytes
        for last in change.drops[-1:]:
            assert num_bytes(there) + last.num_bytes > total_bytes, "it had to be dropped, too"
