"""A cache that a request has only if it would be late without: who decides it, and that all follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import promise, request, simulate, table
from recorded import record
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.history_recorder import read_history
from tilework.control.log import replay
from tilework.core.actions import Accept, Action, Reject
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.events import DeviceJoined, Restored, Submitted
from tilework.core.request import Request, Status
from tilework.core.time import NS_PER_S

CACHE = CacheChoice(CacheKind.PATCH, 0.1)
LOOSE_S, TIGHT_S = 100.0, 0.01


def asked(uid: str, slo_s: float | None, arrival_s: float = 0.0) -> Request:
    return request(uid, arrival_s, slo_s=slo_s, cache=CACHE, cache_if_late=True)


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


@pytest.mark.parametrize(("slo_s", "drops"), [(None, True), (LOOSE_S, True), (TIGHT_S, False)])
def test_it_has_its_cache_only_if_it_would_be_late(slo_s: float | None, drops: bool) -> None:
    made = controller()
    accept = answer(made.handle(Submitted(asked("a", slo_s)), 0))
    assert isinstance(accept, Accept)
    assert accept.drops_cache is drops
    assert made.tracker.jobs[accept.job_id].request.cache == (None if drops else CACHE)
    assert ("it would be late without" in accept.why) is not drops


def test_who_asks_for_it_in_any_case_has_it() -> None:
    accept = answer(controller().handle(Submitted(request("a", slo_s=LOOSE_S, cache=CACHE)), 0))
    assert isinstance(accept, Accept)
    assert not accept.drops_cache


def test_a_deadline_that_only_the_cache_can_keep_is_promised() -> None:
    made = controller()
    run_ns = learn(made, 0.3)
    due_s = 0.8 * run_ns / NS_PER_S
    plain, cached = promise("plain", 0.0, due_s), promise("cached", 0.0, due_s, cache=CACHE, cache_if_late=True)
    assert isinstance(answer(made.handle(Submitted(plain), 0)), Reject)
    accept = answer(made.handle(Submitted(cached), 0))
    assert isinstance(accept, Accept), accept
    assert not accept.drops_cache
    assert accept.eta_ns <= due_s * NS_PER_S


def test_a_deadline_that_nothing_can_keep_is_refused_as_without() -> None:
    made = controller()
    learn(made, 0.9)
    refusal = answer(made.handle(Submitted(promise("a", 0.0, TIGHT_S, cache=CACHE, cache_if_late=True)), 0))
    same = answer(made.handle(Submitted(promise("a", 0.0, TIGHT_S)), 0))
    assert isinstance(refusal, Reject)
    assert refusal == same


def test_one_that_was_accepted_before_a_restart_is_asked_again() -> None:
    accept = answer(controller().handle(Restored(asked("a", LOOSE_S), 0), 0))
    assert isinstance(accept, Accept)
    assert accept.drops_cache


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
