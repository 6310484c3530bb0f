"""Works of several members: what becomes of the others when one is cancelled, stopped, fails or does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batching import Batches, Entangled, batching  # noqa: F401
from builders import controller, only, promise, request, table
from quick import quick
from stages import DIFFUSE, ENCODE, stage_of
from tilework.admission.reservation_guard import ReservationGuard, _by_job
from tilework.control.controller import ControllerConfig
from tilework.control.history_recorder import read_history
from tilework.control.log import entry_line, header_line, replay
from tilework.core.actions import DropState, Finish, RunWork, Stop
from tilework.core.events import (
    Cancelled,
    DeviceLost,
    Event,
    LeftOut,
    OutOfMemory,
    Stopped,
    Submitted,
    WorkFailed,
    WorkFinished,
)
from tilework.core.request import Request, Shape, Status
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan, Start, Work
from tilework.cost.memory import FORGET_NS
from tilework.policy import registry
from tilework.sim.config import SimConfig
from tilework.sim.faults import parse_faults
from tilework.sim.fuzz import run_seed
from tilework.sim.scenarios.scenario import scenario
from tilework.sim.simulation import Simulation

STEPS = stage_of("toy", DIFFUSE)


class Told(Batches):
    """Starts and stops what a test tells it to."""

    def __init__(self) -> None:
        super().__init__()
        self.next = Plan()

    def plan(self, *_: object) -> Plan:
        plan, self.next = self.next, Plan()
        return plan


class Desk:
    """A controller with two devices and a policy that does as it is told; every request given has been encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *requests: Request) -> None:
        self.policy, self.now_ns = Told(), 0
        monkeypatch.setitem(registry._GIVEN, "told", lambda: self.policy)
        self.control = controller("told", num_devices=2)
        for job_id, asked in enumerate(requests):
            self.tell(Submitted(asked))
            work = self.start(job_id, stage=ENCODE, num_steps=1)
            self.tell(WorkFinished(work.work_id, NS_PER_MS))

    def tell(self, event: Event) -> tuple[object, ...]:
        self.now_ns += NS_PER_MS
        return self.control.handle(event, self.now_ns)

    def start(self, *job_ids: int, device_id: int = 0, num_steps: int = 2, stage: str = DIFFUSE) -> Work:
        start = Start(stage=stage_of("toy", stage), job_ids=job_ids, devices=(device_id,), num_steps=num_steps, why="")
        actions = self.do(Plan(starts=(start,)))
        return next(action.work for action in actions if isinstance(action, RunWork))

    def do(self, plan: Plan) -> tuple[object, ...]:
        """Plan this, when something happens that changes nothing."""
        self.policy.next = plan
        return self.tell(Cancelled("nobody", ""))

    def done(self, *job_ids: int) -> list[int]:
        """How many steps of these jobs are done."""
        jobs = [self.control.tracker.jobs[job_id] for job_id in job_ids]
        return [job.request.steps - job.done.num_steps_left for job in jobs]


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch, *(request(uid, side=side, steps=9) for uid, side in (("a", 64), ("b", 128), ("c", 192))))


def first_steps(work: Work) -> list[int]:
    return [one.first_step for one in work.members]


def stops(actions: tuple[object, ...]) -> list[int]:
    return [action.work_id for action in actions if isinstance(action, Stop)]


def test_members_advance_together_each_from_where_it_is(desk: Desk) -> None:
    desk.tell(WorkFinished(desk.start(0, num_steps=3).work_id, NS_PER_MS))
    shared = desk.start(0, 1, 2)
    assert [(one.first_step, one.attempt) for one in shared.members] == [(3, 1), (0, 1), (0, 1)]
    desk.tell(WorkFinished(shared.work_id, NS_PER_MS))
    assert desk.done(0, 1, 2) == [5, 2, 2]


def test_a_shared_work_continues_when_a_member_is_cancelled(desk: Desk) -> None:
    shared, alone, last = desk.start(0, 1), desk.start(0), desk.start(0, 2)
    actions = desk.tell(Cancelled("a", "gone"))
    assert stops(actions) == [alone.work_id]
    assert [end.status for end in only(Finish, actions)] == [Status.CANCELLED]
    assert stops(desk.tell(Cancelled("c", "gone"))) == [last.work_id], "nobody is left in it"
    desk.tell(WorkFinished(shared.work_id, NS_PER_MS))
    assert desk.done(1) == [2]


@pytest.mark.parametrize(("gone", "news"), [((), 1), (("a",), 0)])
def test_a_batch_that_lost_a_member_corrects_nothing(desk: Desk, gone: tuple[str, ...], news: int) -> None:
    shared, version = desk.start(0, 1), desk.control.costs.version
    for uid in gone:
        desk.tell(Cancelled(uid, "gone"))
    desk.tell(WorkFinished(shared.work_id, 999 * NS_PER_MS))
    assert desk.control.costs.version == version + news


def test_a_stop_takes_all_that_hangs_together(desk: Desk) -> None:
    first, second = desk.start(0, 1), desk.start(1, 2)
    other = desk.start(2, device_id=1)
    assert stops(desk.do(Plan(stops=(0, 2)))) == [other.work_id, second.work_id, first.work_id], "each once, last first"
    assert all(desk.control.tracker.jobs[job_id].is_stopping for job_id in range(3))
    desk.tell(Stopped(first.work_id, 1))
    assert not desk.control.tracker.jobs[0].is_stopping
    with pytest.raises(AssertionError, match="job 1 is started while its stopped works"):
        desk.start(0, 1)
    desk.tell(Stopped(second.work_id, 0))
    desk.tell(Stopped(other.work_id, 0))
    assert desk.done(0, 1, 2) == [1, 1, 0]
    assert first_steps(desk.start(0, 1, 2)) == [1, 1, 0]


def test_no_member_is_stopped_if_one_may_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop of a promised one would leave no proof."""
    desk = Desk(monkeypatch, request("a"), promise("b", 0, 60), request("c"))
    shared = desk.start(0, 1)
    alone = desk.start(2, device_id=1)
    monkeypatch.setattr(ReservationGuard, "review_stop", lambda *_: None)
    assert not stops(desk.do(Plan(stops=(0,))))
    jobs = desk.control.tracker.jobs
    assert [(jobs[job_id].is_stopping, jobs[job_id].may_stop) for job_id in (0, 1)] == [(False, False)] * 2
    assert stops(desk.do(Plan(stops=(0, 2)))) == [alone.work_id]
    desk.tell(WorkFinished(shared.work_id, NS_PER_MS))
    assert [jobs[job_id].may_stop for job_id in (0, 1)] == [True, True], "they have made progress"


def test_a_failed_job_runs_alone_until_it_has_made_progress(desk: Desk) -> None:
    behind = desk.start(0, 1), desk.start(1, 2)
    actions = desk.tell(WorkFailed(behind[0].work_id, "broken"))
    assert not stops(actions), "the other one has a member that is well"
    jobs = desk.control.tracker.jobs
    assert [(jobs[job_id].failures, jobs[job_id].may_share) for job_id in range(3)] == [
        (1, False),
        (1, False),
        (0, True),
    ]
    desk.tell(LeftOut(behind[1].work_id, 1, "it has no state"))
    desk.tell(WorkFinished(behind[1].work_id, NS_PER_MS))
    assert desk.done(0, 1, 2) == [0, 0, 2]
    with pytest.raises(AssertionError, match="job 0 shares a work although its works fail"):
        desk.start(2, 0)
    desk.tell(WorkFinished(desk.start(0).work_id, NS_PER_MS))
    assert first_steps(desk.start(2, 0)) == [2, 2]


def test_a_left_out_member_restarts_and_the_others_continue(desk: Desk) -> None:
    shared = desk.start(0, 1)
    actions = desk.tell(LeftOut(shared.work_id, 0, "gone", state_lost=True))
    assert [(drop.job_id, drop.devices) for drop in only(DropState, actions)] == [(0, (0,))]
    job = desk.control.tracker.jobs[0]
    assert (job.attempt, job.failures, job.left.stage) == (2, 1, stage_of("toy", ENCODE))
    assert not desk.tell(LeftOut(shared.work_id, 0, "gone", state_lost=True)), "said twice"
    desk.tell(WorkFinished(shared.work_id, NS_PER_MS))
    assert desk.done(0, 1) == [0, 2]
    assert not desk.tell(LeftOut(shared.work_id, 1, "late")), "the work has ended"


def test_left_out_members_of_a_later_work_are_handled_in_order(desk: Desk) -> None:
    """The report on the second work overtakes that on the first, without which nobody knows what to make of it."""
    first, second = desk.start(0, 1), desk.start(0, 2, device_id=1)
    desk.tell(LeftOut(second.work_id, 0, "it has no state"))
    desk.tell(WorkFinished(second.work_id, NS_PER_MS))
    assert desk.done(0, 2) == [0, 0]
    desk.tell(WorkFailed(first.work_id, "broken"))
    assert desk.done(0, 2) == [0, 2]
    assert desk.control.tracker.jobs[0].failures == 1, "it failed once, and was not there because of that"


def test_a_lost_device_costs_others_nothing(desk: Desk) -> None:
    running, behind = desk.start(0, 1, device_id=1), desk.start(0, 2, device_id=0)
    actions = desk.tell(DeviceLost(1, "killed"))
    assert not stops(actions)
    assert [desk.control.tracker.jobs[job_id].attempt for job_id in range(3)] == [2, 2, 1]
    assert desk.tell(WorkFinished(running.work_id, NS_PER_MS)) == ()
    desk.tell(LeftOut(behind.work_id, 0, "it has no state"))
    desk.tell(WorkFinished(behind.work_id, NS_PER_MS))
    assert desk.done(0, 1, 2) == [0, 0, 2]


def test_a_work_that_ended_before_its_device_was_lost_is_not_lost(desk: Desk) -> None:
    """Its report came early: that on the work before it is still to come, from another device."""
    first, second = desk.start(0, 1), desk.start(0, device_id=1)
    desk.tell(WorkFinished(second.work_id, NS_PER_MS))
    desk.tell(DeviceLost(1, "killed"))
    desk.tell(WorkFinished(first.work_id, NS_PER_MS))
    assert desk.done(0, 1) == [4, 2]
    assert desk.control.tracker.jobs[0].failures == 0


def test_jobs_that_do_not_fit_together_may_fit_alone(desk: Desk) -> None:
    costs = desk.control.costs
    shapes = [Shape(side, side) for side in (64, 128, 192)]
    desk.tell(OutOfMemory(desk.start(0, 2).work_id, 1))
    assert desk.done(0, 2) == [1, 1], "what it had done is kept"
    assert [desk.control.tracker.jobs[job_id].failures for job_id in (0, 2)] == [0, 0], "it was news"
    assert costs.fits_together(STEPS, shapes[:2]), "as it is smaller"
    assert not costs.fits_together(STEPS, (shapes[0], shapes[2]))
    assert not costs.fits_together(STEPS, shapes), "as it is larger"
    assert all(costs.fits(STEPS, shape, 1) for shape in (*shapes, Shape(1024, 1024))), "alone is another matter"
    desk.tell(OutOfMemory(desk.start(0, 2).work_id, 0))
    assert [desk.control.tracker.jobs[job_id].failures for job_id in (0, 2)] == [1, 1], "it was known"
    desk.now_ns += FORGET_NS
    desk.tell(Cancelled("nobody", ""))
    assert costs.fits_together(STEPS, shapes)


def test_a_job_that_does_not_fit_alone_does_not_fit_in_a_batch(desk: Desk) -> None:
    desk.tell(OutOfMemory(desk.start(2).work_id, 0))
    assert not desk.control.costs.fits_together(STEPS, (Shape(64, 64), Shape(192, 192)))
    assert desk.control.costs.fits_together(STEPS, (Shape(128, 128),) * 4), "which are more pixels"


def test_a_limit_of_several_ends_when_as_many_fit(desk: Desk) -> None:
    desk.tell(OutOfMemory(desk.start(0, 1).work_id, 0))
    assert not desk.control.costs.fits_together(STEPS, (Shape(64, 64), Shape(128, 128)))
    desk.tell(WorkFinished(desk.start(0, 1).work_id, NS_PER_MS))
    assert desk.control.costs.fits_together(STEPS, (Shape(64, 64), Shape(128, 128)))


def test_a_work_whose_member_has_ended_changes_no_costs(desk: Desk) -> None:
    shared = desk.start(0, 1)
    desk.tell(Cancelled("a", "gone"))
    desk.tell(OutOfMemory(shared.work_id, 0))
    assert desk.control.costs.forgets_ns is None
    assert desk.control.tracker.jobs[1].failures == 0


@pytest.mark.parametrize(
    ("job_ids", "devices", "stage", "why"),
    [
        ((0, 0), (0,), DIFFUSE, "twice"),
        ((0, 1), (0, 1), DIFFUSE, "2 devices"),
        ((3, 4), (0,), ENCODE, "is started for 2 jobs"),
    ],
)
def test_illegal_batches_are_bugs_of_the_policy(
    desk: Desk, job_ids: tuple[int, ...], devices: tuple[int, ...], stage: str, why: str
) -> None:
    desk.tell(Submitted(request("d")))
    desk.tell(Submitted(request("e")))
    start = Start(stage=stage_of("toy", stage), job_ids=job_ids, devices=devices, num_steps=1, why="")
    with pytest.raises(AssertionError, match=why):
        desk.do(Plan(starts=(start,)))


def test_the_guard_takes_together_what_hangs_together(desk: Desk) -> None:
    starts = [
        Start(stage=STEPS, job_ids=job_ids, devices=(0,), num_steps=1, why="") for job_ids in ((0,), (2,), (1,), (1, 2))
    ]
    parts = _by_job(starts, desk.control.tracker)
    assert sorted([start.job_ids for start in part] for part in parts) == [[(0,)], [(2,), (1,), (1, 2)]]


# In simulation.


def mix(count: int) -> list[Request]:
    sides = (64, 128, 192)
    return [request(str(index), 0.01 * index, side=sides[index % 3], steps=3 + index % 5) for index in range(count)]


@pytest.mark.parametrize("policy", ["batches", "entangled"])
def test_jobs_join_and_leave_and_each_makes_its_steps_once(policy: str) -> None:
    simulation = Simulation(ControllerConfig(policy=policy), table(), SimConfig(num_devices=2))
    trace = simulation.run(mix(12))
    for ending in trace.endings:
        assert ending.status is Status.DONE
        assert ending.image is not None
        assert ending.image.position == ending.request.steps + 2
    shared = [set(run.work.job_ids) for run in trace.runs if len(run.work.job_ids) > 1]
    assert len(shared) > 5
    assert len({frozenset(members) for members in shared}) > 3, "they are formed anew"


def test_a_log_with_batches_is_read_back_and_replayed() -> None:
    config = ControllerConfig(policy="entangled")
    one = scenario(4, "entangled", parse_faults(["error=0.1", "crash=0.05:1", "checkpoint=0.1"]))
    requests = tuple(replace(asked, exact=False) for asked in one.requests)
    simulation = Simulation(config, one.table, one.config)
    lines = [header_line("test", config, one.table)]
    simulation.run(requests, one.cancels, lambda event, actions, t: lines.append(entry_line(event, actions, t)))
    left_out = sum('"is":"LeftOut"' in line for line in lines)
    assert left_out
    assert replay(lines) == (len(lines) - 1, None)
    lacking = [lost for lost in read_history(lines).lost if lost.reason == "its device does not have its state"]
    assert 0 < len(lacking) <= left_out, "to whoever was left out of a work that had not ended, it is lost"
    assert {(len(lost.work.job_ids), lost.steps, lost.end_ns - lost.start_ns) for lost in lacking} == {(1, 0, 0)}


@pytest.mark.parametrize("policy", quick(("entangled",), ("batches", "entangled")))
def test_batches_keep_the_invariants_under_faults(policy: str) -> None:
    verdicts = [run_seed(seed, policy) for seed in range(25)]
    bad = [f"seed {verdict.seed}: {verdict.violation}" for verdict in verdicts if verdict.violation]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "kind", quick(["oom=0.05"], ["crash=0.05:2", "hang=0.03:2", "error=0.05", "oom=0.05", "memory=1:0.6"])
)
def test_each_fault_by_itself(kind: str) -> None:
    struck = 0
    for seed in range(6):
        verdict = run_seed(seed, "entangled", parse_faults([kind]))
        assert not verdict.violation, f"seed {seed}: {verdict.violation}"
        struck += sum(verdict.fault_counts.values())
    assert struck > 5
