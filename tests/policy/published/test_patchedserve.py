"""PatchedServe's Algorithm 1 and its baselines, decision by decision: which jobs make steps together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from builders import PIPELINE, finished, groups, planned, request, simulate
from stages import DIFFUSE
from tilework.core.cost_row import CostRow
from tilework.core.request import Request
from tilework.core.time import NS_PER_S
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.policy.published.patchedserve import PatchedServe
from tilework.policy.toolkit.continuous_batching import MOST_AHEAD
from tilework.sim.trace import Trace
from tilework_lab.compare.figures import preemptions
from tilework_lab.policies.patchedserve_baselines import MixedCache, Nirvana

SMALL, LARGE = 64, 128
# Seconds of a step: 0.06 and 0.04 for each small one, 0.16 for each large one. Ten steps alone: 1.0 and 2.2 s.
PACKED = CostTable(
    hardware="toy",
    rows=tuple(
        CostRow(
            pipeline=PIPELINE,
            stage=DIFFUSE,
            height=side,
            width=side,
            degree=degree,
            batch=batch,
            seconds=0.06 + batch * each_s / degree,
        )
        for side, each_s in ((SMALL, 0.04), (LARGE, 0.16))
        for degree, batches in ((1, range(1, 13)), (4, (1,)))
        for batch in batches
    ),
)


def small(uid: str, arrival_s: float = 0.0, slo_s: float | None = 30.0, steps: int = 10) -> Request:
    return request(uid, arrival_s, side=SMALL, slo_s=slo_s, steps=steps)


def large(uid: str, arrival_s: float = 0.0, slo_s: float | None = 30.0, steps: int = 10) -> Request:
    return request(uid, arrival_s, side=LARGE, slo_s=slo_s, steps=steps)


def first_batch(policy: PatchedServe | MixedCache | Nirvana, *requests: Request, most: int = 12) -> list[str]:
    """The jobs that make the first steps on one idle device, in the order in which they entered the batch."""
    plan = planned(policy, list(requests), costs=TableCosts(PACKED, max_batch=most))
    # Those that begin are encoded first, which costs nothing here; with many, the steps wait for the next plan.
    ids = dict.fromkeys(job_id for start in plan.starts for job_id in start.job_ids)
    return [requests[job_id].uid for job_id in ids]


def batches(trace: Trace, device_id: int = 0) -> list[str]:
    """The jobs that make steps together, work by work, in alphabetical order; the same ones in a row once."""
    uids = {ending.job_id: ending.request.uid for ending in trace.endings}
    found: list[str] = []
    for run in sorted(trace.runs, key=lambda run: (run.start_ns, run.work.work_id)):
        together = "".join(sorted(uids[job_id] for job_id in run.work.job_ids))
        if run.work.stage.name == DIFFUSE and run.devices == (device_id,) and found[-1:] != [together]:
            found.append(together)
    return found


def run(policy: str, requests: Sequence[Request], num_devices: int = 1) -> Trace:
    return simulate(list(requests), policy, num_devices=num_devices, costs=PACKED)


def end_s(trace: Trace, uid: str) -> float:
    return next(one.finish_ns for one in trace.endings if one.request.uid == uid) / NS_PER_S


# Algorithm 1: which jobs enter a batch.


def test_urgent_mode_takes_the_job_with_the_least_slack_for_its_size() -> None:
    """Both are due at 3 s: the large one has (3.0 - 2.2) / 2.2 = 0.36 of slack, the small one (3.0 - 1.0) / 1.0 = 2."""
    requests = small("a", slo_s=3.0), large("B", slo_s=3.0)
    assert first_batch(PatchedServe(), *requests, most=1) == ["B"]
    assert first_batch(PatchedServe(), *reversed(requests), most=1) == ["B"]


def test_throughput_mode_takes_the_jobs_with_which_the_batch_makes_most_pictures() -> None:
    """The large one has least slack, but (20 - 2.2) / 2.2 = 8.1 is relaxed: two small ones make 2 / 0.14 s, with it
    2 / 0.26 s."""
    requests = large("A", slo_s=20.0), small("b"), small("c")
    assert first_batch(PatchedServe(), *requests, most=2) == ["b", "c"]
    assert first_batch(PatchedServe(relaxed=9.0), *requests, most=2)[0] == "A"


def test_the_mode_is_chosen_again_for_each_accepted_job() -> None:
    """First the large one, which is urgent; the others are relaxed, and the small one makes more of the batch."""
    requests = large("A", slo_s=4.0), large("B"), small("c")
    assert first_batch(PatchedServe(), *requests, most=2) == ["A", "c"]


@pytest.mark.parametrize(("slo_s", "members"), [(2.2, "A"), (2.6, "Ab"), (2.99, "Ab"), (3.0, "Abc")])
def test_the_schedulability_test_accepts_as_many_as_make_none_late(slo_s: float, members: str) -> None:
    """Ten steps of the large one take 2.2 s alone, 2.6 s with a small one, 3.0 s with two."""
    requests = large("A", slo_s=slo_s), small("b"), small("c")
    assert first_batch(PatchedServe(), *requests) == list(members)


def test_a_request_that_would_be_late_in_the_batch_is_served_when_no_other_waits() -> None:
    """Alone it would take 1 s, in the batch 2.6 s; members are not preempted. On another device it is in time."""
    requests = large("A"), small("b", 0.1, slo_s=1.5), small("c", 0.3, slo_s=9.0)
    trace = run("patchedserve", requests)
    assert batches(trace) == ["A", "Ac", "c", "b"]
    assert [ending.on_time for ending in trace.endings] == [True, False, True]
    assert trace.endings[1].status.name == "DONE"
    both = run("patchedserve", requests, num_devices=2)
    assert all(ending.on_time for ending in both.endings)


def test_a_member_stays_to_its_end() -> None:
    requests = [large("A"), *(small(uid, 0.1 + index / 4, slo_s=4.0) for index, uid in enumerate("bcd"))]
    trace = run("patchedserve", requests)
    assert batches(trace) == ["A", "Ab", "Abc", "Abcd", "bcd", "cd", "d"]
    assert preemptions(trace.runs) == (0, 0)


def test_a_member_that_can_no_longer_be_on_time_makes_room() -> None:
    """The works take as long as they should; the deadline could not be met from the beginning."""
    requests = large("A", slo_s=1.0), small("b", 0.5, slo_s=2.0)
    trace = run("patchedserve", requests)
    assert batches(trace) == ["A", "b", "A"]
    assert [ending.on_time for ending in trace.endings] == [False, True]


def test_a_batch_has_twelve_members_at_most() -> None:
    trace = run("patchedserve", [small(uid) for uid in "abcdefghijklmno"])
    assert max(map(len, batches(trace))) == 12


def test_no_job_without_a_deadline_starves_and_late_ones_run_after_ten_minutes() -> None:
    """A stream of small ones, of which a device can do more; each has a second to spare."""
    stream = [small(f"s{index}", 0.7 * index, slo_s=2.5) for index in range(900)]
    trace = run("patchedserve", [large("patient", slo_s=None), large("late", slo_s=1.0), *stream])
    assert end_s(trace, "patient") < 70
    assert end_s(trace, "late") < 610
    assert sum(ending.on_time for ending in trace.endings[2:]) > 850


# Which device serves which job.


def test_a_newcomer_goes_to_the_device_with_the_least_to_do_and_stays_there() -> None:
    """A large one takes 2.2 s, a small one 1.0 s."""
    requests = large("A"), small("b", 0.01), small("c", 0.02), small("d", 0.03), small("e", 0.04)
    assert groups(run("patchedserve", requests, num_devices=2)) == {
        "A": [(0,)],
        "b": [(1,)],
        "c": [(1,)],
        "d": [(1,)],
        "e": [(0,)],
    }


def test_pipelines_do_not_share_a_batch() -> None:
    other = replace(PACKED, rows=PACKED.rows + tuple(replace(row, pipeline="other") for row in PACKED.rows))
    requests = [small("a"), replace(small("b"), pipeline="other"), small("c")]
    trace = simulate(requests, "mixed-cache", num_devices=1, costs=other)
    assert batches(trace) == ["a", "ac", "c", "b"]


def test_a_device_gets_few_works_ahead_even_if_many_jobs_begin() -> None:
    plan = planned(MixedCache(), [small(uid) for uid in "abcdefgh"], costs=TableCosts(PACKED))
    assert [start.stage.name for start in plan.starts] == ["encode"] * MOST_AHEAD
    trace = run("mixed-cache", [small(uid) for uid in "abcdefgh"])
    assert batches(trace) == ["a", "abcdefgh", "bcdefgh"], "the first begins alone; the next steps wait for all"


# The baselines.


def test_mixed_cache_is_first_come_first_served_for_all_sizes() -> None:
    assert first_batch(MixedCache(), large("A"), small("b", slo_s=1.1), small("c"), most=2) == ["A", "b"]
    requests = large("A"), small("b", 0.1, slo_s=1.5), small("c", 0.3)
    assert batches(run("mixed-cache", requests)) == ["A", "Ab", "Abc", "bc", "c"], "also those that will be late"


def test_nirvana_puts_equal_sizes_together_around_the_oldest() -> None:
    assert first_batch(Nirvana(), large("A"), small("b"), large("C")) == ["A", "C"]
    requests = small("a"), large("B", 0.1), small("c", 0.2), large("D", 0.3)
    trace = run("nirvana", requests)
    assert batches(trace) == ["a", "ac", "BD", "c"], "c joins a, and pauses when it is the turn of B"
    assert finished(trace) == ["a", "B", "D", "c"]


def test_distrifusion_runs_one_at_a_time_on_all_devices() -> None:
    trace = run("distrifusion", [large("A"), small("b"), small("c")], num_devices=4)
    assert groups(trace) == {uid: [(0, 1, 2, 3)] for uid in "Abc"}
    assert finished(trace) == ["A", "b", "c"]
    assert end_s(trace, "A") == pytest.approx(10 * (0.06 + 0.16 / 4), abs=0.01)
