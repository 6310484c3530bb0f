"""The controller, case by case; `test_stateful` searches for other cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from builders import PIPELINE, SERVICE_S, controller, only, request
from scripted import Script, run, start
from stages import DECODE, DIFFUSE, ENCODE, stage_of
from tilework.control.controller import Controller
from tilework.core.actions import Accept, Action, DropState, DropToBestEffort, Finish, MoveState, RunWork, Stop, WakeAt
from tilework.core.events import (
    Broken,
    Cancelled,
    DeviceJoined,
    DeviceLost,
    Stopped,
    Submitted,
    Woke,
    WorkFailed,
    WorkFinished,
)
from tilework.core.request import Status
from tilework.core.time import NS_PER_MS, ns_from_s
from tilework.core.work import Group, Plan, Start
from tilework.policy import registry
from tilework.policy.registry import policy_names

Scripted = Callable[..., Controller]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """A controller whose policy returns these plans, from the first event after its devices have joined."""

    def build(*plans: Plan, num_devices: int = 2) -> Controller:
        monkeypatch.setitem(registry._GIVEN, "script", lambda: Script([Plan()] * num_devices + list(plans)))
        return controller("script", num_devices=num_devices, degrees=(1, 2, 3, 4))

    return build


def ran(actions: tuple[Action, ...]) -> list[tuple[int, str, int, Group]]:
    """(work, stage, steps, devices) of each work that was started."""
    works = [action.work for action in only(RunWork, actions)]
    return [(work.work_id, work.stage.name, work.num_steps, work.devices) for work in works]


def test_a_request_that_was_encoded_before_begins_with_its_steps() -> None:
    """Its conditioning goes to its device first; of two submitted together, only the other one is encoded."""
    control = controller(num_devices=2)
    event = Submitted(request("known"), (request("new"),), positions=(1, 0))
    actions = control.handle(event, 0)
    moves = [(move.job_id, move.stages) for move in only(MoveState, actions)]
    assert moves == [(0, (0,))]
    first = {
        work.job_ids[0]: (work.stage.name, work.members[0].position)
        for work in reversed([one.work for one in only(RunWork, actions)])
    }
    assert first == {0: (DIFFUSE, 1), 1: (ENCODE, 0)}
    known, new = only(Accept, actions)
    assert known.eta_ns < new.eta_ns
    assert "prompt already encoded" in known.why


# Stages of a request.


@pytest.mark.parametrize("policy", [name for name in policy_names() if name == "edf" or name.startswith("fixed")])
def test_one_request_goes_through_its_stages_in_chunks_with_one_work_queued_ahead(policy: str) -> None:
    """Steps of 0.1 s in chunks of 0.2 s: the next work is always queued before the running one ends."""
    control = controller(policy)
    begun = control.handle(Submitted(request("a", steps=5)), 0)
    assert ran(begun) == [(1, ENCODE, 1, (0,)), (2, DIFFUSE, 2, (0,))]
    why = "needs 0.56 s on 1 device; no other requests"
    assert begun[0] == Accept(0, "a", ns_from_s(0.56), ns_from_s(1.3 * 0.56), why)
    steps_ns = 200 * NS_PER_MS
    later = [
        control.handle(WorkFinished(1, 10 * NS_PER_MS), 1),
        control.handle(WorkFinished(2, steps_ns), 2),
        control.handle(WorkFinished(3, steps_ns), 3),
    ]
    assert [ran(actions) for actions in later] == [
        [(3, DIFFUSE, 2, (0,))],
        [(4, DIFFUSE, 1, (0,))],
        [(5, DECODE, 1, (0,))],
    ]
    afters = [action.work.after for actions in (begun, *later) for action in only(RunWork, actions)]
    assert sorted(afters) == [(), (1,), (2,), (3,), (4,)], "each is queued after the one before it"
    assert control.handle(WorkFinished(4, steps_ns // 2), 4) == ()
    assert control.handle(WorkFinished(5, 50 * NS_PER_MS), 5) == (
        DropState(0, (0,)),
        Finish(0, "a", Status.DONE, ""),
    )


def test_cancelling_a_request_that_has_ended_changes_nothing() -> None:
    control = controller()
    assert control.handle(Cancelled("stranger", "why not"), 0) == ()
    control.handle(Submitted(request("a")), 0)
    stopped = control.handle(Cancelled("a", "the client went away"), 1)
    assert stopped == (
        Stop(1),
        Stop(2),
        DropState(0, (0,)),
        Finish(0, "a", Status.CANCELLED, "the client went away"),
    )
    assert control.handle(Cancelled("a", "again"), 2) == ()
    assert control.handle(Stopped(1, 0), 3) == control.handle(Stopped(2, 0), 4) == ()


def test_cancelling_a_waiting_request_sends_nothing_to_devices() -> None:
    control = controller(num_devices=0)
    control.handle(Submitted(request("a")), 0)
    assert control.handle(Cancelled("a", "gone"), 1) == (Finish(0, "a", Status.CANCELLED, "gone"),)


def test_requests_that_wait_for_a_device_begin_when_one_joins() -> None:
    control = controller("fixed-sp1", num_devices=0)
    for uid in ("a", "b"):
        (accepted,) = control.handle(Submitted(request(uid)), 0)
        why = "no device is up; the prediction assumes that one is up now"
        assert accepted == Accept(int(uid == "b"), uid, ns_from_s(SERVICE_S), ns_from_s(SERVICE_S), why)
    joined = control.handle(DeviceJoined(3, 0), 1)
    assert [(stage, devices) for _, stage, _, devices in ran(joined)] == [(ENCODE, (3,)), (DIFFUSE, (3,))]


def test_each_work_names_the_works_after_which_it_is_queued(scripted: Scripted) -> None:
    chunk = start(DIFFUSE, 0, steps=2)
    begun = scripted(run(start(ENCODE, 0), chunk, chunk)).handle(Submitted(request("a")), 0)
    works = [action.work for action in begun if isinstance(action, RunWork)]
    assert [work.after for work in works] == [(), (1,), (2,)]


def test_devices_are_ordered_by_id_in_any_order_of_joining() -> None:
    control = controller(num_devices=0)
    for device_id in (2, 0, 1):
        control.handle(DeviceJoined(device_id, 0), 0)
    assert [device.device_id for device in control.tracker.devices] == [0, 1, 2]


# Moves of states.


def test_conditioning_is_moved_once_to_each_device(scripted: Scripted) -> None:
    control = scripted(
        run(start(ENCODE, 0)),
        run(start(DIFFUSE, 1, steps=2)),
        run(start(DIFFUSE, 0, steps=2)),
        run(start(DIFFUSE, 1, steps=2)),
        run(start(DIFFUSE, 1, steps=4)),
    )
    told = [control.handle(Submitted(request("a")), 0), control.handle(WorkFinished(1, 1), 1)]
    told += [control.handle(WorkFinished(work_id, 1), work_id) for work_id in (2, 3, 4)]
    assert [only(MoveState, actions) for actions in told] == [
        [],
        [MoveState(0, (1,), stages=(0,))],
        [MoveState(0, (0,), stages=())],
        [MoveState(0, (1,), stages=())],
        [],
    ]
    assert all(isinstance(actions[-1], RunWork) for actions in told), "the move precedes the work"
    cancelled = control.handle(Cancelled("a", "gone"), 9)
    assert cancelled[1] == DropState(0, (0, 1)), "both devices keep something of it"


def test_a_state_moves_to_the_devices_of_a_group_that_lack_it(scripted: Scripted) -> None:
    control = scripted(
        run(start(ENCODE, 1)),
        run(start(DIFFUSE, 0, 1, steps=2)),
        run(start(DIFFUSE, 2, steps=2)),
        run(start(DIFFUSE, 0, 1, 2, 3, steps=2), start(DIFFUSE, 1, steps=2), start(DIFFUSE, 1, 3, steps=2)),
        num_devices=4,
    )
    told = [control.handle(Submitted(request("a")), 0), control.handle(WorkFinished(1, 1), 1)]
    told += [control.handle(WorkFinished(work_id, 1), work_id) for work_id in (2, 3)]
    assert [only(MoveState, actions) for actions in told] == [
        [],
        [MoveState(0, (0,), stages=(0,))],
        [MoveState(0, (2,), stages=(0,))],
        [
            MoveState(0, (3,), stages=(0,)),
            MoveState(0, (0, 1), stages=()),
            MoveState(0, (3,), stages=()),
        ],
    ], "a device that stays in the group has the state; one that returns to it has an old state"
    works = [action.work for action in only(RunWork, told[-1])]
    assert [work.members[0].first_step for work in works if work.stage.name == DIFFUSE] == [4, 6, 8]


def test_the_next_attempt_moves_its_conditioning_again(scripted: Scripted) -> None:
    control = scripted(run(start(ENCODE, 0)), *[run(start(DIFFUSE, 1, steps=2))] * 3)
    control.handle(Submitted(request("a")), 0)
    control.handle(WorkFinished(1, 1), 1)
    control.handle(WorkFinished(2, 1), 2)
    again = control.handle(WorkFailed(3, "broken"), 3)
    assert again[:2] == (DropState(0, (0, 1)), MoveState(0, (1,), stages=(0,)))
    assert again[2].work.members[0].first_step == 2, "no step is repeated"  # type: ignore[union-attr]


# Failures and lost devices.


def test_a_failed_work_restarts_the_request_and_the_last_attempt_fails_it() -> None:
    control = controller(max_attempts=2)
    control.handle(Submitted(request("a")), 0)
    again = control.handle(WorkFailed(1, "out of memory"), 1)
    assert again[:2] == (Stop(2), DropState(0, (0,)))
    assert ran(again) == [(3, ENCODE, 1, (0,))], "a work of the first attempt is still queued"
    assert again[2].work.members[0].attempt == 2  # type: ignore[union-attr]
    control.handle(Stopped(2, 0), 2)
    failed = control.handle(WorkFailed(3, "out of memory"), 3)
    assert failed[-1] == Finish(0, "a", Status.FAILED, "out of memory (attempt 2 of 2)")
    assert not only(RunWork, failed)


def test_requests_of_a_lost_device_restart_elsewhere() -> None:
    control = controller("fixed-sp1", num_devices=2)
    for uid in ("a", "b"):
        control.handle(Submitted(request(uid)), 0)
    lost = control.handle(DeviceLost(0, "it burns"), 1)
    assert lost == (), "the other device is busy, and nothing is left to stop or to drop"
    assert control.handle(WorkFinished(1, 5), 2) == (), "too late"
    assert ran(control.handle(DeviceJoined(0, 0), 3))[0][1:] == (ENCODE, 1, (0,))
    assert control.handle(DeviceLost(7, "never there"), 4) == ()


def test_a_moved_request_restarts_when_the_device_of_its_running_work_is_lost(scripted: Scripted) -> None:
    """The state is to move to device 1, but device 0 is lost while it still computes it."""
    control = scripted(run(start(ENCODE, 0), start(DIFFUSE, 1, steps=2)))
    begun = control.handle(Submitted(request("a")), 0)
    assert only(MoveState, begun) == [MoveState(0, (1,), stages=(0,))]
    assert control.handle(DeviceLost(0, "it burns"), 1) == (Stop(2), DropState(0, (1,)))
    job = control.tracker.jobs[0]
    assert (job.attempt, job.works, list(control.tracker.waiting())) == (2, [], [job])


def test_a_waiting_request_resumes_though_all_devices_with_its_state_are_lost(scripted: Scripted) -> None:
    control = scripted(run(start(ENCODE, 0)), run(start(DIFFUSE, 0, 1, steps=4)), Plan(), Plan(), Plan())
    control.handle(Submitted(request("a")), 0)
    control.handle(WorkFinished(1, 1), 1)
    control.handle(WorkFinished(2, 1), 2)
    (job,) = control.tracker.waiting()
    assert control.handle(DeviceLost(0, "it burns"), 3) == ()
    assert (job.last_devices, job.holders) == ((1,), {1: 1})
    assert control.handle(DeviceLost(1, "it burns"), 4) == ()
    assert (job.last_devices, job.holders, job.attempt) == ((), {}, 1)
    assert (job.left.stage, job.left.num_steps_left) == (stage_of(PIPELINE, DIFFUSE), 6), "its state was serialized"


def test_a_work_of_a_broken_group_occupies_the_survivors_until_they_have_reported(scripted: Scripted) -> None:
    control = scripted(
        run(start(ENCODE, 0), start(DIFFUSE, 0, 1, 2, steps=4)), *[Plan()] * 3, run(start(DIFFUSE, 1, 2)), num_devices=3
    )
    control.handle(Submitted(request("a")), 0)
    control.handle(WorkFinished(1, 1), 1)
    assert control.handle(DeviceLost(0, "it burns"), 2) == ()
    assert [[work.work_id for work in device.works] for device in control.tracker.devices] == [[2], [2]]
    control.handle(DeviceJoined(0, 0), 3)
    assert not control.tracker.device(0).works, "a device that joins again does not have it"
    went_on = control.handle(Broken(2, 3), 4)
    assert went_on[:2] == (DropState(0, (1, 2)), MoveState(0, (1, 2), stages=(0,)))
    assert went_on[2].work.members[0].first_step == 3  # type: ignore[union-attr]
    assert control.handle(Broken(2, 3), 5) == (), "known already"


def test_a_work_of_a_group_is_lost_with_its_last_member(scripted: Scripted) -> None:
    control = scripted(run(start(ENCODE, 0), start(DIFFUSE, 0, 1, steps=4)), *[Plan()] * 4)
    control.handle(Submitted(request("a")), 0)
    control.handle(WorkFinished(1, 1), 1)
    control.handle(DeviceLost(0, "it burns"), 2)
    control.handle(DeviceLost(1, "it burns"), 3)
    (job,) = control.tracker.waiting()
    assert (job.attempt, job.left.num_steps_left, control.tracker.works) == (2, 10, {})


def test_progress_resets_the_count_of_failures() -> None:
    control = controller("fixed-sp1", max_attempts=2)
    control.handle(Submitted(request("a", steps=6)), 0)
    control.handle(WorkFinished(1, 1), 1)
    retried = control.handle(WorkFailed(2, "bad luck"), 2)
    work_id = ran(retried)[0][0]
    control.handle(Stopped(3, 0), 3)
    control.handle(WorkFinished(work_id, 1), 4)
    failed = control.handle(WorkFailed(work_id + 1, "bad luck"), 5)
    assert not only(Finish, failed), "the second failure in all, but the first since progress"
    again = ran(failed)[0][0]
    assert only(Finish, control.handle(WorkFailed(again, "bad luck"), 6)) == [
        Finish(0, "a", Status.FAILED, "bad luck (attempt 2 of 2)")
    ]


def test_a_lost_device_fails_a_request_in_its_last_attempt() -> None:
    control = controller(max_attempts=1)
    control.handle(Submitted(request("a")), 0)
    failed = Finish(0, "a", Status.FAILED, "device 0 was lost: it burns (attempt 1 of 1)")
    assert control.handle(DeviceLost(0, "it burns"), 1) == (failed,)


def test_a_request_is_dropped_to_best_effort_once_though_a_stopped_work_of_it_is_still_queued() -> None:
    """A failure makes it late: the job waits, and its stopped second work is still on the device."""
    control = controller()
    control.handle(Submitted(request("a", slo_s=1.3)), 0)
    control.handle(WorkFinished(1, 10 * NS_PER_MS), 10 * NS_PER_MS)
    again = control.handle(WorkFailed(2, "broken"), 500 * NS_PER_MS)
    assert ran(again) == [(4, DIFFUSE, 2, (0,))]
    assert only(DropToBestEffort, again) == [
        DropToBestEffort(0, "even if nothing else ran, it would finish 0.25 s late")
    ]
    assert control.tracker.jobs[0].dropped_to_best_effort


def test_a_policy_that_stops_every_work_does_not_prevent_progress(scripted: Scripted) -> None:
    """A work that is stopped before its first step makes no progress: the next one may not be stopped before it has."""
    stop, steps = Plan(stops=(0,)), run(start(DIFFUSE, 0, steps=2))
    control = scripted(run(start(ENCODE, 0)), steps, stop, steps, stop, steps, stop)
    control.handle(Submitted(request("a", steps=6)), 0)
    control.handle(WorkFinished(1, 1), 1)
    assert only(Stop, control.handle(Woke(), 2)) == [Stop(2)]
    assert ran(control.handle(Stopped(2, 0), 3)) == [(3, DIFFUSE, 2, (0,))]
    assert not only(Stop, control.handle(Woke(), 4)), "it has done no step since its last stop"
    assert ran(control.handle(WorkFinished(3, 1), 5)) == [(4, DIFFUSE, 2, (0,))]
    assert only(Stop, control.handle(Woke(), 6)) == [Stop(4)]


def test_a_job_stopped_at_a_step_resumes_from_there(scripted: Scripted) -> None:
    control = scripted(run(start(ENCODE, 0)), run(start(DIFFUSE, 0, steps=6)))
    control.handle(Submitted(request("a")), 0)
    control.handle(WorkFinished(1, 1), 1)
    control.handle(Stopped(2, 4), 2)
    (job,) = control.tracker.waiting()
    assert (job.left.stage, job.left.num_steps_left) == (stage_of(PIPELINE, DIFFUSE), 6)


# Plans.


def test_a_wake_up_is_asked_for_once_unless_an_earlier_one_is_needed(scripted: Scripted) -> None:
    asked = (Plan(wake_ns=wake_ns) for wake_ns in (100, 100, 120, 50, 100))
    control = scripted(*asked, Plan(), Plan(wake_ns=100), Plan(wake_ns=150))
    told = [control.handle(Cancelled("nobody", ""), 0) for _ in range(5)]
    assert told == [(WakeAt(100),), (), (), (WakeAt(50),), ()]
    assert control.handle(Woke(), 50) == ()
    assert control.handle(Woke(), 60) == (), "the wake-up at 100 is still open"
    assert control.handle(Woke(), 100) == (WakeAt(150),)


def test_dropping_to_best_effort_asks_for_a_new_plan_in_the_new_order(scripted: Scripted) -> None:
    drops = (Plan(dropped_to_best_effort=((0, "too late"),)), Plan(dropped_to_best_effort=((1, "later still"),)))
    control = scripted(Plan(), Plan(), Plan(), *drops, run(start(ENCODE, 0, job=2)))
    for uid in ("a", "b", "c"):
        control.handle(Submitted(request(uid)), 0)
    assert [job.job_id for job in control.tracker.waiting()] == [0, 1, 2]
    told = control.handle(Woke(), 1)
    assert ran(told) == [(1, ENCODE, 1, (0,))], "the policy is asked until it drops no other job"
    assert told[:2] == (DropToBestEffort(0, "too late"), DropToBestEffort(1, "later still"))
    assert [(job.job_id, job.dropped_to_best_effort) for job in control.tracker.waiting()] == [(0, True), (1, True)]
    control.handle(Submitted(request("d")), 2)
    assert [job.job_id for job in control.tracker.waiting()] == [3, 0, 1], "after jobs that can be on time"


@pytest.mark.parametrize(
    ("illegal", "complaint"),
    [
        (start(DIFFUSE, 0, steps=2), f"job 0 is at {PIPELINE}/encode, not at {PIPELINE}/diffuse"),
        (start(ENCODE, 0, steps=2), "job 0 has 1 steps left, not 2"),
        (start(ENCODE, 0, steps=0), "job 0 has 1 steps left, not 0"),
        (start(ENCODE, 0, 1), f"{PIPELINE}/encode of job 0 is started on 2 devices"),
        (start(ENCODE, 1, 0), r"the group \(1, 0\) is not sorted"),
        (start(ENCODE, 1, 1), r"the group \(1, 1\) is not sorted"),
    ],
)
def test_an_illegal_start_is_a_bug_of_the_policy(scripted: Scripted, illegal: Start, complaint: str) -> None:
    control = scripted(run(illegal))
    with pytest.raises(AssertionError, match=complaint):
        control.handle(Submitted(request("a")), 0)


def test_more_steps_than_are_left_are_a_bug_of_the_policy(scripted: Scripted) -> None:
    control = scripted(run(start(ENCODE, 0), start(DIFFUSE, 0, steps=11)))
    with pytest.raises(AssertionError, match="job 0 has 10 steps left, not 11"):
        control.handle(Submitted(request("a")), 0)
