"""The documents of `tilework explain`, as JSON and as text, and the short names of their requests."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from tilework.admission.reservation_guard import FORCED
from tilework.cli.console import out
from tilework.control.account import EndedWork, account_of, cause_of
from tilework.control.decisions import describe_all, devices_text, span_text, steps_of
from tilework.control.history import History, PastRequest, PastWork
from tilework.core.actions import DropToBestEffort, HoldBack, MoveState, Reject
from tilework.core.request import Status
from tilework.core.time import ns_from_s, s_from_ns
from tilework.core.work import NewPlacement
from tilework.report.tables import counted_devices

MOST_LATE = 10


def request_document(history: History, past: PastRequest) -> dict[str, Any]:
    """Return everything about one request; times are in seconds from its arrival, but for `arrival_s`."""
    account = account_of(history, past)
    request = past.request
    arrival_ns = past.request.arrival_ns
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
    """Return a whole log: the ends of its requests, deadlines and promises kept, and the requests late by the most.

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
    """Return the devices by what they are for."""
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
    """Return one work. `actual_s` is None if it was stopped or lost: its begin is not in the log then."""
    arrival_ns = past.request.arrival_ns
    steps = steps_of(work.work, past.job_id)
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


def print_request(document: Mapping[str, Any], names: RequestNames) -> None:
    request = document["request"]
    job = "" if document["job"] is None else f" (job {document['job']})"
    deadline = "no deadline" if request["deadline_s"] is None else f"due {_span(request['deadline_s'])} after arrival"
    exact = ", exact" if request["exact"] else ""
    print_line(f"{document['uid']}{job}", style="bold")
    print_line(
        f"{request['pipeline']}, {request['size']}, {request['steps']} steps, {deadline}; "
        f"tenant {request['tenant']}, class {request['priority']}, on miss {request['on_miss']}{exact}; "
        f"arrived at {request['arrival_s']:.3f} s"
    )
    print_line(_ending(document), style={True: "green", False: "red", None: ""}[document["on_time"]])
    out.print()
    print_line("decided (seconds after arrival)")
    print_decisions(document["decisions"])
    if document["works"]:
        out.print(_works_table(document["works"]))
    print_line(_waiting(document, names))
    if document["cause"]:
        print_line(f"{'late' if document['status'] == Status.DONE else 'not served'} because: {document['cause']}")


def print_decisions(decisions: Sequence[Mapping[str, Any]]) -> None:
    """Print one line for each; lines of several requests of one call begin with the name of their request."""
    several = len({decision.get("uid") for decision in decisions}) > 1
    for decision in decisions:
        name = f"{decision['uid']}  " if several else ""
        print_line(f"  {decision['at_s']:+10.3f} s  {name}{decision['text']}")


def print_summary(document: Mapping[str, Any], log: Path, names: RequestNames) -> None:
    attained = "" if document["attainment"] is None else f", {document['attainment']:.1%} of deadlines kept"
    print_line(
        f"{document['policy']} on {counted_devices(document['devices'])}: {document['requests']} requests in "
        f"{document['seconds']:.1f} s{attained}",
        style="bold",
    )
    print_line("outcomes: " + _counts(document["by_outcome"]))
    if document["eta_error_median_s"] is not None:
        print_line(
            f"predicted finishes: requests ended {_error_text(document['eta_error_median_s'])} (median; "
            f"{_span(document['eta_error_median_abs_s'])} off either way)"
        )
    if any(document["promises"].values()):
        forced = f"the guard started {document['starts_forced']} of {document['works']} runs for them"
        held = f"it held back {document['held_back']} starts and stops"
        print_line(f"promises: {_counts(document['promises'])}; {forced}; {held}")
    if document["refused"]:
        print_line("refused: " + _counts(document["refused"]))
    print_line(
        f"{document['works']} runs, {document['moves']} moves of a state, "
        f"{document['dropped_to_best_effort']} requests dropped to best effort, {document['lost_works']} runs lost"
    )
    for lost in document["lost_devices"]:
        print_line(f"lost device {lost['device_id']} at {lost['at_s']:.3f} s: {lost['reason']}")
    for placed in document["placements"]:
        groups = ", ".join(f"{name} on {devices_text(tuple(group))}" for name, group in placed["groups"].items())
        print_line(f"placement from {placed['at_s']:.3f} s on: {groups}: {placed['why']}")
    if document["latest"]:
        out.print(_latest_table(document["latest"], names))
        print_line(f"ask about one: tilework explain {log} {names.short(document['latest'][0]['uid'])}")
    else:
        print_line(f"no request was late; ask about any: tilework explain {log} UID")


def _ending(document: Mapping[str, Any]) -> str:
    if document["finish_s"] is None:
        return "still open at the end of the log"
    text = f"{document['status']} {_span(document['finish_s'])} after arrival"
    if document["slack_s"] is not None:
        slack_s = document["slack_s"]
        text += f", {_span(abs(slack_s))} {'before' if slack_s >= 0 else 'after'} its deadline"
    if document["eta_error_s"] is not None:
        text += f", {_error_text(document['eta_error_s'])}"
    return text


def _error_text(error_s: float) -> str:
    return f"{_span(abs(error_s))} {'later' if error_s >= 0 else 'earlier'} than predicted"


def _waiting(document: Mapping[str, Any], names: RequestNames) -> str:
    text = f"at work {_span(document['ran_s'])}, waited {_span(document['waited_s'])}"
    others = document["waited_for"]
    if others:
        named = ", ".join(f"{names.short(one['uid'])} {_span(one['seconds'])}" for one in others[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        text += f"; its devices ran {named}{more}"
    if document["loading_s"]:
        text += f"; its devices loaded weights for {_span(document['loading_s'])}"
    return f"{text}; its devices were idle for {_span(document['idle_s'])} of it" if document["waited_s"] else text


def _works_table(works: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(title="ran (seconds after arrival)", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("begin", "end", "run", "devices", "predicted", "took", "difference", ""):
        table.add_column(heading, justify="left" if heading in ("run", "devices", "") else "right")
    for work in works:
        predicted_s, actual_s = work["predicted_s"], work["actual_s"]
        first, last = work["steps"] or (None, None)
        what = work["stage"] if first is None else f"step {first}" if first == last else f"steps {first}-{last}"
        difference = "" if not predicted_s or actual_s is None else f"{actual_s / predicted_s - 1:+.1%}"
        table.add_row(
            f"{work['start_s']:.3f}",
            f"{work['end_s']:.3f}",
            escape(what),
            devices_text(tuple(work["devices"])),
            "" if predicted_s is None else _span(predicted_s),
            "" if actual_s is None else _span(actual_s),
            difference,
            "" if work["outcome"] == "done" else escape(work["outcome"]),
        )
    return table


def _latest_table(latest: Iterable[Mapping[str, Any]], names: RequestNames) -> Table:
    table = Table(title="late by the most", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("request", overflow="fold")
    table.add_column("size")
    table.add_column("late by", justify="right")
    table.add_column("because", overflow="fold")
    for one in latest:
        name = escape(_plain(names.short(one["uid"])))
        because = escape(_plain(one["cause"]))
        table.add_row(name, one["size"], _span(one["late_s"]), because)
    return table


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def print_line(text: str, style: str = "") -> None:
    out.print(_plain(text), style=style or None, markup=False, highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    """Return the text without characters that control a terminal: names and reasons come from clients."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _span(seconds: float) -> str:
    return span_text(ns_from_s(seconds))


_LEAST_CHARS = 8


def call_of(uid: str) -> str:
    """Return the name of the call that a request came in: images are called `{call}-{index}`."""
    call, _, index = uid.rpartition("-")
    return call if call and index.isdecimal() else uid


class RequestNames:
    """Finds requests by their names. Takes time to sort them once, and next to none for each name."""

    def __init__(self, requests: Sequence[PastRequest]) -> None:
        self._by_uid = {past.request.uid: past for past in requests}
        self._by_job = {str(past.job_id): past for past in reversed(requests) if past.job_id is not None}
        self._sorted = sorted(self._by_uid)

    def named(self, name: str) -> list[PastRequest]:
        """Return the request of this uid, else of this job number, else the only one, or the only call, whose uid
        begins so.

        `cfe4-1` is image 1 of the only call that begins with `cfe4`. Empty if there is none, or no only one.
        """
        if (known := self._by_uid.get(name) or self._by_job.get(name)) is not None:
            return [known]
        begun = self.begun(name)
        if not begun:
            begin, _, index = name.rpartition("-")
            begun = [uid for uid in self._only_call(begin) if begin and uid == f"{call_of(uid)}-{index}"]
        elif len(begun) > 1:
            begun = self._only_call(name)
        return [self._by_uid[uid] for uid in begun]

    def begun(self, begin: str) -> list[str]:
        """Return the uids that begin so, in order."""
        end = bisect_left(self._sorted, begin + chr(sys.maxunicode))
        return self._sorted[bisect_left(self._sorted, begin) : end]

    def short(self, uid: str) -> str:
        """Return a name that means this request alone: its uid, or a beginning of it with eight characters or more."""
        past = self._by_uid[uid]
        call = call_of(uid)
        for num_chars in range(_LEAST_CHARS, len(call) + 1):
            for name in (uid[:num_chars], uid[:num_chars] + uid[len(call) :]):
                if self.named(name) == [past]:
                    return name
        return uid

    def _only_call(self, begin: str) -> list[str]:
        """Return the uids of the only call that begins so; empty if there are several. Its images arrive together."""
        begun = self.begun(begin)
        if not begun or call_of(begun[0]) != call_of(begun[-1]):  # Most of many differ there already.
            return []
        calls = {(call_of(uid), self._by_uid[uid].request.arrival_ns) for uid in begun}
        return begun if len(calls) == 1 and call_of(begun[0]).startswith(begin) else []
