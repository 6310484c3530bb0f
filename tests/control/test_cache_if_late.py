"""A cache that a request gets only if it would be late without: who decides it, when, and that all follow."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from builders import promise, request, simulate, table
from recorded import find, record
from stages import DIFFUSE
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.decisions import describe_all
from tilework.control.history_recorder import read_history
from tilework.control.log import replay
from tilework.core.actions import Accept, Action, DropToBestEffort, Reject
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.events import DeviceJoined, Restored, Submitted
from tilework.core.request import OnMiss, Request, Status
from tilework.core.time import NS_PER_S
from tilework.core.work import Plan

CACHE = CacheChoice(CacheKind.PATCH, 0.1)
LOOSE_S, TIGHT_S = 100.0, 0.01


def asked(uid: str, slo_s: float | None, arrival_s: float = 0.0) -> Request:
    return request(uid, arrival_s, slo_s=slo_s, spare_cache=CACHE)


def controller() -> Controller:
    made = Controller(ControllerConfig(policy="edf"), table())
    made.handle(DeviceJoined(0, 0), 0)
    return made


def learn(made: Controller, factor: float) -> int:
    """Works with the cache have taken `factor` times as long; returns how long a request takes without."""
    cached = request("", cache=CACHE)
    stage = made.costs.start(cached).stepped
    assert stage is not None
    plain = made.costs.start(replace(cached, cache=None)).stepped
    assert plain is not None
    step_ns = made.costs.work_ns(plain, [cached], 1)
    for _ in range(50):
        made.costs.observe(stage, [cached], 1, 10, round(10 * factor * step_ns))
    return 10 * step_ns


def answer(actions: tuple[Action, ...]) -> Action:
    return actions[0]


@pytest.mark.parametrize(("slo_s", "uses"), [(None, False), (LOOSE_S, False), (TIGHT_S, True)])
def test_it_has_its_cache_only_if_it_would_be_late(slo_s: float | None, uses: bool) -> None:
    made = controller()
    accept = answer(made.handle(Submitted(asked("a", slo_s)), 0))
    assert isinstance(accept, Accept)
    assert accept.uses_cache is uses
    assert made.tracker.jobs[accept.job_id].request.cache == (CACHE if uses else None)
    assert ("it would be late without" in accept.why) is uses


def test_who_asks_for_it_in_any_case_has_it() -> None:
    accept = answer(controller().handle(Submitted(request("a", slo_s=LOOSE_S, cache=CACHE)), 0))
    assert isinstance(accept, Accept)
    assert not accept.uses_cache
    assert accept.accepted(request("a", cache=CACHE)).cache == CACHE


def test_a_deadline_that_only_the_cache_can_keep_is_promised() -> None:
    made = controller()
    run_ns = learn(made, 0.3)
    due_s = 0.8 * run_ns / NS_PER_S
    plain, cached = promise("plain", 0.0, due_s), promise("cached", 0.0, due_s, spare_cache=CACHE)
    assert isinstance(answer(made.handle(Submitted(plain), 0)), Reject)
    accept = answer(made.handle(Submitted(cached), 0))
    assert isinstance(accept, Accept), accept
    assert accept.uses_cache
    assert accept.eta_ns <= due_s * NS_PER_S


def test_a_deadline_that_nothing_can_keep_is_refused_as_without() -> None:
    made = controller()
    learn(made, 0.9)
    refusal = answer(made.handle(Submitted(promise("a", 0.0, TIGHT_S, spare_cache=CACHE)), 0))
    same = answer(made.handle(Submitted(promise("a", 0.0, TIGHT_S)), 0))
    assert isinstance(refusal, Reject)
    assert refusal == same


def test_one_that_was_accepted_before_a_restart_is_asked_again() -> None:
    accept = answer(controller().handle(Restored(asked("a", LOOSE_S), 0), 0))
    assert isinstance(accept, Accept)
    assert not accept.uses_cache


def test_simulation_log_and_history_follow_the_decision() -> None:
    requests = [asked("loose", LOOSE_S), asked("tight", TIGHT_S, 0.1), asked("none", None, 0.2)]
    lines, trace = record(requests)
    assert all(ending.status is Status.DONE for ending in trace.endings)
    wanted = {"loose": None, "tight": CACHE, "none": None}
    assert {ending.request.uid: ending.request.cache for ending in trace.endings} == wanted
    asked_by = {ending.job_id: ending.request for ending in trace.endings}
    for run in trace.runs:
        caches = {asked_by[job_id].cache for job_id in run.work.job_ids}
        assert not run.work.stage.has_steps or caches == {run.work.stage.caches[0] if run.work.stage.caches else None}
    assert replay(lines) == (len(lines) - 1, None)
    assert {past.request.uid: past.request.cache for past in read_history(lines).requests} == wanted
    assert simulate(requests, "tilework").endings


# Later.

CACHED_ROWS = tuple(
    replace(one, seconds=0.3 * one.seconds, cache=CACHE, skipped=0.9) for one in table().rows if one.stage == DIFFUSE
)
SAVING = replace(table(), rows=(*table().rows, *CACHED_ROWS))
BEHIND = [asked("a", 2.0), *(request(f"before {index}", 0.3, slo_s=1.5 + index / 100, steps=3) for index in range(3))]
"""The first would be on time, but others with earlier deadlines come before it has made its steps."""


def turns(lines: list[str]) -> list[dict[str, Any]]:
    """The actions by which requests get their caches, with the index of their line."""
    entries = [json.loads(line) for line in lines[1:]]
    return [one | {"t": entry["t"]} for entry in entries for one in entry["actions"] if one["is"] == "UseCache"]


@pytest.mark.parametrize("policy", ["edf", "tilework"])
def test_one_that_falls_behind_later_turns_to_its_cache(policy: str) -> None:
    lines, trace = record(BEHIND, policy, costs=SAVING)
    (turn,) = turns(lines)
    assert turn["uid"] == "a"
    assert turn["t"] > 0, "not at admission"
    assert "even if nothing else ran" in turn["why"]
    (ending,) = [one for one in trace.endings if one.request.uid == "a"]
    assert ending.on_time
    assert (ending.request.cache, ending.request.spare_cache) == (CACHE, None)
    steps = [run for run in trace.runs if run.work.stage.has_steps and ending.job_id in run.work.job_ids]
    assert [bool(run.work.stage.caches) for run in steps] == sorted(bool(run.work.stage.caches) for run in steps)
    assert sum(run.steps for run in steps) == 10
    assert replay(lines) == (len(lines) - 1, None)
    (past,) = [one for one in read_history(lines).requests if one.request.uid == "a"]
    assert past.request == ending.request
    assert any(
        "its further steps use the cache patch=0.1" in str(one) for one in describe_all(past.actions, past.request)
    )
    late = [replace(one, spare_cache=None) for one in BEHIND]
    assert not next(one for one in record(late, policy, costs=SAVING)[1].endings if one.request.uid == "a").on_time


def test_one_that_is_worthless_when_late_turns_before_it_ends() -> None:
    worthless = [replace(BEHIND[0], on_miss=OnMiss.DROP), *BEHIND[1:]]
    lines, trace = record(worthless, costs=SAVING)
    assert [one["uid"] for one in turns(lines)] == ["a"]
    assert next(one for one in trace.endings if one.request.uid == "a").status is Status.DONE
    without = [replace(worthless[0], spare_cache=None), *worthless[1:]]
    assert (
        next(one for one in record(without, costs=SAVING)[1].endings if one.request.uid == "a").status is Status.EXPIRED
    )


def test_it_turns_once_and_is_dropped_if_that_does_not_help() -> None:
    hopeless = [asked("a", 2.3), request("before", 0.01, slo_s=2.27, steps=18)]
    lines, trace = record(hopeless, costs=SAVING)
    assert [one["uid"] for one in turns(lines)] == ["a"]
    assert not next(one for one in trace.endings if one.request.uid == "a").on_time
    assert find(lines, '"DropToBestEffort"', '"job_id":0') > find(lines, '"UseCache"')


def test_why_it_does_not_turn_is_said() -> None:
    """Behind by its decode, with all its steps made."""
    made = controller()
    made.handle(Submitted(asked("a", LOOSE_S)), 0)
    (job,) = made.tracker.jobs.values()
    job.done = job.done.itinerary.at[11]
    job.works.clear()
    job._commit()
    assert not job.may_use_cache
    actions = made._planner._give_up(Plan(dropped_to_best_effort=((job.job_id, "it is late"),)))
    assert actions == [DropToBestEffort(job.job_id, "it is late, and no step is left for its cache")]
