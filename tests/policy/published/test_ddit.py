"""DDiT's greedy allocation and its baselines, told by groups. The paper's examples are in `test_papers`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import CLIP_STEPS_S, clip, finished, groups, poisson, profile, request, simulate, table
from quick import quick
from tilework.core.request import Request, Status
from tilework.core.time import NS_PER_S
from tilework.core.work import Group
from tilework_lab.policies.partition.division import divide, share

VIDEO, STEPS = profile(CLIP_STEPS_S, decode_s=0.5), profile(CLIP_STEPS_S)


def test_a_newcomer_takes_what_suits_it_and_no_more() -> None:
    requests = [clip(str(best), 0.0, best) for best in (1, 2, 4)]
    trace = simulate(requests, "ddit", num_devices=8, costs=VIDEO)
    assert [len(visited[0]) for visited in groups(trace).values()] == [1, 2, 4]


def test_the_most_starved_job_is_promoted_first() -> None:
    """Five devices: one request has two, the next gets two of its four, the third the last one.

    When the first is done, the third has lost more by far, though it came later: it takes one device more, since there
    are not enough for four. By arrival, the second would have got both.
    """
    requests = [clip("first", 0.0, 2, steps=20), clip("second", 0.1, 4), clip("third", 0.2, 4)]
    visited = groups(simulate(requests, "ddit", num_devices=5, costs=STEPS))
    assert [len(group) for group in visited["second"]] == [2]
    assert [len(group) for group in visited["third"]] == [1, 2, 4]


def test_starved_jobs_go_before_waiting_ones() -> None:
    """Six devices: when the steps of the first are done, three are released, and a fourth when it is decoded.

    Two are held for the hungry one, which is in the middle of a step; waiting ones get the remaining devices.
    """
    requests = [clip("first", 0.0, 4, steps=20), clip("hungry", 0.1, 4), clip("waits", 0.2, 2, steps=5)]
    trace = simulate(requests, "ddit", num_devices=6, costs=VIDEO)
    visited = groups(trace)
    assert [len(group) for group in visited["hungry"]] == [2, 4]
    assert len(visited["waits"][0]) == 1
    released_ns = min(run.start_ns for run in trace.runs if run.work.job_ids == (2,))
    assert any(run.start_ns < released_ns < run.end_ns for run in trace.runs if run.work.job_ids == (1,))


def test_first_come_first_served() -> None:
    requests = [clip("long", 0.0, 1, steps=100), clip("wide", 0.1, 4), clip("short", 0.2, 1, steps=1)]
    assert finished(simulate(requests, "ddit", num_devices=1, costs=VIDEO)) == ["long", "wide", "short"]


@pytest.mark.parametrize(("policy", "order"), [("ddit", ["a", "late", "b"]), ("ddit-drop", ["a", "b", "late"])])
def test_requests_that_are_late_anyway_may_be_dropped_to_best_effort(policy: str, order: list[str]) -> None:
    requests = [request("a"), request("late", 0.1, slo_s=0.5), request("b", 0.2, slo_s=2.5)]
    assert finished(simulate(requests, policy, num_devices=1)) == order


@pytest.mark.parametrize("policy", quick(("ddit", "bucketed"), ("ddit", "ddit-drop", "bucketed", "spci", "dpci", "dp")))
@settings(max_examples=8)
@given(seed=st.integers(0, 1000), rate=st.floats(0.5, 4), num_devices=st.integers(1, 5))
def test_every_request_is_served_and_each_simulation_is_the_same(
    policy: str, seed: int, rate: float, num_devices: int
) -> None:
    requests, costs = poisson(12, rate, seed), table(degrees=(1, 2, 4))
    trace = simulate(requests, policy, num_devices=num_devices, costs=costs)
    assert [ending.status for ending in trace.endings] == [Status.DONE] * 12
    assert trace == simulate(requests, policy, num_devices=num_devices, costs=costs)


# Clusters.


WARM = [clip(f"warm {best}", 0.0, best, 1) for best in (1, 2, 4)]  # So that each type is known.


def served(requests: Sequence[Request], policy: str) -> dict[str, list[Group]]:
    """The groups of those that come after each type has come once, on eight devices."""
    visited = groups(simulate([*WARM, *requests], policy, num_devices=8, costs=VIDEO))
    return {one.uid: visited[one.uid] for one in requests}


def widths(requests: Sequence[Request], policy: str) -> list[int]:
    visited = list(served(requests, policy).values())
    assert all(len(found) == 1 for found in visited), "a job that has a group keeps it"
    return [len(found[0]) for found in visited]


def clips(*bests: int) -> list[Request]:
    return [clip(str(index), 9 + index / 100, best) for index, best in enumerate(bests)]


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=6), more=st.integers(0, 20))
def test_devices_are_divided_in_proportion(weights: list[int], more: int) -> None:
    """All of them, at least one each; giving one from one part to another would not be fairer."""
    parts = divide(weights, len(weights) + more)
    assert sum(parts) == len(weights) + more
    assert min(parts) >= 1
    for weight, part in zip(weights, parts, strict=True):
        assert part == 1 or all(
            weight / part >= other / (others + 1) for other, others in zip(weights, parts, strict=True)
        )


def test_with_few_devices_neighbours_share() -> None:
    kinds = [(size, "", False) for size in range(4)]
    assert share(kinds, [5, 1, 2, 9], 4) == [
        ((kind,), weight) for kind, weight in zip(kinds, [5, 1, 2, 9], strict=True)
    ]
    assert share(kinds, [5, 1, 2, 9], 3) == [((kinds[0],), 5), ((kinds[1], kinds[2]), 3), ((kinds[3],), 9)]
    assert share(kinds, [5, 1, 2, 9], 1) == [(tuple(kinds), 17)]


def test_dpci_gives_each_type_groups_of_its_own_degree() -> None:
    """§6.1: with eight devices one of each, and another one for the device that is left over."""
    visited = served(clips(4, 2, 1, 4, 2, 1, 1), "dpci")
    assert [found[0] for found in visited.values()] == [
        (0, 1, 2, 3), (4, 5), (6,), (0, 1, 2, 3), (4, 5), (7,), visited["6"][0],
    ]  # fmt: skip
    assert visited["6"][0] in ((6,), (7,))


def test_dp_sends_a_request_without_room_in_its_cluster_to_a_narrower_one() -> None:
    """§6.1: "a B = 4 request facing resource saturation in its native cluster can be downgraded to a B = 2 cluster"."""
    assert widths(clips(4, 4, 4, 4), "dpci") == [4, 4, 4, 4]
    assert widths(clips(4, 4, 4, 4), "dp") == [4, 2, 1, 1]
    assert widths(clips(2, 2, 2), "dp") == [2, 1, 1], "and none to a wider one"
    assert widths(clips(4), "dp") == [4], "nor without need"


def test_spci_has_one_degree_and_devices_by_the_number_of_requests() -> None:
    requests = [*clips(*(1, 1, 1, 2, 4) * 8)]
    visited = served(requests, "spci")
    assert {len(group) for found in visited.values() for group in found} == {1}
    devices = {
        best: {visited[one.uid][0] for one in requests[20:] if one.shape.height == 64 * best.bit_length()}
        for best in (1, 2, 4)
    }
    assert len(devices[1]) > len(devices[2]) >= len(devices[4]) > 0
    assert not (devices[1] & devices[2] | devices[1] & devices[4])


def test_in_buckets_a_flood_of_large_requests_does_not_delay_small_ones() -> None:
    small = [clip(f"small {index}", 10 + index, 1, 10) for index in range(10)]
    flood = [clip(f"large {index}", 9 + index / 100, 4) for index in range(40)]
    latencies = {}
    for policy in ("bucketed", "rssp"):
        trace = simulate(
            sorted([*WARM, *small, *flood], key=lambda one: one.arrival_ns), policy, num_devices=8, costs=VIDEO
        )
        latencies[policy] = max(one.latency_ns for one in trace.endings if one.request.uid.startswith("small"))
    assert latencies["bucketed"] < 1.3 * NS_PER_S < 10 * NS_PER_S < latencies["rssp"]


def test_a_division_stays_as_it_is() -> None:
    """But for a new kind, other devices, and twice as many requests."""
    requests = clips(*(1, 1, 1, 4) * 16)
    visited = served(requests, "bucketed")
    assert len({group for one in requests[32:] for group in visited[one.uid] if one.shape.height == 192}) <= 3


def test_a_new_class_gets_devices_at_once() -> None:
    """And a job that has lost a device goes on with those that it has until it is done."""
    requests = [clip(str(index), index / 100, 4) for index in range(4)] + [clip("new", 1.0, 1, 1)]
    trace = simulate(requests, "dpci", num_devices=8, costs=VIDEO)
    assert trace.endings[4].latency_ns < 6 * NS_PER_S
    assert finished(trace)[-1] in "0123"
