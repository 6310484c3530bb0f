"""TridentServe's batches (appendix E.1): which requests begin together, that none is late by it, and merged encodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import batched, planned, request, shipped, simulate
from policy.published.test_tridentserve_placement import FLUX, VIDEO, ask, by_declared, serve, waiting
from stages import DECODE, DIFFUSE, ENCODE
from tilework.core.work import Plan
from tilework.cost.table_costs import TableCosts
from tilework.policy.placement.launch import batch_ns, optimal_batch
from tilework.policy.published.tridentserve.policy import TridentServe
from tilework.sim.trace import Trace

GB = 10**9
TABLE = batched(0.09, 0.01)
"""A step takes 100 ms alone, 110 for two, 130 for four, 170 for eight: four are optimal."""


def together(plan: Plan, stage: str = DIFFUSE) -> list[tuple[int, ...]]:
    return [start.job_ids for start in plan.starts if start.stage.name == stage]


def shared(trace: Trace, stage: str = DIFFUSE) -> set[tuple[int, ...]]:
    return {run.work.job_ids for run in trace.runs if run.work.stage.name == stage}


# The optimal batch.


@pytest.mark.parametrize(
    ("size", "diffuse"), [("128x128", 4), ("256x256", 2), ("512x512", 1), ("1024x1024", 1), ("4096x4096", 1)]
)
def test_optimal_batches_are_the_published_ones(size: str, diffuse: int) -> None:
    for table in (FLUX, shipped("sd3medium_l20")) if size != "4096x4096" else (FLUX,):
        costs = TableCosts(table)
        asked = replace(ask("a", 0.0, size), pipeline=table.rows[0].pipeline)
        stages = costs.start(asked).itinerary.stages
        assert [optimal_batch(stage, asked, costs, 100 * GB) for stage in stages] == [8, diffuse, 1]


def test_a_batch_has_room() -> None:
    """Four of 128 px need 569 MB for a step."""
    costs, asked = TableCosts(FLUX), ask("a", 0.0, "128x128")
    step = costs.graph("flux.1").stepped[0]
    assert [optimal_batch(step, asked, costs, mb * GB // 1000) for mb in (568, 569)] == [2, 4]
    assert optimal_batch(step, asked, TableCosts(FLUX, max_batch=3), GB) == 2
    alone_ns = costs.work_ns(step, (asked,), 1)
    assert batch_ns(step, asked, 5, costs, GB) == costs.work_ns(step, (asked,) * 4, 1) + alone_ns


# Which requests begin together.


def test_requests_of_one_class_begin_together() -> None:
    """Of six on one device the four most urgent, each encoded by itself, since an encode cannot be shared here."""
    asked = [request(str(n), slo_s=20.0 - n) for n in range(6)]
    plan = planned(TridentServe(), asked, 1, TableCosts(TABLE))
    assert together(plan) == [(5, 4, 3, 2)]
    assert together(plan, ENCODE) == [(5,), (4,), (3,), (2,)]
    assert all(start.why.endswith("in one batch with 3 more") for start in plan.starts)
    assert together(planned(TridentServe(), asked, 2, TableCosts(TABLE))) == [(5, 4, 3, 2), (1, 0)]
    assert together(planned(TridentServe(batches=False), asked, 1, TableCosts(TABLE))) == [(5,)]


def test_requests_of_other_classes_and_those_that_share_nothing_begin_by_themselves() -> None:
    asked = [request("a", slo_s=9.0), request("steps", steps=9, slo_s=9.0), request("side", side=64, slo_s=9.0)]
    asked += [replace(asked[0], exact=True), replace(asked[0], passes=1.5)] * 2
    assert sorted(together(planned(TridentServe(), asked, 7, TableCosts(TABLE)))) == [(n,) for n in range(7)]


def test_no_request_is_late_by_its_batch() -> None:
    """Ten steps take 1 s alone, 1.1 s for two, and 1.2 s for three; who is late anyway does not matter."""
    tight, roomy, late = request("tight", slo_s=1.15), request("roomy", slo_s=9.0), request("late", slo_s=0.5)
    costs = TableCosts(TABLE)
    assert together(planned(TridentServe(), [tight, roomy], 1, costs)) == [(0, 1)]
    assert together(planned(TridentServe(), [tight, roomy, roomy], 2, costs)) == [(0, 1), (2,)]
    assert together(planned(TridentServe(), [replace(tight, deadline_ns=10**9), roomy], 2, costs)) == [(0,), (1,)]
    dropped = planned(TridentServe(), [roomy, late], 1, costs, aside=(1,))
    assert together(dropped) == [(0, 1)]


def test_a_batch_is_worth_what_its_members_are() -> None:
    """A more urgent request of another size would get the device, if it were for one each."""
    asked = [request("other", side=64, slo_s=2.0), *(request(str(n), slo_s=3.0) for n in range(2))]
    assert together(planned(TridentServe(batches=False), asked, 1, TableCosts(TABLE))) == [(0,)]
    assert together(planned(TridentServe(), asked, 1, TableCosts(TABLE))) == [(1, 2)]


# Over time.


def test_a_batch_stays_together_until_it_is_done() -> None:
    """The first begins as it comes. Those that come meanwhile begin after it, and are decoded one by one."""
    requests = [request(str(n), 0.1 * n, steps=20, slo_s=30.0) for n in range(4)] + [request("later", 3.0, slo_s=30.0)]
    trace = simulate(requests, "tridentserve", num_devices=1, costs=TABLE)
    assert shared(trace) == {(0,), (1, 2, 3), (4,)}
    assert shared(trace, DECODE) == {(n,) for n in range(5)}
    assert max(ending.finish_ns for ending in trace.endings[:4]) == pytest.approx(20 * (0.1e9 + 0.12e9), rel=0.02)


def test_a_batch_of_flux_shares_its_encode_and_no_decode() -> None:
    plan = waiting(TridentServe(), TableCosts(FLUX), [ask(str(n), 0.0, "128x128") for n in range(10)], 46.3)
    assert together(plan, ENCODE) == together(plan) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    seen = serve([ask(str(n), 0.0, "128x128") for n in range(4)], num_devices=1)
    assert shared(seen.done) == {(0,), (1, 2, 3)}
    assert shared(seen.done, DECODE) == {(n,) for n in range(4)}


@pytest.mark.parametrize("is_exact", [False, True])
def test_encodes_on_auxiliaries_are_merged_if_they_may_be_shared(is_exact: bool) -> None:
    """Of clips that begin together on primaries without the encoder. They share no steps."""
    clips = [ask(str(n), 0.0, "1280x720x129", VIDEO, slo=None) for n in range(3)]
    asked = [replace(one, exact=is_exact) for one in clips]
    plan = waiting(by_declared([(clips[0], 1.0)]), TableCosts(VIDEO), asked, 46.3)
    encodes = sorted(tuple(sorted(job_ids)) for job_ids in together(plan, ENCODE))
    assert encodes == ([(0,), (1,), (2,)] if is_exact else [(0, 1, 2)])
    assert sorted(together(plan)) == [(0,), (1,), (2,)]
    assert [start.stage.name for start in plan.starts][:2] == [ENCODE, ENCODE if is_exact else DIFFUSE]
