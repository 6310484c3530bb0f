"""Recovery: works out of memory, lost states, reports out of order, and a restarted controller."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from builders import controller, only, promise, request, table
from stages import DECODE, DIFFUSE, ENCODE
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Accept, Action, DropState, Finish, MoveState, Reject, RunWork, Stop
from tilework.core.events import (
    Broken,
    DeviceJoined,
    DeviceLost,
    Event,
    OutOfMemory,
    Restored,
    Stopped,
    Submitted,
    Woke,
    WorkFailed,
    WorkFinished,
)
from tilework.core.request import RefusalCode, Status
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.work import Member, Work
from tilework.cost.memory import FORGET_NS

MS = NS_PER_MS


def works(actions: tuple[Action, ...]) -> list[Work]:
    return [action.work for action in actions if isinstance(action, RunWork)]


def finished(work: Work) -> Event:
    return WorkFinished(work.work_id, 100 * MS * work.num_steps if work.stage.name == DIFFUSE else 10 * MS)


class Driver:
    """Ends works in the order in which they were begun."""

    def __init__(self, control: Controller) -> None:
        self.control, self.now_ns = control, 0
        self.pending: list[Work] = []

    def describe(self, event: Event) -> tuple[Action, ...]:
        self.now_ns += MS
        actions = self.control.handle(event, self.now_ns)
        stopped = {action.work_id for action in only(Stop, actions)}
        revoked = [work for work in self.pending if work.work_id in stopped]
        self.pending = [work for work in self.pending + works(actions) if work.work_id not in stopped]
        for work in revoked:
            actions += self.describe(Stopped(work.work_id, 0))
        return actions

    def until(self, stage: str) -> Work:
        """End works until the next one has this stage; returns it without ending it."""
        for _ in range(1000):
            if not self.pending:
                self.wait(NS_PER_S)
            elif self.pending[0].stage.name == stage:
                return self.pending.pop(0)
            else:
                self.describe(finished(self.pending.pop(0)))
        raise AssertionError(f"no {stage} is ever begun")

    def wait(self, duration_ns: int) -> None:
        """Let time pass in which no work ends."""
        self.now_ns += duration_ns
        self.describe(Woke())

    def finish(self) -> tuple[Action, ...]:
        actions: tuple[Action, ...] = ()
        while self.pending:
            actions = self.describe(finished(self.pending.pop(0)))
        return actions


def driver(policy: str = "edf", num_devices: int = 1, **config: int) -> Driver:
    control = Controller(ControllerConfig(policy=policy, **config), table(degrees=(1, 2)))
    it = Driver(control)
    for device_id in range(num_devices):
        it.describe(DeviceJoined(device_id, 0))
    return it


# Memory.


def test_decodes_are_sliced_after_one_does_not_fit_which_counts_as_no_failure() -> None:
    it = driver(max_attempts=2)
    for uid in ("a", "b"):
        it.describe(Submitted(request(uid, steps=2)))
        work = it.until(DECODE)
        if uid == "a":
            assert not work.sliced
            retried = it.describe(OutOfMemory(work.work_id, 0))
            assert DropState(0, (0,)) in retried
            work = it.until(DECODE)
        assert work.sliced
        [end] = only(Finish, it.describe(finished(work)))
        assert end.status is Status.DONE


def test_a_request_that_never_fits_fails_and_is_refused_until_the_limit_is_forgotten() -> None:
    it = driver(max_attempts=2)
    it.describe(Submitted(request("a", steps=2)))
    tried = []
    while it.control.tracker.jobs:
        work = it.until(DECODE)
        tried.append(work.sliced)
        actions = it.describe(OutOfMemory(work.work_id, 0))
    assert tried == [False, True, True, True], "as a whole, in slices, and twice after the limit was known"
    [end] = only(Finish, actions)
    assert (end.status, end.reason) == (Status.FAILED, "there was not enough memory (attempt 2 of 2)")
    [refusal] = only(Reject, it.describe(Submitted(request("b", steps=2))))
    assert refusal.code is RefusalCode.MEMORY
    assert "128x128 needs more memory than there is on one of the devices" in refusal.reason
    assert only(Accept, it.describe(Submitted(request("small", side=64, steps=2))))
    it.finish()
    it.now_ns += FORGET_NS
    assert only(Accept, it.describe(Submitted(request("c", steps=2))))


def test_an_exact_request_whose_decode_fits_only_in_slices_fails_and_the_next_is_refused() -> None:
    it = driver(max_attempts=2)
    it.describe(Submitted(request("a", steps=2, exact=True)))
    while it.control.tracker.jobs:
        work = it.until(DECODE)
        assert not work.sliced
        actions = it.describe(OutOfMemory(work.work_id, 0))
    [end] = only(Finish, actions)
    assert end.status is Status.FAILED
    assert end.reason.startswith("there was not enough memory; it is exact, so")
    [refusal] = only(Reject, it.describe(Submitted(request("b", steps=2, exact=True))))
    assert refusal.code is RefusalCode.MEMORY
    assert refusal.reason.endswith("it is exact, so several devices cannot share its steps and no stage can be sliced")
    assert only(Accept, it.describe(Submitted(request("c", steps=2)))), "what is not exact is decoded in slices"


def test_an_exact_request_whose_steps_fit_only_on_two_devices_is_refused() -> None:
    it = driver(policy="tetriserve", num_devices=2)
    it.describe(Submitted(request("a", steps=2)))
    work = it.until(DIFFUSE)
    while len(work.devices) > 1:
        it.finish()
        it.describe(Submitted(request(f"next after {work.work_id}", steps=2)))
        work = it.until(DIFFUSE)
    it.describe(OutOfMemory(work.work_id, 0))
    [refusal] = only(Reject, it.describe(Submitted(request("b", steps=2, exact=True))))
    assert refusal.code is RefusalCode.MEMORY
    assert "on one of the devices; it is exact" in refusal.reason
    assert only(Accept, it.describe(Submitted(request("c", steps=2)))), "what is not exact has two devices"


def test_steps_that_were_done_before_the_memory_ran_out_count() -> None:
    it = driver()
    it.describe(Submitted(request("a", steps=6)))
    work = it.until(DIFFUSE)
    assert work.num_steps == 2
    [move] = only(MoveState, retried := it.describe(OutOfMemory(work.work_id, 1)))
    assert (move.targets, works(retried)[0].members[0].first_step) == ((0,), 1)


def test_steps_that_fit_only_on_more_devices_than_are_up_wait_for_them() -> None:
    it = driver("tetriserve", num_devices=2)
    it.describe(DeviceLost(1, "for a test"))
    it.describe(Submitted(request("a", steps=4)))
    work = it.until(DIFFUSE)
    assert work.devices == (0,)
    it.describe(OutOfMemory(work.work_id, 0))
    it.wait(10 * NS_PER_S)
    assert not it.pending
    assert it.control.tracker.jobs
    it.describe(DeviceJoined(1, 0))
    assert it.until(DIFFUSE).devices == (0, 1)


def test_a_parked_job_is_tried_again_when_another_one_fits() -> None:
    it = driver("tetriserve", num_devices=2)
    it.describe(DeviceLost(1, "for a test"))
    it.describe(Submitted(request("a", steps=4)))
    it.describe(OutOfMemory(it.until(DIFFUSE).work_id, 0))
    assert not it.pending
    it.describe(Submitted(request("b", steps=4)))
    it.finish()
    for _ in range(10):
        it.wait(NS_PER_S)
        it.finish()
    assert not it.control.tracker.jobs


def test_a_parked_job_is_tried_again_when_the_limit_is_forgotten_and_fails_in_the_end() -> None:
    it = driver("tetriserve", num_devices=2)
    it.describe(DeviceLost(1, "for a test"))
    it.describe(Submitted(request("a", steps=4)))
    tries_ns = []
    while it.control.tracker.jobs:
        work = it.until(DIFFUSE)
        tries_ns.append(it.now_ns)
        actions = it.describe(OutOfMemory(work.work_id, 0))
    assert only(Finish, actions)[0].status is Status.FAILED
    assert len(tries_ns) == 3
    assert all(FORGET_NS <= later - earlier <= FORGET_NS + 2 * NS_PER_S for earlier, later in pairwise(tries_ns))


def test_an_encode_that_does_not_fit_is_retried_even_if_fewer_devices_are_up_than_the_policy_wants() -> None:
    it = driver("fixed-sp2", num_devices=2)
    it.describe(DeviceLost(1, "for a test"))
    it.describe(Submitted(request("a", steps=4)))
    work = it.until(ENCODE)
    it.describe(OutOfMemory(work.work_id, 0))
    it.finish()
    assert not it.control.tracker.jobs


def test_a_device_keeps_a_bounded_number_of_states_and_gets_the_others_back_when_they_resume() -> None:
    """Five jobs, each displaced by a more urgent one after its first steps."""
    it = driver(max_residents=3)
    actions: list[Action] = []
    for index in range(5):
        actions += it.describe(Submitted(request(str(index), steps=20, slo_s=100 - 10 * index)))
        for _ in range(4):
            actions += it.describe(finished(it.pending.pop(0)))
        assert len(it.control.tracker.device(0).residents) <= 3
    assert [drop.job_id for drop in only(DropState, actions)] == [0, 1]
    while it.pending:
        actions += it.describe(finished(it.pending.pop(0)))
    assert [end.status for end in only(Finish, actions)] == [Status.DONE] * 5
    assert {move.job_id for move in only(MoveState, actions) if move.stages} == {0, 1}


# Errors of the model.


@pytest.mark.parametrize(
    ("errors", "num_tries"),
    [(["ValueError: 60 steps"] * 3, 2), (["a", "b", "a"], 3)],
    ids=["the same again", "others"],
)
def test_an_error_of_the_model_that_repeats_is_not_tried_a_third_time(errors: list[str], num_tries: int) -> None:
    it = driver()
    it.describe(Submitted(request("a", steps=6)))
    ends: list[Finish] = []
    tries = 0
    while not ends:
        work = it.pending.pop(0)
        ends = only(Finish, it.describe(WorkFailed(work.work_id, errors[tries], by_model=True)))
        tries += 1
    assert (tries, ends[0].status) == (num_tries, Status.FAILED)
    assert errors[tries - 1] in ends[0].reason


def test_an_error_after_progress_is_a_new_one() -> None:
    it = driver()
    it.describe(Submitted(request("a", steps=6)))
    for _ in range(2):
        assert not only(Finish, it.describe(WorkFailed(it.pending.pop(0).work_id, "flaky", by_model=True)))
        it.describe(finished(it.pending.pop(0)))
    assert only(Finish, it.finish())[0].status is Status.DONE


# Lost states, reports out of order.


def test_a_job_starts_over_when_its_state_is_lost() -> None:
    it = driver()
    it.describe(Submitted(request("a", steps=6)))
    it.describe(finished(it.until(DIFFUSE)))
    work = it.until(DIFFUSE)
    [encode, *_] = works(it.describe(WorkFailed(work.work_id, "the blob is gone", state_lost=True)))
    assert (encode.stage.name, encode.members) == (ENCODE, (Member(0, 2, 0, 0),))
    assert only(Finish, it.finish())[0].status is Status.DONE


def test_a_report_that_overtakes_another_of_its_job_waits_for_it() -> None:
    it = driver()
    it.describe(Submitted(request("a", steps=6)))
    first = it.until(DIFFUSE)
    second = it.pending.pop(0)
    assert not it.describe(finished(second))
    assert second.work_id in it.control.tracker.works
    it.describe(finished(first))
    assert not {first.work_id, second.work_id} & it.control.tracker.works.keys()
    assert only(Finish, it.finish())[0].status is Status.DONE


def test_early_reports_that_waited_for_a_lost_work_are_ignored() -> None:
    it = driver(num_devices=2)
    it.describe(Submitted(request("a", steps=6)))
    first = it.until(DIFFUSE)
    second = it.pending.pop(0)
    it.describe(finished(second))
    [again, *_] = works(it.describe(DeviceLost(0, "for a test")))
    assert (again.devices, again.stage.name, again.members[0].first_step) == ((1,), DIFFUSE, 0)
    assert not {first.work_id, second.work_id} & it.control.tracker.works.keys()


def test_steps_of_survivors_count_though_a_later_work_was_only_on_the_lost_device() -> None:
    it = driver("fixed-sp2", num_devices=2)
    it.describe(Submitted(request("a", steps=2)))
    steps = it.until(DIFFUSE)
    [decode] = it.pending
    assert (steps.devices, decode.devices) == ((0, 1), (0,))
    it.pending.clear()
    assert not works(it.describe(DeviceLost(0, "for a test")))
    [rest, *_] = works(it.describe(Broken(steps.work_id, 1)))
    assert (rest.devices, rest.members[0].first_step, rest.members[0].attempt) == ((1,), 1, 2)


def test_a_lost_decode_is_retried_when_the_steps_before_it_are_reported_done() -> None:
    it = driver("fixed-sp2", num_devices=2)
    it.describe(Submitted(request("a", steps=2)))
    steps = it.until(DIFFUSE)
    it.pending.clear()
    it.describe(DeviceLost(0, "for a test"))
    [decode] = works(it.describe(finished(steps)))
    assert (decode.stage.name, decode.devices, decode.members[0].attempt) == (DECODE, (1,), 2)
    it.pending = [decode]
    assert only(Finish, it.finish())[0].status is Status.DONE


# A restarted controller.


@pytest.mark.parametrize(("position", "stage", "first_step"), [(0, ENCODE, 0), (1, DIFFUSE, 0), (5, DIFFUSE, 4)])
def test_a_restored_request_resumes_from_its_checkpoint(position: int, stage: str, first_step: int) -> None:
    it = driver()
    actions = it.describe(Restored(request("a", steps=6), position))
    [accept] = only(Accept, actions)
    assert accept.why.startswith("it had been accepted before; ")
    [work, *_] = works(actions)
    assert (work.stage.name, work.members[0].first_step) == (stage, first_step)
    assert [move.stages for move in only(MoveState, actions)] == ([(0,)] if position else [])
    assert only(Finish, it.finish())[0].status is Status.DONE


def test_a_restored_request_with_only_its_decode_left_is_decoded() -> None:
    it = driver()
    [work] = works(it.describe(Restored(request("a", steps=6), 7)))
    assert work.stage.name == DECODE


def test_a_restored_request_is_accepted_where_admission_would_refuse_it() -> None:
    it = driver(max_jobs=1)
    it.describe(Submitted(request("a", steps=6)))
    assert only(Reject, it.describe(Submitted(request("b", steps=6))))
    assert only(Accept, it.describe(Restored(request("c", steps=6), 0)))
    stranger = replace(request("d"), pipeline="unknown")
    [refusal] = only(Reject, it.describe(Restored(stranger, 0)))
    assert refusal.code is RefusalCode.UNKNOWN_COST


def test_a_restored_promise_is_kept_if_possible() -> None:
    control = controller("edf", num_devices=1)
    for uid, slo_s in (("kept", 10.0), ("late", 0.5)):
        control.handle(Restored(promise(uid, 0.0, slo_s), 0), 0)
    promised = [job.request.uid for job in control.tracker.promised()]
    assert promised == ["kept"]
