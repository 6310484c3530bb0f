"""The life of a job: what must hold of the table of its states, and that it is the life that jobs have."""

from __future__ import annotations

from pathlib import Path

import pytest

from builders import job, request, table
from tilework.control.cluster.job import Job
from tilework.control.cluster.life import TRANSITIONS, JobEvent, JobState
from tilework.control.controller import Controller, ControllerConfig
from tilework.sim.fuzz import Choice, run_seeds
from tilework.sim.invariants import check_states
from tools.job_life import drawn

ROOT = Path(__file__).parents[2]
PAIRS = {(state, event) for state, following in TRANSITIONS.items() for event in following}


def test_each_state_has_its_row_and_a_way_to_the_end_out_of_which_none_leads() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert not TRANSITIONS[JobState.ENDED]
    reach = {JobState.ENDED}
    for _ in JobState:
        reach |= {state for state, following in TRANSITIONS.items() if reach & set(following.values())}
    assert reach == set(JobState)


def test_an_attempt_that_is_lost_takes_a_job_back_from_wherever_it_is() -> None:
    """But not once all stages have run: then nothing of it can be lost."""
    finished = {JobState.DONE, JobState.ENDED}
    assert {state for state, row in TRANSITIONS.items() if row.get(JobEvent.RETRY) is JobState.WAITING} == {
        *JobState
    } - finished


def test_each_entry_of_the_table_happens_to_some_job_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """In scenarios where things go wrong, under the default policy; few of them park a job, so those are by hand."""
    seen: set[tuple[JobState, JobEvent]] = set()
    change = Job.change

    def noted(job: Job, event: JobEvent) -> None:
        seen.add((job.state, event))
        change(job, event)

    monkeypatch.setattr(Job, "change", noted)
    for event in (JobEvent.UNPARK, JobEvent.RETRY, JobEvent.END):
        tracker = Controller(ControllerConfig(), table()).tracker
        parked = job(0, request("a"))
        tracker.add_job(parked)
        tracker.park(parked)
        match event:
            case JobEvent.UNPARK:
                tracker.unpark()
            case JobEvent.RETRY:
                tracker.restart(parked, None)
            case JobEvent.END:
                tracker.remove_job(parked)
        check_states(tracker)
    seeds = iter(range(40))
    while seen != PAIRS and (seed := next(seeds, None)) is not None:
        (result,) = run_seeds([seed], Choice(policy="tilework"), 1)
        assert not result.violation
    assert seen == PAIRS


def test_what_the_table_lacks_is_refused() -> None:
    one = job(0, request("a"))
    one.change(JobEvent.PARK)
    with pytest.raises(AssertionError, match="job 0 is parked: 'start' cannot happen to it"):
        one.change(JobEvent.START)


@pytest.mark.parametrize("state", [JobState.WAITING, JobState.RUNNING, JobState.STOPPING])
def test_a_job_that_is_kept_elsewhere_than_its_state_says_is_found(
    state: JobState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of one state forget it."""
    change = Job.change

    def wrong(one: Job, event: JobEvent) -> None:
        change(one, event)
        if one.state is state:
            one.state = JobState.PARKED

    monkeypatch.setattr(Job, "change", wrong)
    assert any(one.violation for one in run_seeds(range(4), Choice(policy="tilework"), 1))


def test_the_page_shows_the_table_as_it_is() -> None:
    assert (ROOT / "docs" / "job_life.svg").read_text("utf-8") == drawn(), (
        "run python tools/job_life.py docs/job_life.svg"
    )
