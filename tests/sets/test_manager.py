"""Which node goes to which set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sets.records import a_set, agents, routes
from tilework.policy.placement.utilisation import UtilisationRule
from tilework.sets.manager import Move, moves
from tilework.sets.records import Route, SetRecord

RULE = UtilisationRule()
Sets = dict[str, SetRecord]


def places(found: list[Move]) -> dict[str, str]:
    return {one.agent: one.set for one in found}


def test_a_new_node_goes_where_one_is_lacking_then_to_the_busiest() -> None:
    sets = {"a": a_set(0.9), "b": a_set(0.1, least_nodes=2), "c": a_set(0.5)}
    found = moves(sets, agents("v", "w", "x", "y", "z"), {}, RULE, is_due=False)
    assert places(found) == {"v": "a", "w": "c", "x": "b", "y": "b", "z": "a"}
    assert found[3].why == "b lacks nodes"
    assert found[4].why == "it was free, and a was busy for 90%"


def test_a_node_stays_free_where_no_set_has_a_place() -> None:
    sets = {"a": a_set(most_nodes=1), "b": a_set(most_nodes=0)}
    assert places(moves(sets, agents("x", "y"), {}, RULE, is_due=True)) == {"x": "a"}


def test_a_node_that_has_lost_its_route_stays_where_it_is() -> None:
    sets = {"a": a_set(0.2), "b": a_set(0.9)}
    assert places(moves(sets, agents("x", of="a"), {}, RULE, is_due=False)) == {"x": "a"}


def test_a_node_waits_a_window_for_a_set_that_is_gone() -> None:
    sets, gone = {"a": a_set()}, routes(x="b")
    assert moves(sets, agents("x", of="b"), gone, RULE, is_due=False) == []
    assert places(moves(sets, agents("x", of="b"), gone, RULE, is_due=True)) == {"x": "a"}


def test_the_least_used_node_of_an_idle_set_goes_to_the_busy_one() -> None:
    sets = {"a": a_set(1.0), "b": a_set(0.1, nodes={"x": 0.2, "y": 0.0, "z": 0.1})}
    placed = routes(v="a", x="b", y="b", z="b")
    found = moves(sets, agents("v", "x", "y", "z"), placed, RULE, is_due=True)
    assert places(found) == {"y": "a"}
    assert found[0].why == "over 300 s, a was asked for 100% of its time; it gets 1 of b (10%)"
    assert moves(sets, agents("v", "x", "y", "z"), placed, RULE, is_due=False) == []


def test_a_set_without_a_place_does_not_hide_one_that_has_one() -> None:
    sets = {"a": a_set(1.0, most_nodes=1), "b": a_set(0.95), "c": a_set(0.0)}
    found = moves(sets, agents("v", "w", "x", "y"), routes(v="a", w="b", x="c", y="c"), RULE, is_due=True)
    assert places(found) == {"x": "b"}


def test_nodes_that_follow_no_route_have_places_and_stay() -> None:
    sets = {"a": a_set(1.0, most_nodes=3, nodes={"here": 1.0}), "b": a_set(0.0, nodes={"there": 0.0, "y": 0.5})}
    assert places(moves(sets, agents("x", "y", "z"), routes(x="a", y="b"), RULE, is_due=True)) == {"z": "a"}
    sets["c"] = a_set(0.0, nodes={"k": 0.0, "l": 0.0})
    assert places(moves(sets, agents("x", "y"), routes(x="a", y="b"), RULE, is_due=True)) == {"y": "a"}
    assert moves(sets, agents("x"), routes(x="a"), RULE, is_due=True) == []


def test_no_more_nodes_come_than_there_are_places() -> None:
    sets = {"a": a_set(1.0, most_nodes=8), "b": a_set(0.0, most_nodes=9)}
    there = {f"a{index}": "a" for index in range(7)} | {f"b{index}": "b" for index in range(9)}
    assert len(moves(sets, agents(*there), routes(**there), RULE, is_due=True)) == 1


def test_a_set_that_is_new_takes_no_part() -> None:
    placed = routes(v="a", x="b", y="b")
    young = {"a": a_set(1.0, measured_s=299.0), "b": a_set(0.0)}
    assert moves(young, agents("v", "x", "y"), placed, RULE, is_due=True) == []
    young = {"a": a_set(1.0), "b": a_set(0.0, measured_s=299.0)}
    assert moves(young, agents("v", "x", "y"), placed, RULE, is_due=True) == []


DIVISIONS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 8), st.floats(0, 8)), min_size=2, max_size=4)
"""For each set: nodes, places, and the work that comes to it, in nodes that it keeps busy."""


@given(DIVISIONS, st.integers(1, 3))
def test_windows_of_equal_load_end_in_peace(divisions: list[tuple[int, int, float]], least: int) -> None:
    """Nodes move to sets that need them and never back, and each set that gave one still keeps up."""
    work = {f"s{index}": load for index, (_, _, load) in enumerate(divisions)}
    most = {f"s{index}": num for index, (_, num, _) in enumerate(divisions)}
    where = {
        f"s{index}n{number}": f"s{index}"
        for index, (num, places_, _) in enumerate(divisions)
        for number in range(min(num, places_))
    }
    givers, takers = set[str](), set[str]()
    for _ in range(len(where) + 1):
        sets, before = _after_a_window(where, work, most, least), dict(where)
        found = moves(sets, agents(*where), _routes(where), RULE, is_due=True)
        if not found:
            break
        for move in found:
            givers.add(where[move.agent])
            takers.add(move.set)
            where[move.agent] = move.set
        nums = Counter(where.values())
        assert not givers & takers
        assert all(nums[name] <= most[name] for name in most)
        for name in {before[move.agent] for move in found}:
            assert nums[name] >= least
            assert work[name] <= (RULE.threshold - RULE.margin) * nums[name] + 1e-9
    else:
        raise AssertionError("nodes move for ever")


def _after_a_window(where: Mapping[str, str], work: Mapping[str, float], most: Mapping[str, int], least: int) -> Sets:
    nums = Counter(where.values())
    return {
        name: replace(
            a_set(min(1.0, load / nums[name]) if nums[name] else 0.0), most_nodes=most[name], least_nodes=least
        )
        for name, load in work.items()
    }


def _routes(where: Mapping[str, str]) -> dict[str, Route]:
    return routes(**where)
