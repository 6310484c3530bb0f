"""Simulated devices: queues, groups, transfers of states, members that are lost or hang."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.devices import ENCODED, Devices, begun, state_after, work
from stages import ENCODE
from tilework.core.component import Memory
from tilework.core.work import Member
from tilework.sim.runs import Run, RunEnd


@pytest.mark.parametrize("devices", [(0,), (0, 1, 2)])
@pytest.mark.parametrize(
    ("now_ns", "steps", "end_ns"),
    [(100, 1, 110), (109, 1, 110), (110, 2, 120), (111, 2, 120), (125, 3, 130), (139, 4, 143), (50, 1, 110)],
)
def test_a_stop_takes_effect_at_the_next_step_boundary(
    now_ns: int, steps: int, end_ns: int, devices: tuple[int, ...]
) -> None:
    """Four steps of 10 ns from 100 on; the last takes the 3 ns that do not divide by four."""
    fleet, one = Devices(), work(1, devices=devices)
    fleet.command(one, 43)
    former = begun(fleet, 100, devices)
    run = fleet.stop(0, one, now_ns)
    assert run is not None
    assert (run.start_ns, run.end_ns, run.steps, run.end) == (100, end_ns, steps, RunEnd.STOPPED)
    assert all(fleet.running(device_id) is run for device_id in devices)
    assert not fleet.end(former), "the former end is out of date"
    assert fleet.stop(0, one, now_ns) is None, "once is enough"
    assert fleet.end(run)
    assert all(fleet.state(device_id, 0) == state_after(steps) for device_id in devices)


def test_a_stage_without_steps_runs_to_its_end() -> None:
    fleet, one = Devices(), work(1, stage=ENCODE, num_steps=1)
    fleet.command(one, 40, knows=False)
    run = begun(fleet, 0)
    assert fleet.stop(0, one, 10) is None
    assert fleet.running(0) is run
    fleet.end(run)
    assert fleet.state(0, 0) == ENCODED


def test_a_revoked_work_takes_no_time_and_stopping_an_unknown_work_does_nothing() -> None:
    fleet, works = Devices(), [work(work_id, job_id=work_id) for work_id in (1, 2, 3)]
    assert fleet.begin_next((0,), 0) == []
    for one in works:
        fleet.command(one, 40)
    first = begun(fleet, 0)
    assert fleet.begin_next((0,), 5) == [], "one at a time"
    assert fleet.stop(0, works[1], 5) is None
    assert fleet.stop(0, work(9), 5) is None
    fleet.end(first)
    revoked = begun(fleet, 40)
    assert (revoked.work.work_id, revoked.end_ns, revoked.steps, revoked.end) == (2, 40, 0, RunEnd.STOPPED)
    fleet.end(revoked)
    third = begun(fleet, 40)
    assert (third.work.work_id, third.end_ns, third.steps, third.end) == (3, 80, 4, RunEnd.DONE)
    assert fleet.stop(0, works[0], 50) is None, "what has ended is left alone"


def test_a_group_begins_when_all_its_devices_are_free_and_ends_on_all() -> None:
    """Device 0 is free at 40, device 1 at 70; what is queued behind the group waits for it."""
    fleet = Devices()
    for one, duration_ns in (
        (work(1), 40),
        (work(2, 1, devices=(1,)), 70),
        (work(3, 2, devices=(0, 1)), 10),
        (work(4, 3), 5),
    ):
        fleet.command(one, duration_ns)
    first, second = fleet.begin_next((0, 1), 0)
    fleet.end(first)
    assert fleet.begin_next((0,), 40) == [], "the other member is busy, and the queue keeps its order"
    fleet.end(second)
    group = begun(fleet, 70, (1,))
    assert (group.start_ns, group.end_ns) == (70, 80)
    assert fleet.running(0) is fleet.running(1) is group
    fleet.end(group)
    last = begun(fleet, 80, (0, 1))
    assert (last.work.work_id, last.start_ns) == (4, 80)


def test_a_group_waits_for_a_member_that_has_not_received_the_command() -> None:
    fleet, one = Devices(), work(1, devices=(0, 1))
    fleet.command(work(9, 9, devices=(1,)), 5)
    fleet.timing.durations_ns[1] = 40
    fleet._devices[0].states[0] = fleet._devices[1].states[0] = ENCODED
    fleet.enqueue(one, (0,))
    assert begun(fleet, 0, (0, 1)).work.work_id == 9
    fleet.end(fleet.runs()[0])
    assert fleet.begin_next((0, 1), 5) == []
    fleet.enqueue(one, (1,))
    assert begun(fleet, 7, (1,)).start_ns == 7


def test_a_group_does_not_overtake_works_queued_before_it() -> None:
    fleet = Devices()
    for one in (work(1), work(2, 1, devices=(0, 1))):
        fleet.command(one, 40)
    assert [run.work.work_id for run in fleet.begin_next((1, 0), 0) if isinstance(run, Run)] == [1]


def test_only_the_next_work_of_a_job_waits_for_its_state() -> None:
    fleet = Devices()
    fleet.send(7, 0, 500, 0, 4)
    for work_id, first_step in ((1, 4), (2, 8)):
        fleet.command(work(work_id, job_id=7, first_step=first_step), 40, knows=False)
    starts = []
    for now_ns in (100, 200):  # The second time is earlier than the arrival: it must not be waited for again.
        run = begun(fleet, now_ns)
        starts.append(run.start_ns)
        fleet.end(run)
    assert starts == [500, 200]
    assert fleet.state(0, 7) == state_after(4, 4, 4)


def test_a_work_does_not_wait_for_a_state_that_has_arrived() -> None:
    fleet = Devices()
    fleet.send(7, 0, 500)
    fleet.command(work(1, job_id=7), 40, knows=False)
    run = begun(fleet, 800)
    assert (run.start_ns, run.end_ns) == (800, 840)


def test_a_work_waits_for_a_state_that_is_not_sent_yet() -> None:
    fleet = Devices()
    transfers = [fleet.send(7, target, 5, None) for target in (1, 2)]
    fleet.command(work(3, job_id=7, devices=(1, 2)), 40, knows=False)
    assert fleet.begin_next((1, 2), 0) == []
    transfers[0].send(ENCODED, 80)
    assert fleet.begin_next((1, 2), 80) == []
    transfers[1].send(ENCODED, 80)
    assert begun(fleet, 80, (1, 2)).start_ns == 85


def test_a_revoked_work_does_not_wait_for_its_jobs_state() -> None:
    fleet, follower = Devices(), work(2, job_id=7, devices=(1,))
    fleet.send(7, 1, 5, None)
    fleet.command(follower, 40, knows=False)
    fleet.stop(1, follower, 10)
    assert begun(fleet, 10, (1,)).end_ns == 10


def test_a_state_travels_while_its_next_work_is_dispatched() -> None:
    for dispatch_ns, start_ns in ((30, 130), (700, 800)):
        fleet = Devices()
        fleet.send(7, 0, 120, 10)
        fleet.command(work(1, job_id=7), 40, dispatch_ns, knows=False)
        run = begun(fleet, 100)
        assert (run.start_ns, run.end_ns) == (start_ns, start_ns + 40)
        assert fleet.running(0) is run, "occupied meanwhile"


@pytest.mark.parametrize("steps", [(), (4,), (2, 3)])
def test_a_device_refuses_a_work_whose_first_state_it_lacks(steps: tuple[int, ...]) -> None:
    fleet = Devices()
    fleet.send(7, 0, 5, 0, *steps)
    fleet.command(work(1, job_id=7, first_step=3), 40, knows=False)
    run = begun(fleet, 10)
    assert (run.end, run.end_ns, run.left_out) == (RunEnd.REFUSED, 10, {7: False})
    fleet.end(run)
    assert fleet.state(0, 7) is None


def test_a_lost_state_is_distinguished_from_one_at_another_step() -> None:
    fleet = Devices()
    fleet.send(7, 0, 5, None).send(None, 0, lost=True)
    fleet.command(work(1, job_id=7), 40, knows=False)
    run = begun(fleet, 10)
    assert (run.end, run.left_out) == (RunEnd.REFUSED, {7: True})


def test_a_work_of_several_jobs_runs_for_those_whose_state_is_present() -> None:
    fleet = Devices()
    fleet.send(7, 0, 5, None).send(None, 0, lost=True)
    fleet.send(8, 0, 5, 0, 2)
    both = replace(work(1, job_id=7), members=(Member(7, 1, 3, 2), Member(8, 1, 3, 2)))
    fleet.command(both, 40, knows=False)
    run = begun(fleet, 10)
    assert (run.end, run.left_out, run.members) == (RunEnd.DONE, {7: True}, [Member(8, 1, 3, 2)])
    assert fleet.timing.ran == [(8,)], "it takes as long as for these"
    fleet.end(run)
    state = fleet.state(0, 8)
    assert state is not None
    assert state.position == 3 + run.steps
    assert fleet.state(0, 7) is None


def test_a_state_is_dropped_after_the_works_queued_before() -> None:
    fleet = Devices()
    for work_id, first_step in ((1, 0), (2, 4)):
        fleet.command(work(work_id, job_id=7, first_step=first_step), 40)
    run = begun(fleet, 0)
    fleet.forget(7, 0)
    for _ in range(2):
        assert fleet.state(0, 7) is not None
        fleet.end(run)
        fleet.drop_after(run)
        run = next(iter(fleet.begin_next((0,), 40)), run)
    assert fleet.state(0, 7) is None
    fleet.forget(7, 0)


# Members are lost, or hang.


def test_survivors_of_a_group_keep_the_whole_steps() -> None:
    fleet, one = Devices(), work(1, devices=(0, 1, 2))
    fleet.command(one, 40)
    former = begun(fleet, 0)
    run = fleet.lose(0, 25)
    assert run is not None
    assert (run.devices, run.end_ns, run.steps, run.end) == ((1, 2), 25, 2, RunEnd.BROKEN)
    assert not fleet.end(former)
    later = fleet.lose(1, 25)
    assert later is not None
    assert (later.devices, later.steps) == ((2,), 2)
    assert not fleet.end(run)
    assert fleet.end(later)
    assert fleet.state(2, 0) == state_after(2)
    assert not fleet.is_up(0)


def test_a_lost_device_loses_its_run_and_states() -> None:
    fleet = Devices()
    fleet.command(work(1), 40)
    run = begun(fleet, 0)
    assert fleet.lose(0, 25) is None
    fleet.join(0, Memory())
    assert not fleet.end(run)
    assert (fleet.running(0), fleet.num_states(0)) == (None, 0)


def test_a_queued_work_that_was_broken_off_ends_on_each_member_by_itself() -> None:
    fleet, one = Devices(), work(2, 1, devices=(0, 1))
    fleet.command(work(1), 40)
    fleet.command(one, 40)
    busy = begun(fleet, 0)
    assert fleet.break_off(one, 10) is None
    alone = begun(fleet, 10, (0, 1))
    assert (alone.devices, alone.end_ns, alone.steps, alone.end) == ((1,), 10, 0, RunEnd.BROKEN)
    fleet.end(busy)
    assert begun(fleet, 40, (0,)).devices == (0,)


def test_a_hung_device_does_nothing_until_it_is_lost() -> None:
    fleet, one = Devices(), work(1, devices=(0, 1))
    fleet.command(one, 40)
    former = begun(fleet, 0, (0, 1))
    fleet.hang(1)
    assert not fleet.end(former), "the others cannot go on without it"
    assert fleet.stop(0, one, 15) is None
    run = fleet.break_off(one, 15)
    assert run is not None
    assert (run.devices, run.steps, run.end) == ((0,), 0, RunEnd.BROKEN)
    fleet.end(run)
    fleet.command(work(2, 1, devices=(1,)), 40)
    assert fleet.begin_next((1,), 90) == []
    assert fleet.lose(1, 100) is None
