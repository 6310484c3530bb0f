"""When a new placement is derived: too slow types, another mix, not too often, and not for less than a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placements import even_nodes, flux_mix
from tilework.core.time import NS_PER_S
from tilework.policy.placement.orchestrator import plan_placement
from tilework.policy.placement.pack import pack
from tilework.policy.placement.placement import Placement, colocated
from tilework.policy.placement.roles import PlacementType, Role, VirtualReplica
from tilework.policy.placement.switching import SwitchRule, WindowStats, is_worthwhile

EDC, DC, ED, D, E, C = PlacementType
V0, V1, V2, V3 = VirtualReplica
WINDOW_NS = 120 * NS_PER_S
RULE = SwitchRule(window_ns=WINDOW_NS)
MIX = {V0: 0.4, V2: 0.6}


def stats(completions: int, busy_s: float, replicas: int, backlog: int = 0) -> WindowStats:
    return WindowStats(completions=completions, busy_ns=int(busy_s * NS_PER_S), replicas=replicas, backlog=backlog)


# 8 ED are busy all the time; 2 C are idle half of it.
BUSY, HALF = stats(40, 960, 8), stats(40, 120, 2)


def reason(window: dict[PlacementType, WindowStats], rule: SwitchRule = RULE) -> str | None:
    return rule.reason(window, MIX, MIX, WINDOW_NS)


@pytest.mark.parametrize(
    ("backlog", "why"),
    [
        (0, None),
        (19, None),
        (20, "over 120 s, ED was asked for 1.50 times what it can do, and C for 1.00"),
    ],
)
def test_a_type_that_falls_behind(backlog: int, why: str | None) -> None:
    """It completed 40 with all its time, so 60 in the window are 1.5 times as many."""
    assert reason({ED: stats(40, 960, 8, backlog), C: HALF}) == why


def test_completions_alone_are_equal_in_steady_state() -> None:
    """One of two stages falls ever further behind, and both complete as many requests."""
    literal = SwitchRule(window_ns=WINDOW_NS, reading="completions")
    behind = stats(40, 960, 8, backlog=100)
    assert literal.reason({Role.D: behind, Role.C: HALF}, MIX, MIX, WINDOW_NS) is None
    assert RULE.reason({Role.D: behind, Role.C: HALF}, MIX, MIX, WINDOW_NS) is not None


@pytest.mark.parametrize(
    ("done", "switches"), [((60, 40), True), ((59, 40), False), ((1, 0), True), ((0, 0), False), ((40, 60), True)]
)
def test_the_reading_by_completions(done: tuple[int, int], switches: bool) -> None:
    literal = SwitchRule(window_ns=WINDOW_NS, reading="completions")
    window = {Role.E: stats(done[0], 1, 1), Role.C: stats(done[1], 1, 1)}
    assert (literal.reason(window, MIX, MIX, WINDOW_NS) is not None) == switches


def test_an_idle_type_is_in_balance() -> None:
    """V0's devices have nothing to do and V2's have enough: no new plan shortens a queue."""
    assert reason({EDC: stats(1, 10, 8), ED: BUSY, C: HALF}) is None


def test_a_short_queue_of_a_type_with_time_to_spare_is_in_balance() -> None:
    assert reason({ED: stats(40, 960, 8, backlog=8), C: stats(40, 120, 2, backlog=1)}) is None


def test_all_types_behind_alike_are_in_balance() -> None:
    """There are too few devices, and no placement changes that."""
    assert reason({ED: stats(40, 960, 8, backlog=80), C: stats(40, 240, 2, backlog=80)}) is None


def test_requests_that_wait_for_a_type_without_devices() -> None:
    assert reason({ED: BUSY, E: stats(0, 0, 0, backlog=1)}) is not None
    assert reason({ED: BUSY, E: stats(0, 0, 0)}) is None


def test_what_has_completed_nothing_yet_is_unknown() -> None:
    """A long video takes most of a window."""
    assert reason({ED: stats(0, 960, 8, backlog=3), C: HALF}) is None


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ({V0: 0.49, V2: 0.51}, None),
        ({V0: 0.5, V2: 0.5}, "the share of V0 went from 40% to 50%"),
        ({V2: 1.0}, "the share of V0 went from 40% to 0%"),
        ({}, None),
    ],
)
def test_another_mix_is_a_reason(now: dict[VirtualReplica, float], why: str | None) -> None:
    rule = SwitchRule(window_ns=WINDOW_NS, mix_change=0.0999)
    assert rule.reason({ED: BUSY, C: HALF}, MIX, now, WINDOW_NS) == why


@given(st.integers(0, 2 * WINDOW_NS), st.integers(0, 500))
def test_at_most_one_switch_per_window(since_ns: int, backlog: int) -> None:
    window = {ED: stats(40, 960, 8, backlog), C: HALF}
    why = RULE.reason(window, MIX, {V1: 1.0}, since_ns)
    assert (why is not None) == (since_ns >= WINDOW_NS)


def test_a_switch_changes_at_least_a_node() -> None:
    nodes = even_nodes(4, 4)
    before = pack({EDC: 12, ED: 3, C: 1}, nodes, {}, {})
    little = pack({EDC: 12, ED: 2, C: 2}, nodes, {}, {}, before)
    much = pack({EDC: 8, ED: 6, C: 2}, nodes, {}, {}, before)
    assert before is not None
    assert little is not None
    assert much is not None
    assert not is_worthwhile(before, before, nodes)
    assert not is_worthwhile(before, little, nodes)
    assert is_worthwhile(before, much, nodes)


def test_any_change_of_a_single_node_counts() -> None:
    nodes = even_nodes(1)
    before = pack({ED: 6, C: 2}, nodes, {}, {})
    after = pack({ED: 5, C: 3}, nodes, {}, {}, before)
    assert before is not None
    assert after is not None
    assert is_worthwhile(before, after, nodes)
    assert not is_worthwhile(before, before, nodes)
    assert is_worthwhile(Placement(()), before, nodes)


def test_from_heavy_to_light_flux() -> None:
    """The share of V2 stays about the same, though the share of its requests halves: nothing is to be done. From
    the start, with all stages on all devices, nodes change.
    """
    nodes = even_nodes(16)
    heavy = plan_placement(flux_mix("heavy"), nodes)
    light = plan_placement(flux_mix("light"), nodes, before=heavy.placement)
    medium = plan_placement(flux_mix("medium"), nodes, before=heavy.placement)
    assert RULE.reason({ED: BUSY, C: HALF}, heavy.mix, light.mix, WINDOW_NS) is None
    assert not is_worthwhile(heavy.placement, light.placement, nodes)
    assert RULE.reason({ED: BUSY, C: HALF}, heavy.mix, medium.mix, WINDOW_NS) is not None
    assert is_worthwhile(heavy.placement, medium.placement, nodes)
    assert is_worthwhile(colocated(nodes), heavy.placement, nodes)
