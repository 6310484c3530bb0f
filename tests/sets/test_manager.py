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
    found = moves(sets, agents("v", "w", "x", "y", "z"), {}, RULE)
    assert places(found) == {"v": "a", "w": "c", "x": "b", "y": "b", "z": "a"}
    assert found[3].why == "b lacks nodes"
    assert found[4].why == "it was free, and a was busy for 90%"


def test_a_node_stays_free_where_no_set_has_a_place() -> None:
    sets = {"a": a_set(most_nodes=1), "b": a_set(most_nodes=0)}
    assert places(moves(sets, agents("x", "y"), {}, RULE, steady=sets)) == {"x": "a"}


def test_a_node_that_has_lost_its_route_stays_where_it_is() -> None:
    sets = {"a": a_set(0.2), "b": a_set(0.9)}
    assert places(moves(sets, agents("x", of="a"), {}, RULE)) == {"x": "a"}


def test_a_node_waits_a_window_for_a_set_that_is_gone() -> None:
    sets, gone = {"a": a_set()}, routes(x="b")
    assert moves(sets, agents("x", of="b"), gone, RULE) == []
    assert places(moves(sets, agents("x", of="b"), gone, RULE, gone={"b"})) == {"x": "a"}


def test_the_least_used_node_of_an_idle_set_goes_to_the_busy_one() -> None:
    sets = {"a": a_set(1.0), "b": a_set(0.1, nodes={"x": 0.2, "y": 0.0, "z": 0.1})}
    placed = routes(v="a", x="b", y="b", z="b")
    found = moves(sets, agents("v", "x", "y", "z"), placed, RULE, steady=sets)
    assert places(found) == {"y": "a"}
    assert found[0].why == "over 300 s, a was asked for 100% of its time; it gets 1 of b (10%)"
    assert moves(sets, agents("v", "x", "y", "z"), placed, RULE) == []


def test_a_set_without_a_place_does_not_hide_one_that_has_one() -> None:
    sets = {"a": a_set(1.0, most_nodes=1), "b": a_set(0.95), "c": a_set(0.0)}
    found = moves(sets, agents("v", "w", "x", "y"), routes(v="a", w="b", x="c", y="c"), RULE, steady=sets)
    assert places(found) == {"x": "b"}


def test_nodes_that_follow_no_route_have_places_and_stay() -> None:
    sets = {"a": a_set(1.0, most_nodes=3, nodes={"here": 1.0}), "b": a_set(0.0, nodes={"there": 0.0, "y": 0.5})}
    assert places(moves(sets, agents("x", "y", "z"), routes(x="a", y="b"), RULE, steady=sets)) == {"z": "a"}
    sets["c"] = a_set(0.0, nodes={"k": 0.0, "l": 0.0})
    assert places(moves(sets, agents("x", "y"), routes(x="a", y="b"), RULE, steady=sets)) == {"y": "a"}
    assert moves(sets, agents("x"), routes(x="a"), RULE, steady=sets) == []


def test_no_more_nodes_come_than_there_are_places() -> None:
    sets = {"a": a_set(1.0, most_nodes=8), "b": a_set(0.0, most_nodes=9)}
    there = {f"a{index}": "a" for index in range(7)} | {f"b{index}": "b" for index in range(9)}
    assert len(moves(sets, agents(*there), routes(**there), RULE, steady=sets)) == 1


def test_a_set_that_is_new_takes_no_part() -> None:
    placed = routes(v="a", x="b", y="b")
    young = {"a": a_set(1.0, measured_s=299.0), "b": a_set(0.0)}
    assert moves(young, agents("v", "x", "y"), placed, RULE, steady=young) == []
    young = {"a": a_set(1.0), "b": a_set(0.0, measured_s=299.0)}
    assert moves(young, agents("v", "x", "y"), placed, RULE, steady=young) == []


def test_a_set_that_lacks_nodes_gets_those_that_others_can_spare() -> None:
    """At once, though none was measured; the least used, and no more than it lacks."""
    new = {"nodes": {}, "measured_s": 0.0}
    sets = {"a": a_set(nodes={"w": 0.3, "x": 0.1, "y": 0.2, "z": 0.4}, measured_s=0.0), "b": a_set(**new)}
    placed = routes(w="a", x="a", y="a", z="a")
    found = moves(sets, agents("w", "x", "y", "z", of="a"), placed, RULE)
    assert places(found) == {"x": "b"}
    assert found[0].why == "b lacks nodes, and a has more than its least"
    sets["b"] = a_set(**new, least_nodes=3)
    assert places(moves(sets, agents("w", "x", "y", "z", of="a"), placed, RULE)) == {"x": "b", "y": "b", "w": "b"}
    sets["a"] = replace(sets["a"], least_nodes=3)
    assert places(moves(sets, agents("w", "x", "y", "z", of="a"), placed, RULE)) == {"x": "b"}


def test_a_free_node_goes_before_one_is_taken_from_a_set() -> None:
    sets = {"a": a_set(), "b": a_set()}
    assert places(moves(sets, agents("x", "y", "z"), routes(x="a", y="a"), RULE)) == {"z": "b"}


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=2, max_size=4))
def test_sets_that_lack_nodes_take_none_from_each_other(divisions: list[tuple[int, int]]) -> None:
    """One decision is enough: what sets could spare has gone, and nothing is left to be done."""
    sets = {f"s{index}": a_set(least_nodes=least, most_nodes=6) for index, (_, least) in enumerate(divisions)}
    where = {f"s{index}n{number}": f"s{index}" for index, (num, _) in enumerate(divisions) for number in range(num)}
    before = Counter(where.values())
    where |= places(moves(sets, agents(*where), _routes(where), RULE))
    after = Counter(where.values())
    for name, one in sets.items():
        assert min(before[name], max(1, one.least_nodes)) <= after[name] <= max(before[name], one.least_nodes)
    lacking = any(after[name] < one.least_nodes for name, one in sets.items())
    assert not lacking or all(after[name] <= max(1, one.least_nodes) for name, one in sets.items())
    assert moves(sets, agents(*where), _routes(where), RULE) == []


def test_a_node_that_works_for_a_set_keeps_its_place_there() -> None:
    """As after a silence of the registry: routes have ended with the leases, and a free node comes first by name."""
    sets = {"a": a_set(0.9, most_nodes=1), "b": a_set(0.1)}
    there = agents("w") | agents("x", of="a")
    assert places(moves(sets, there, {}, RULE)) == {"x": "a", "w": "b"}


def test_a_node_that_has_lost_its_route_waits_for_its_set() -> None:
    """Its set comes back later than the node does."""
    sets = {"b": a_set(0.9)}
    assert moves(sets, agents("x", of="a"), {}, RULE, steady=sets) == []
    assert places(moves(sets, agents("x", of="a"), {}, RULE, gone={"a"})) == {"x": "b"}


def test_a_set_that_was_away_in_the_window_takes_no_part() -> None:
    sets, placed = {"a": a_set(1.0), "b": a_set(0.0)}, routes(v="a", x="b", y="b")
    assert moves(sets, agents("v", "x", "y"), placed, RULE, steady={"a"}) == []
    assert moves(sets, agents("v", "x", "y"), placed, RULE, steady={"b"}) == []


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
    for move in moves(_after_a_window(where, work, most, least), agents(*where), _routes(where), RULE):
        where[move.agent] = move.set  # To sets that have not enough.
    givers, takers = set[str](), set[str]()
    for _ in range(len(where) + 1):
        sets, before = _after_a_window(where, work, most, least), dict(where)
        found = moves(sets, agents(*where), _routes(where), RULE, steady=sets)
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
