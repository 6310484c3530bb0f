"""The history of a run, read from its log, and what it measured."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median

import pytest

from builders import PIPELINE, poisson, request, table
from recorded import Play, cancelled_at_work, find, record, recorded
from stages import DIFFUSE, stage_of
from tilework.cli.views.explanation import request_document
from tilework.control.controller import ControllerConfig
from tilework.control.history import PastWork
from tilework.control.history_recorder import read_history
from tilework.control.log import BadLog, entry_line, header_line
from tilework.control.measured import dispatch_ns, profiled_table
from tilework.core.actions import Reject
from tilework.core.component import Component, LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.events import (
    DeviceLost,
    ModelRemoved,
    ModelServed,
    Stopped,
    Submitted,
    Woke,
    WorkFailed,
    WorkFinished,
)
from tilework.core.lora import UsedLora
from tilework.core.request import OnMiss, RefusalCode, Shape, Status
from tilework.core.time import NS_PER_MS, NS_PER_S, s_from_ns
from tilework.core.work import Member, Work
from tilework.cost.table import CostTable
from tilework.cost.table_file import table_json
from tilework.sim.config import SimConfig
from tilework.sim.runs import RunEnd

HEADER = header_line("1.0", ControllerConfig(), table())


def test_the_history_equals_the_simulation() -> None:
    requests = poisson(40, 1.5, seed=9, slo_s=3.0)
    requests += [request(f"strict{i}", 3 + i, slo_s=0.9, on_miss=OnMiss.REJECT) for i in range(4)]
    cancels = cancelled_at_work(requests, 3, 12)
    lines, trace = record(requests, sim=SimConfig(num_devices=2, jitter=0.1), cancels=cancels)
    history = read_history(lines)
    assert {ending.status for ending in trace.endings} == {Status.DONE, Status.REJECTED, Status.CANCELLED}
    assert history.num_devices == 2
    past = {one.request.uid: one for one in history.requests}
    assert past.keys() == {ending.request.uid for ending in trace.endings}
    for ending in trace.endings:
        one = past[ending.request.uid]
        told = (one.request, one.status, one.finish_ns, one.job_id, one.eta_ns)
        assert told == (ending.request, ending.status, ending.finish_ns, ending.job_id, ending.eta_ns)
    executed = [(run.work, run.start_ns, run.end_ns, run.steps) for run in trace.runs if run.end is not RunEnd.STOPPED]
    assert [(w.work, w.start_ns, w.end_ns, w.steps) for w in history.works if w.run_ns is not None] == executed
    stopped = [(run.work, run.end_ns, run.steps) for run in trace.runs if run.end is RunEnd.STOPPED]
    assert [(w.work, w.end_ns, w.steps) for w in history.works if w.run_ns is None and w.steps] == stopped


def test_a_cut_off_log_leaves_its_requests_open() -> None:
    (past,) = read_history(record([request("a")])[0][:5]).requests
    assert (past.job_id, past.status, past.finish_ns) == (0, None, None)


def seconds_of(costs: CostTable) -> dict[tuple[str, str, int, int], float]:
    return {(row.pipeline, row.stage, row.width, row.degree): row.seconds for row in costs.rows}


def test_the_profiled_table_recovers_what_the_devices_cost() -> None:
    """Jitter averages out; the time in a device's queue is separated from the run time."""
    requests = [request(str(index), index * 0.5, side=(64, 128)[index % 2], steps=20) for index in range(120)]
    sim = SimConfig(num_devices=1, jitter=0.1, dispatch_ns=30 * NS_PER_MS)
    history = read_history(record(requests, sim=sim)[0])
    true, found = seconds_of(table()), seconds_of(profiled_table(history))
    assert found.keys() == true.keys()
    for key, seconds in found.items():
        assert seconds == pytest.approx(true[key], rel=0.05)
        assert (seconds == true[key]) == (key[2] == 192), "sizes that did not run keep their rows"
    assert dispatch_ns(history) == {1: 30 * NS_PER_MS}


def test_a_profiled_size_is_the_median_of_its_works_by_step() -> None:
    history = read_history(record([request("a", steps=11)], sim=SimConfig(num_devices=1, jitter=0.3, seed=5))[0])
    measured = [(w.run_ns or 0) / w.steps / NS_PER_S for w in history.works if w.work.stage.name == DIFFUSE]
    assert len(measured) > 2
    assert seconds_of(profiled_table(history))[PIPELINE, DIFFUSE, 128, 1] == median(measured)


def test_profiling_keeps_other_pipelines_and_degrees_and_ignores_unguided_requests() -> None:
    others = (
        replace(table().rows[0], pipeline="other", height=128, width=128, stage=DIFFUSE, seconds=7.0),
        replace(table().rows[0], degree=2, height=128, width=128, stage=DIFFUSE, seconds=0.06),
    )
    costs = replace(table(), rows=table().rows + others)
    sim = SimConfig(num_devices=1, jitter=0.2)
    guided, unguided = request("a"), replace(request("b"), guided=False)
    found = seconds_of(profiled_table(read_history(record([guided], sim=sim, costs=costs)[0])))
    assert (found["other", DIFFUSE, 128, 1], found[PIPELINE, DIFFUSE, 128, 2]) == (7.0, 0.06)
    assert found[PIPELINE, DIFFUSE, 128, 1] != 0.1
    alone = profiled_table(read_history(record([unguided], sim=sim, costs=costs)[0]))
    assert sorted(map(repr, alone.rows)) == sorted(map(repr, costs.rows))


def test_loads_are_as_fast_as_those_of_the_run() -> None:
    costs = replace(
        table(),
        components={PIPELINE: {"denoiser": Component("d", 1000), "vae": Component("v", 500)}},
        memory_bytes=1000,
        load_bytes_per_s={LoadSource.DISK: 2000.0, LoadSource.PEER: 7.0},
    )
    slower = replace(costs, load_bytes_per_s={**costs.load_bytes_per_s, LoadSource.DISK: 500.0})
    run = recorded([request("a"), request("b", 9.0)], costs=costs, devices=slower, sim=SimConfig(num_devices=1))
    assert len(run.trace.loads) >= 3
    speeds = profiled_table(run.history).load_bytes_per_s
    assert speeds == {LoadSource.DISK: pytest.approx(500.0), LoadSource.PEER: 7.0}, "nothing came from a peer"


def test_steps_with_loras_are_no_measurement_of_those_without() -> None:
    history = read_history(record([request("a"), request("b", 5.0)])[0])
    slow = [
        replace(past, work=replace(past.work, stage=replace(past.work.stage, loras=(UsedLora("ink", 1.0),))))
        for past in history.works
    ]
    slow = [replace(past, end_ns=past.end_ns + NS_PER_S, run_ns=(past.run_ns or 0) + NS_PER_S) for past in slow]
    changed = replace(history, works=(*history.works, *slow))
    assert profiled_table(changed).rows == profiled_table(history).rows


def test_a_profiled_batch_replaces_the_row_of_the_same_members_and_no_other() -> None:
    """The controller predicts 0.11 s; the devices take 0.09 s."""
    two, three = (Shape(64, 64), Shape(128, 128)), (Shape(128, 128),) * 3
    rows = [CostRow.of(batch, pipeline=PIPELINE, stage=DIFFUSE, seconds=0.11) for batch in (two, three)]
    costs, devices = (
        replace(table(), rows=(*table().rows, replace(rows[0], seconds=s), rows[1])) for s in (0.11, 0.09)
    )
    requests = [request("a"), request("b", side=64)]
    run = recorded(requests, "patchedserve", sim=SimConfig(num_devices=1), costs=costs, devices=devices)
    steps = {row.shapes: row.seconds for row in profiled_table(run.history).rows if row.stage == DIFFUSE}
    assert (steps[two], steps[three]) == (pytest.approx(0.09), 0.11)


def test_a_run_without_a_queue_has_no_dispatch_time() -> None:
    assert dispatch_ns(read_history([HEADER])) == {}


def past(work_id: int, start_ns: int, devices: tuple[int, ...], after: tuple[int, ...] = ()) -> PastWork:
    """A work of 100 ns."""
    work = Work(
        work_id=work_id,
        stage=stage_of(PIPELINE, DIFFUSE),
        members=(Member(0, 0, 1, 0),),
        devices=devices,
        num_steps=1,
        why="a test",
        after=after,
    )
    return PastWork(work=work, start_ns=start_ns, end_ns=start_ns + 100, steps=1, run_ns=100)


def test_dispatch_is_the_mean_gap_by_degree_after_the_last_work_before() -> None:
    works = (
        past(0, 0, (0,)),
        past(1, 50, (1,)),
        past(2, 106, (0,), (0,)),
        past(3, 300, (0, 1), (2, 1)),
        past(4, 420, (0, 1), (3,)),
        past(5, 900, (0, 1)),
        past(6, 1030, (0,), (5,)),
        past(7, 1133, (0,), (6,)),
    )
    assert dispatch_ns(replace(read_history([HEADER]), works=works)) == {1: 13, 2: 57}


def test_the_largest_hundredth_of_the_gaps_is_left_out() -> None:
    behind = [past(index, 100 + gap, (0,), (0,)) for index, gap in enumerate([10_000] * 2 + [5, 9] * 99, start=1)]
    history = replace(read_history([HEADER]), works=(past(0, 0, (0,)), *behind))
    assert dispatch_ns(history) == {1: 7}
    assert dispatch_ns(replace(history, works=history.works[:2])) == {1: 10_000}


@pytest.mark.parametrize(
    "entry",
    [
        entry_line(WorkFinished(9, 1), (), 0),
        entry_line(Stopped(9, 1), (), 0),
        entry_line(Woke(), (Reject("9", "no", None, RefusalCode.QUEUE),), 0),
    ],
)
def test_history_refuses_a_work_that_no_line_began(entry: str) -> None:
    with pytest.raises(BadLog, match=r"the log names '?9'?, which no earlier line began"):
        read_history([HEADER, entry])


def test_history_lists_failed_and_lost_works_apart() -> None:
    """They are not among the executed works."""
    lines, _ = record([request("a")])
    begun = find(lines, '"event":{"is":"WorkFinished"')
    broken = [*lines[:begun], *(entry_line(e, (), 10**7) for e in (WorkFailed(1, "broken"), DeviceLost(0, "gone")))]
    history = read_history(broken)
    assert history.works == ()
    assert [past.status for past in history.requests] == [None]


def test_a_log_of_models_that_came_and_went_is_read_with_their_costs() -> None:
    """A row of the added one has a stage that it lacks, as a server once wrote it; a second one has its name later."""
    play = Play("edf", 1, table())

    def serve(uid: str, step_s: float) -> None:
        costs = table_json(table(step_s=step_s, pipeline="other"))
        play.tell(ModelServed(json.dumps(costs)))
        costs["rows"].append({**costs["rows"][0], "stage": "export"})
        document = json.loads(play.lines[-1])
        document["event"]["costs"] = json.dumps(costs)
        play.lines[-1] = json.dumps(document)
        works = play.tell(Submitted(replace(request(uid, arrival_s=s_from_ns(play.now_ns)), pipeline="other")))
        while works:
            works = [*works[1:], *play.finish(works[0], 1.0)]
        play.tell(ModelRemoved("other"), 0.01)

    serve("a", step_s=0.1)
    serve("b", step_s=0.3)
    warnings: list[str] = []
    history = read_history(play.lines, warnings.append)
    assert len(warnings) == 2
    assert all("rows[" in warning and "'export'" in warning for warning in warnings)
    steps = {one.work.job_ids: one.predicted_ns for one in history.works if one.work.stage.name == DIFFUSE}
    assert len(steps) == 2
    first, second = (ns for ns in steps.values() if ns is not None)
    assert second > first, "what was learned of the first counts for the second no more"
    assert history.header.table.pipelines == (PIPELINE, "other")
    for past in history.requests:
        assert request_document(history, past)
    assert profiled_table(history)
