"""Works that make no progress, and works that are told to stop."""

from __future__ import annotations

from control.driver.rig import Rig, ended
from tilework.core.actions import DropState, Stop, WakeAt
from tilework.core.wire.commands import Forget, StopWork
from tilework.core.wire.reports import Ending


def test_a_device_that_runs_a_stuck_work_alone_is_killed() -> None:
    rig = Rig()
    work = rig.run(3)
    assert rig.check_stuck(work) == [("stuck", 1), ("kill", 3)]


def test_a_stuck_group_is_broken_off_first_and_then_silent_members_are_killed() -> None:
    rig = Rig()
    work = rig.run(0, 1, 2)
    assert rig.check_stuck(work) == [("stuck", 1), ("break off", 1)]
    rig.report(1, ended(work, 2, ending=Ending.BROKEN))
    rig.lose(2)
    assert rig.check_stuck(work) == [("stuck", 1), ("kill", 0)]


def test_the_survivors_of_a_loss_are_not_broken_off_again() -> None:
    rig = Rig()
    work = rig.run(0, 1)
    assert ("break off", 1) in rig.lose(0)
    assert rig.check_stuck(work) == [("stuck", 1), ("kill", 1)]


def test_a_work_that_has_ended_is_not_stuck() -> None:
    """The controller still counts it as running, since it waits for the report of an earlier work."""
    rig = Rig()
    work = rig.run(0)
    rig.report(0, ended(work))
    assert rig.check_stuck(work) == []


def test_a_device_whose_load_ahead_of_need_is_stuck_is_killed() -> None:
    rig = Rig()
    rig.stuck.loads = [(2, 1000)]
    assert rig.check_stuck() == [("kill", 2)]


def test_the_leader_is_told_to_stop_while_its_work_is_in_flight() -> None:
    rig = Rig()
    work = rig.run(1, 2)
    assert rig.core.perform(Stop(1)) == (((1,), StopWork(1)),)
    rig.report(1, ended(work))
    assert rig.core.perform(Stop(1)) == ()


def test_other_actions() -> None:
    rig = Rig()
    assert rig.core.perform(DropState(1, (0, 2))) == (((0, 2), Forget(1)),)
    assert rig.core.perform(WakeAt(5)) == ()


def test_a_job_is_preempted_when_other_jobs_use_its_devices() -> None:
    rig = Rig()
    job = rig.tracker.jobs[1]
    assert (rig.core.is_paused(1), rig.core.is_preempted(1), rig.core.is_paused(9)) == (True, False, False)
    job.last_devices, rig.tracker.busy = (0, 1), {1}
    assert rig.core.is_preempted(1)
    job.works = [rig.run(0)]
    assert not rig.core.is_paused(1)
    assert not rig.core.is_preempted(1)
