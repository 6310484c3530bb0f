"""Modelled devices: first in, first out, groups together, states that travel."""

from __future__ import annotations

import pytest

from builders import PIPELINE
from tilework.core.work import DIFFUSE, StageId, Work
from tilework.sim.device import Fleet, Run


def work(work_id: int, job_id: int = 0, stage: str = DIFFUSE, num_steps: int = 4, gpus: tuple[int, ...] = (0,)) -> Work:
    return Work(
        work_id=work_id,
        stage=StageId(PIPELINE, stage),
        job_ids=(job_id,),
        attempts=(1,),
        first_steps=(0,),
        gpus=gpus,
        num_steps=num_steps,
        why="a test",
    )


def begun(fleet: Fleet, now_ns: int, gpus: tuple[int, ...] = (0,)) -> Run:
    (run,) = fleet.begin_next(gpus, now_ns)
    return run


@pytest.mark.parametrize("gpus", [(0,), (0, 1, 2)])
@pytest.mark.parametrize(
    ("now_ns", "steps", "end_ns"),
    [(100, 1, 110), (109, 1, 110), (110, 2, 120), (111, 2, 120), (125, 3, 130), (139, 4, 143), (50, 1, 110)],
)
def test_a_stop_takes_effect_at_the_next_step_boundary(
    now_ns: int, steps: int, end_ns: int, gpus: tuple[int, ...]
) -> None:
    """Four steps of 10 ns from 100 on; the last takes the 3 ns that do not divide by four."""
    fleet, one = Fleet(), work(1, gpus=gpus)
    fleet.enqueue(one, 43)
    former = begun(fleet, 100, gpus)
    run = fleet.stop(one, now_ns)
    assert run is not None
    assert (run.start_ns, run.end_ns, run.steps, run.stopped) == (100, end_ns, steps, True)
    assert all(fleet.running(gpu) is run for gpu in gpus)
    assert fleet.end(former) == [], "the former end is out of date"
    assert fleet.stop(one, now_ns) is None, "once is enough"
    assert fleet.end(run) == list(gpus)


def test_a_stage_without_steps_runs_to_its_end() -> None:
    fleet, one = Fleet(), work(1, stage="encode", num_steps=1)
    fleet.enqueue(one, 40)
    run = begun(fleet, 0)
    assert fleet.stop(one, 10) is None
    assert fleet.running(0) is run


def test_a_revoked_work_takes_no_time_and_a_stop_for_nobody_does_nothing() -> None:
    fleet, works = Fleet(), [work(work_id) for work_id in (1, 2, 3)]
    assert fleet.begin_next((0,), 0) == []
    for one in works:
        fleet.enqueue(one, 40)
    first = begun(fleet, 0)
    assert fleet.begin_next((0,), 5) == [], "one at a time"
    assert fleet.stop(works[1], 5) is None
    assert fleet.stop(work(9), 5) is None
    fleet.end(first)
    revoked = begun(fleet, 40)
    assert (revoked.work.work_id, revoked.end_ns, revoked.steps, revoked.stopped) == (2, 40, 0, True)
    fleet.end(revoked)
    third = begun(fleet, 40)
    assert (third.work.work_id, third.end_ns, third.steps, third.stopped) == (3, 80, 4, False)
    assert fleet.stop(works[0], 50) is None, "what has ended is left alone"


def test_a_group_begins_when_all_its_devices_are_free_and_ends_on_all() -> None:
    """Device 0 is free at 40, device 1 at 70; what is queued behind the group waits for it."""
    fleet = Fleet()
    for one, duration_ns in (
        (work(1), 40),
        (work(2, 1, gpus=(1,)), 70),
        (work(3, 2, gpus=(0, 1)), 10),
        (work(4, 3), 5),
    ):
        fleet.enqueue(one, duration_ns)
    first, second = fleet.begin_next((0, 1), 0)
    assert fleet.begin_next(fleet.end(first), 40) == [], "the other member is busy, and nobody overtakes"
    group = begun(fleet, 70, tuple(fleet.end(second)))
    assert (group.start_ns, group.end_ns) == (70, 80)
    assert fleet.running(0) is fleet.running(1) is group
    last = begun(fleet, 80, tuple(fleet.end(group)))
    assert (last.work.work_id, last.start_ns) == (4, 80)


def test_a_group_does_not_overtake_what_is_queued_before_it_on_one_of_its_devices() -> None:
    fleet = Fleet()
    for one in (work(1), work(2, 1, gpus=(0, 1))):
        fleet.enqueue(one, 40)
    assert [run.work.work_id for run in fleet.begin_next((1, 0), 0)] == [1]


def test_a_work_waits_for_the_state_of_its_job_once() -> None:
    fleet = Fleet()
    fleet.move(7, 0, 500, now_ns=0)
    for work_id in (1, 2):
        fleet.enqueue(work(work_id, job_id=7), 40)
    starts = []
    for now_ns in (100, 200):  # The second time is earlier than the arrival: it must not be waited for again.
        run = begun(fleet, now_ns)
        starts.append(run.start_ns)
        fleet.end(run)
    assert starts == [500, 200]


def test_a_state_that_arrived_long_ago_is_not_waited_for() -> None:
    fleet = Fleet()
    fleet.move(7, 0, 500, now_ns=0)
    fleet.enqueue(work(1, job_id=7), 40)
    run = begun(fleet, 800)
    assert (run.start_ns, run.end_ns) == (800, 840)


def test_a_state_leaves_at_the_end_of_its_jobs_latest_work() -> None:
    """Two works on device 0 are told; the third, on 1 and 2, takes over 5 ns after the second has ended."""
    fleet = Fleet()
    for work_id in (1, 2):
        fleet.enqueue(work(work_id, job_id=7), 40)
    for target in (1, 2):
        fleet.move(7, target, 5, now_ns=0)
    fleet.enqueue(work(3, job_id=7, gpus=(1, 2)), 40)
    assert fleet.begin_next((1, 2), 0) == []
    touched = fleet.end(begun(fleet, 0))
    assert touched == [0], "the first work of two does not send it off"
    assert fleet.end(second := begun(fleet, 40)) == [0, 1, 2]
    assert (begun(fleet, 80, (1, 2)).start_ns, second.end_ns) == (85, 80)


def test_a_stop_sends_the_state_off_earlier() -> None:
    fleet, one = Fleet(), work(1, job_id=7)
    fleet.enqueue(one, 40)
    begun(fleet, 0)
    fleet.move(7, 1, 5, now_ns=2)
    fleet.enqueue(work(2, job_id=7, gpus=(1,)), 40)
    stopped = fleet.stop(one, 13)
    assert stopped is not None
    assert begun(fleet, 20, tuple(fleet.end(stopped))).start_ns == 25


def test_a_revoked_work_does_not_wait_for_its_jobs_state() -> None:
    fleet, follower = Fleet(), work(2, job_id=7, gpus=(1,))
    fleet.enqueue(work(1, job_id=7), 40)
    begun(fleet, 0)
    fleet.move(7, 1, 5, now_ns=0)
    fleet.enqueue(follower, 40)
    fleet.stop(follower, 10)
    assert begun(fleet, 10, (1,)).end_ns == 10


def test_a_state_travels_while_its_next_work_is_dispatched() -> None:
    for dispatch_ns, start_ns in ((30, 130), (700, 800)):
        fleet = Fleet()
        fleet.move(7, 0, 120, now_ns=0)
        fleet.enqueue(work(1, job_id=7), 40, dispatch_ns)
        run = begun(fleet, 100)
        assert (run.start_ns, run.end_ns) == (start_ns, start_ns + 40)
        assert fleet.running(0) is run, "occupied meanwhile"
