"""Policies that decide by the weights that devices have: which request a free device begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from builders import shipped, simulate
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.table import CostTable
from tilework.policy import registry
from tilework.sim.trace import Trace
from tilework.sim.workloads.registry import make_workload
from tilework.sim.workloads.requests import to_requests
from tilework_lab.policies.residency import LeastRecentlyUsed

POLICIES = ("fifo-load", "sticky", "lru", "deadline-lru", "deadline-belady")
COSTS = shipped("gentd26")
ALONE_S = 8.9  # A request of the first checkpoint, and about that of the others here.


def wanted(uid: str, rank: int, arrival_s: float = 0.0, slo_s: float | None = None) -> Request:
    arrival_ns = ns_from_s(arrival_s)
    return Request(
        uid=uid,
        pipeline=f"gentd26-{rank:02}",
        shape=Shape(512, 512),
        steps=30,
        arrival_ns=arrival_ns,
        deadline_ns=None if slo_s is None else arrival_ns + ns_from_s(slo_s),
    )


def served(trace: Trace) -> list[tuple[str, int]]:
    """Each request in the order in which they began, and its device."""
    by_job = {ending.job_id: ending.request.uid for ending in trace.endings}
    return [(by_job[run.work.job_ids[0]], run.devices[0]) for run in sorted(trace.runs, key=lambda run: run.start_ns)]


def order(policy: str, *requests: Request, num_devices: int = 1) -> list[str]:
    trace = simulate(list(requests), policy, num_devices=num_devices, costs=COSTS)
    return [uid for uid, _ in served(trace)]


@pytest.mark.parametrize("policy", POLICIES)
def test_each_request_runs_once_from_beginning_to_end(policy: str) -> None:
    requests = to_requests(make_workload("gentd26", {"to_hour": 15}).requests(1))
    trace = simulate(requests, policy, num_devices=4, costs=COSTS)
    assert sorted(run.work.job_ids for run in trace.runs) == [(index,) for index in range(len(requests))]


def test_fifo_load_serves_in_order_of_arrival_and_loads_each_time() -> None:
    arrivals = [wanted("a", 1), wanted("b", 2, 1.0), wanted("c", 3, 2.0), wanted("d", 1, 3.0)]
    assert order("fifo-load", *arrivals) == ["a", "b", "c", "d"]


def test_lru_serves_what_loads_least() -> None:
    arrivals = [wanted("a", 1), wanted("b", 2, 1.0), wanted("c", 3, 2.0), wanted("d", 1, 3.0)]
    assert order("lru", *arrivals) == ["a", "d", "b", "c"]


def test_lru_chooses_the_device_that_loads_least() -> None:
    arrivals = [wanted("a", 1), wanted("b", 2), wanted("c", 2, 100.0), wanted("d", 1, 100.0)]
    trace = simulate(arrivals, "lru", num_devices=2, costs=COSTS)
    assert served(trace)[2:] == [("c", 1), ("d", 0)] or served(trace)[2:] == [("d", 0), ("c", 1)]
    assert len(trace.loads) == 2


def test_lru_lets_none_wait_beyond_its_patience() -> None:
    """Requests of the first checkpoint come faster than they are served; another waits until 300 s are over."""
    stream = [wanted(f"s{index}", 1, 8.0 * index) for index in range(80)]
    trace = simulate([*stream, wanted("other", 2, 1.0)], "lru", num_devices=1, costs=COSTS)
    begun = [uid for uid, _ in served(trace)]
    patience_s = LeastRecentlyUsed().patience_ns / NS_PER_S
    assert begun.index("other") == pytest.approx(patience_s / ALONE_S - 2, abs=3)


def test_sticky_keeps_each_pipeline_at_its_home() -> None:
    """Two pipelines have their home on each of two devices; one that is free does not help the other."""
    ranks = (1, 2, 3, 4, 1, 1, 3, 2)
    arrivals = [wanted(f"{index}", rank, float(index)) for index, rank in enumerate(ranks)]
    trace = simulate(arrivals, "sticky", num_devices=2, costs=COSTS)
    homes = {(ranks[int(uid)], device) for uid, device in served(trace)}
    assert homes == {(1, 0), (2, 1), (3, 0), (4, 1)}
    assert [uid for uid, device in served(trace) if device == 0] == ["0", "2", "4", "5", "6"], "in order of arrival"


def test_deadline_lru_serves_the_earliest_deadline_that_can_be_met_with_its_load() -> None:
    """The second checkpoint takes 33 s to load: "tight" can be met without that, not with it."""
    first = wanted("first", 1)
    tight, loose, here = wanted("tight", 2, 1.0, 60.0), wanted("loose", 3, 1.0, 500.0), wanted("here", 1, 1.0, 400.0)
    assert order("deadline-lru", first, tight, loose, here) == ["first", "here", "loose", "tight"]
    possible = wanted("possible", 2, 1.0, 90.0)
    assert order("deadline-lru", first, possible, loose, here) == ["first", "possible", "here", "loose"]


def test_deadline_lru_serves_what_loads_least_where_none_can_be_on_time() -> None:
    first, late, here = wanted("first", 1), wanted("late", 2, 1.0, 5.0), wanted("here", 1, 2.0, 5.0)
    assert order("deadline-lru", first, late, here) == ["first", "here", "late"]


def test_deadline_belady_reads_as_little_as_can_be() -> None:
    """One device with room for two checkpoints, and a host that keeps none: the fewest reads by brute force."""
    for seed in range(8):
        ranks = [Random(seed).randint(1, 4) for _ in range(12)]
        reads = num_reads("deadline-belady", ranks, host_bytes=0)
        assert reads == fewest_reads(tuple(ranks)) <= num_reads("deadline-lru", ranks, host_bytes=0), ranks
    turns = (1, 2, 3, 1, 2, 3, 1, 2, 3)
    assert num_reads("deadline-lru", turns, host_bytes=0) == 9
    assert num_reads("deadline-belady", turns, host_bytes=0) == 6


def test_deadline_belady_chooses_what_a_host_forgets() -> None:
    """The device has room for one checkpoint, and the host for two: the first is asked for again before the second."""
    small = replace(COSTS, memory_bytes=COSTS.memory_bytes and COSTS.memory_bytes // 2)
    for policy, number in (("deadline-lru", 4), ("deadline-belady", 3)):
        assert num_reads(policy, (1, 2, 3, 1), host_bytes=2 * BYTES, costs=small) == number


def test_a_policy_that_needs_to_know_the_future_does_not_serve() -> None:
    with pytest.raises(registry.UnknownPolicy, match=r"'deadline-belady' .* only a simulation can run it"):
        registry.check_live("deadline-belady")
    registry.check_live("deadline-lru")


BYTES = (COSTS.memory_bytes or 0) // 2  # Of a checkpoint.


def num_reads(policy: str, ranks: Sequence[int], *, host_bytes: int, costs: CostTable = COSTS) -> int:
    """The loads from the disk if these checkpoints are asked for one after the other, each after the one before."""
    requests = [wanted(f"{index}", rank, 100.0 * index) for index, rank in enumerate(ranks)]
    trace = simulate(requests, policy, num_devices=1, costs=replace(costs, host_bytes=host_bytes))
    return sum(load.end_ns - load.start_ns > 10 * NS_PER_S for load in trace.loads)


def fewest_reads(ranks: tuple[int, ...], there: frozenset[int] = frozenset()) -> int:
    """The fewest that any choice of what two places drop makes possible."""
    if not ranks:
        return 0
    first, *rest = ranks
    if first in there:
        return fewest_reads(tuple(rest), there)
    kept = [there] if len(there) < 2 else [there - {one} for one in there]
    return 1 + min(fewest_reads(tuple(rest), one | {first}) for one in kept)
