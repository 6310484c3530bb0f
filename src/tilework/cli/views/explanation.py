"""The documents of `tilework explain` (those of --json): one request of a log, and a whole log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from tilework.admission.reservation_guard import FORCED
from tilework.control.account import EndedWork, account_of, cause_of
from tilework.control.decisions import describe_all, steps_of
from tilework.control.history import History, PastRequest, PastWork
from tilework.core.actions import DropToBestEffort, HoldBack, MoveState, Reject
from tilework.core.request import Status
from tilework.core.time import s_from_ns
from tilework.core.work import NewPlacement

MOST_LATE = 10


def request_document(history: History, past: PastRequest) -> dict[str, Any]:
    """Everything about one request; times in seconds from its arrival, but for `arrival_s`."""
    account = account_of(history, past)
    request, arrival_ns = past.request, past.request.arrival_ns
    return {
        "uid": request.uid,
        "job": past.job_id,
        "request": {
            "pipeline": request.pipeline,
            "size": str(request.shape),
            "steps": request.steps,
            "arrival_s": _seconds(arrival_ns),
            "deadline_s": _after(request.deadline_ns, arrival_ns),
            "on_miss": request.on_miss.value,
            "tenant": request.tenant,
            "priority": request.priority,
            "exact": request.exact,
            **({"loras": {one.name: one.scale for one in request.loras}} if request.loras else {}),
        },
        "status": "open" if past.status is None else past.status.value,
        "on_time": past.on_time,
        "eta_s": _after(past.eta_ns, arrival_ns),
        "finish_s": _after(past.finish_ns, arrival_ns),
        "slack_s": _seconds(account.slack_ns),
        "eta_error_s": _seconds(account.eta_error_ns),
        "decisions": [decision.to_json() for decision in describe_all(past.actions, request, past.job_id)],
        "works": [_work(work, past) for work in account.works],
        "ran_s": _seconds(account.ran_ns),
        "waited_s": _seconds(account.waited_ns),
        "loading_s": _seconds(account.loading_ns),
        "idle_s": _seconds(account.idle_ns),
        "waited_for": [{"uid": uid, "seconds": _seconds(duration_ns)} for uid, duration_ns in account.blockers],
        "cause": cause_of(account),
    }


def summary_document(history: History) -> dict[str, Any]:
    """A whole log: the ends of its requests, deadlines and promises kept, and the requests that were latest.

    A request that was refused or cancelled neither keeps nor misses its deadline, see `Request.met_deadline`.
    """
    requests = history.requests
    timed = [past.on_time for past in requests if past.on_time is not None]
    promised = [past.on_time for past in requests if past.on_time is not None and past.request.is_promise]
    actions = [action for past in requests for _, action in past.actions]
    errors_s = [
        s_from_ns(past.finish_ns - past.eta_ns)
        for past in requests
        if past.status is Status.DONE and past.finish_ns is not None and past.eta_ns is not None
    ]
    return {
        "policy": history.header.config.policy,
        "version": history.header.version,
        "devices": history.num_devices,
        "seconds": _seconds(history.end_ns),
        "requests": len(requests),
        "works": len(history.works),
        "by_outcome": dict(Counter(_outcome(past) for past in requests).most_common()),
        "attainment": sum(timed) / len(timed) if timed else None,
        "promises": {"kept": sum(promised), "broken": len(promised) - sum(promised)},
        "held_back": sum(isinstance(action, HoldBack) for action in actions),
        "starts_forced": sum(past.work.why == FORCED for past in history.works),
        "eta_error_median_s": round(median(errors_s), 6) if errors_s else None,
        "eta_error_median_abs_s": round(median(map(abs, errors_s)), 6) if errors_s else None,
        "refused": dict(Counter(action.code.value for action in actions if isinstance(action, Reject)).most_common()),
        "dropped_to_best_effort": sum(isinstance(action, DropToBestEffort) for action in actions),
        "moves": sum(isinstance(action, MoveState) for action in actions),
        "lost_works": len(history.lost),
        "lost_devices": [
            {"device_id": change.device_id, "at_s": _seconds(change.at_ns), "reason": change.reason}
            for change in history.devices
            if not change.is_up
        ],
        "placements": [
            {"at_s": _seconds(past.at_ns), "groups": _groups(past.placement), "why": past.placement.why}
            for past in history.placements
        ],
        "latest": [_late(history, past) for past in _latest(requests)],
    }


def _groups(placement: NewPlacement) -> dict[str, list[int]]:
    """The devices by what they are for."""
    found: dict[str, list[int]] = {}
    for group, name in placement.groups:
        found.setdefault(name, []).extend(group)
    return found


def _outcome(past: PastRequest) -> str:
    if past.status is None:
        return "open"
    return "late" if past.status is Status.DONE and past.on_time is False else past.status.value


def _latest(requests: Sequence[PastRequest]) -> list[PastRequest]:
    late = [past for past in requests if past.status is Status.DONE and past.on_time is False]
    return sorted(late, key=_lateness_ns, reverse=True)[:MOST_LATE]


def _lateness_ns(past: PastRequest) -> int:
    assert past.finish_ns is not None, "a late request has an end"
    assert past.request.deadline_ns is not None, "a late request has a deadline"
    return past.finish_ns - past.request.deadline_ns


def _late(history: History, past: PastRequest) -> dict[str, Any]:
    return {
        "uid": past.request.uid,
        "size": str(past.request.shape),
        "steps": past.request.steps,
        "late_s": _seconds(_lateness_ns(past)),
        "cause": cause_of(account_of(history, past)),
    }


def _work(work: EndedWork, past: PastRequest) -> dict[str, Any]:
    """One work. `actual_s` is None if it was stopped or lost: its begin is not in the log then."""
    arrival_ns, steps = past.request.arrival_ns, steps_of(work.work, past.job_id)
    measured = isinstance(work, PastWork) and work.run_ns is not None
    return {
        "work": work.work.work_id,
        "stage": work.work.stage.name,
        "steps": None if steps is None else [steps[0], steps[0] + work.steps - 1],
        "devices": list(work.work.devices),
        "start_s": _after(work.start_ns, arrival_ns),
        "end_s": _after(work.end_ns, arrival_ns),
        "predicted_s": _seconds(work.predicted_ns) if isinstance(work, PastWork) else None,
        "actual_s": _seconds(work.end_ns - work.start_ns) if measured else None,
        "outcome": "done" if measured else "stopped" if isinstance(work, PastWork) else f"lost: {work.reason}",
    }


def _seconds(time_ns: int | None) -> Any:
    return None if time_ns is None else round(s_from_ns(time_ns), 6)


def _after(time_ns: int | None, arrival_ns: int) -> Any:
    return None if time_ns is None else _seconds(time_ns - arrival_ns)
