"""What `tilework explain` says, first as plain documents (those of --json), then as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from tilework.cli.console import out
from tilework.control.account import EndedWork, account_of, cause_of
from tilework.control.decisions import describe_all, devices_text, span_text, steps_of
from tilework.control.history import History, PastRequest, PastWork
from tilework.core.actions import DropToBestEffort, MoveState, Reject
from tilework.core.request import Status
from tilework.core.time import ns_from_s, s_from_ns
from tilework.report.words import counted_devices

MOST_LATE = 10


def story_document(history: History, past: PastRequest) -> dict[str, Any]:
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
        },
        "status": "open" if past.status is None else past.status.value,
        "on_time": past.on_time,
        "eta_s": _after(past.eta_ns, arrival_ns),
        "finish_s": _after(past.finish_ns, arrival_ns),
        "slack_s": _seconds(account.slack_ns),
        "eta_error_s": _seconds(account.eta_error_ns),
        "decisions": [decision.to_json() for decision in describe_all(past.told, request, past.job_id)],
        "works": [_work(work, past) for work in account.works],
        "ran_s": _seconds(account.ran_ns),
        "waited_s": _seconds(account.waited_ns),
        "idle_s": _seconds(account.idle_ns),
        "waited_for": [{"uid": uid, "seconds": _seconds(duration_ns)} for uid, duration_ns in account.blockers],
        "cause": cause_of(account),
    }


def summary_document(history: History) -> dict[str, Any]:
    """A whole log: how its requests ended, what became of deadlines and promises, and which requests were latest.

    Who was refused or cancelled has neither kept nor missed a deadline, see `Request.met_deadline`.
    """
    requests = history.requests
    timed = [past.on_time for past in requests if past.on_time is not None]
    promised = [past.on_time for past in requests if past.on_time is not None and past.request.is_promise]
    told = [action for past in requests for _, action in past.told]
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
        "eta_error_median_s": round(median(errors_s), 6) if errors_s else None,
        "eta_error_median_abs_s": round(median(map(abs, errors_s)), 6) if errors_s else None,
        "refused": dict(Counter(action.code.value for action in told if isinstance(action, Reject)).most_common()),
        "dropped_to_best_effort": sum(isinstance(action, DropToBestEffort) for action in told),
        "moves": sum(isinstance(action, MoveState) for action in told),
        "lost_works": len(history.lost),
        "lost_devices": [
            {"device_id": change.device_id, "at_s": _seconds(change.at_ns), "reason": change.reason}
            for change in history.devices
            if not change.is_up
        ],
        "latest": [_late(history, past) for past in _latest(requests)],
    }


def print_story(document: Mapping[str, Any]) -> None:
    request = document["request"]
    job = "" if document["job"] is None else f" (job {document['job']})"
    deadline = "no deadline" if request["deadline_s"] is None else f"due {_span(request['deadline_s'])} after arrival"
    print_line(f"{document['uid']}{job}", style="bold")
    print_line(
        f"{request['pipeline']}, {request['size']}, {request['steps']} steps, {deadline}; "
        f"tenant {request['tenant']}, class {request['priority']}, on miss {request['on_miss']}; "
        f"arrived at {request['arrival_s']:.3f} s"
    )
    print_line(_ending(document), style={True: "green", False: "red", None: ""}[document["on_time"]])
    out.print()
    print_decisions(document["decisions"])
    if document["works"]:
        out.print(_works_table(document["works"]))
    print_line(_waiting(document))
    if document["cause"]:
        print_line(f"{'late' if document['status'] == Status.DONE else 'not served'} because: {document['cause']}")


def print_decisions(decisions: Sequence[Mapping[str, Any]]) -> None:
    """One line each; a server may describe of several requests that came in one call, which are then named."""
    several = len({decision.get("uid") for decision in decisions}) > 1
    for decision in decisions:
        name = f"{decision['uid']}  " if several else ""
        print_line(f"  {decision['at_s']:+10.3f} s  {name}{decision['text']}")


def print_summary(document: Mapping[str, Any], log: Path) -> None:
    attained = "" if document["attainment"] is None else f", {document['attainment']:.1%} of deadlines were kept"
    print_line(
        f"{document['policy']} on {counted_devices(document['devices'])}: {document['requests']} requests in "
        f"{document['seconds']:.1f} s{attained}",
        style="bold",
    )
    print_line("outcomes: " + _counts(document["by_outcome"]))
    if document["eta_error_median_s"] is not None:
        print_line(
            f"ends: {_foretold(document['eta_error_median_s'])} in the median, "
            f"{_span(document['eta_error_median_abs_s'])} off either way"
        )
    if any(document["promises"].values()):
        print_line("promises: " + _counts(document["promises"]))
    if document["refused"]:
        print_line("refused: " + _counts(document["refused"]))
    print_line(
        f"{document['works']} works, {document['moves']} moves of a state, "
        f"{document['dropped_to_best_effort']} dropped to best effort, {document['lost_works']} works lost"
    )
    for lost in document["lost_devices"]:
        print_line(f"GPU {lost['device_id']} was lost at {lost['at_s']:.3f} s: {lost['reason']}")
    if document["latest"]:
        out.print(_latest_table(document["latest"]))
        uid = document["latest"][0]["uid"]
        print_line(f"ask about one: tilework explain {log} {uid}")
    else:
        print_line(f"no request was done late; ask about any: tilework explain {log} UID")


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
    """`actual_s` is None for a work that was stopped or lost, whose begin is not in the log."""
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


def _ending(document: Mapping[str, Any]) -> str:
    if document["finish_s"] is None:
        return "not finished when the log ends"
    text = f"{document['status']} {_span(document['finish_s'])} after arrival"
    if document["slack_s"] is not None:
        slack_s = document["slack_s"]
        text += f", {_span(abs(slack_s))} {'before' if slack_s >= 0 else 'after'} its deadline"
    if document["eta_error_s"] is not None:
        text += f", {_foretold(document['eta_error_s'])}"
    return text


def _foretold(error_s: float) -> str:
    return f"{_span(abs(error_s))} {'later' if error_s >= 0 else 'earlier'} than foretold"


def _waiting(document: Mapping[str, Any]) -> str:
    text = f"at work {_span(document['ran_s'])}, waited {_span(document['waited_s'])}"
    others = document["waited_for"]
    if others:
        named = ", ".join(f"{one['uid']} {_span(one['seconds'])}" for one in others[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        text += f"; meanwhile its GPUs worked for {named}{more}"
    return f"{text}; its GPUs had no work for {_span(document['idle_s'])} of it" if document["waited_s"] else text


def _works_table(works: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("begin", "end", "what", "on", "predicted", "took", "difference", ""):
        table.add_column(heading, justify="left" if heading in ("what", "on", "") else "right")
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


def _latest_table(latest: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(title="latest", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("request", overflow="fold")
    table.add_column("size")
    table.add_column("late by", justify="right")
    table.add_column("because", overflow="fold")
    for one in latest:
        table.add_row(escape(_plain(one["uid"])), one["size"], _span(one["late_s"]), escape(_plain(one["cause"])))
    return table


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def print_line(text: str, style: str = "") -> None:
    out.print(_plain(text), style=style or None, markup=False, highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    """Without what a terminal would obey: names and reasons come from clients."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _span(seconds: float) -> str:
    return span_text(ns_from_s(seconds))


def _seconds(time_ns: int | None) -> Any:
    return None if time_ns is None else round(s_from_ns(time_ns), 6)


def _after(time_ns: int | None, arrival_ns: int) -> Any:
    return None if time_ns is None else _seconds(time_ns - arrival_ns)
