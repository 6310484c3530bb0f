"""The documents of `tilework explain` as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from tilework.cli.console import out
from tilework.cli.views.request_names import RequestNames
from tilework.control.decisions import devices_text, span_text
from tilework.core.request import Status
from tilework.core.time import ns_from_s
from tilework.report.words import counted_devices


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
    print_decisions(document["decisions"])
    if document["works"]:
        out.print(_works_table(document["works"]))
    print_line(_waiting(document, names))
    if document["cause"]:
        print_line(f"{'late' if document['status'] == Status.DONE else 'not served'} because: {document['cause']}")


def print_decisions(decisions: Sequence[Mapping[str, Any]]) -> None:
    """One line each; those of several requests of one call begin with the name of their request."""
    several = len({decision.get("uid") for decision in decisions}) > 1
    for decision in decisions:
        name = f"{decision['uid']}  " if several else ""
        print_line(f"  {decision['at_s']:+10.3f} s  {name}{decision['text']}")


def print_summary(document: Mapping[str, Any], log: Path, names: RequestNames) -> None:
    attained = "" if document["attainment"] is None else f", {document['attainment']:.1%} of deadlines were kept"
    print_line(
        f"{document['policy']} on {counted_devices(document['devices'])}: {document['requests']} requests in "
        f"{document['seconds']:.1f} s{attained}",
        style="bold",
    )
    print_line("outcomes: " + _counts(document["by_outcome"]))
    if document["eta_error_median_s"] is not None:
        print_line(
            f"ends: {_error_text(document['eta_error_median_s'])} in the median, "
            f"{_span(document['eta_error_median_abs_s'])} off either way"
        )
    if any(document["promises"].values()):
        forced = f"{document['starts_forced']} of {document['works']} runs were started by the guard for them"
        held = f"starts and stops held back: {document['held_back']}"
        print_line(f"promises: {_counts(document['promises'])}; {forced}; {held}")
    if document["refused"]:
        print_line("refused: " + _counts(document["refused"]))
    print_line(
        f"{document['works']} runs, {document['moves']} moves of a state, "
        f"{document['dropped_to_best_effort']} dropped to best effort, {document['lost_works']} runs lost"
    )
    for lost in document["lost_devices"]:
        print_line(f"device {lost['device_id']} was lost at {lost['at_s']:.3f} s: {lost['reason']}")
    for placed in document["placements"]:
        groups = ", ".join(f"{name} on {devices_text(tuple(group))}" for name, group in placed["groups"].items())
        print_line(f"placement from {placed['at_s']:.3f} s on: {groups}: {placed['why']}")
    if document["latest"]:
        out.print(_latest_table(document["latest"], names))
        print_line(f"ask about one: tilework explain {log} {names.short(document['latest'][0]['uid'])}")
    else:
        print_line(f"no request was done late; ask about any: tilework explain {log} UID")


def _ending(document: Mapping[str, Any]) -> str:
    if document["finish_s"] is None:
        return "not finished when the log ends"
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
        text += f"; its devices worked for {named}{more}"
    if document["loading_s"]:
        text += f"; its devices loaded weights for {_span(document['loading_s'])}"
    return f"{text}; its devices had no work for {_span(document['idle_s'])} of it" if document["waited_s"] else text


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


def _latest_table(latest: Iterable[Mapping[str, Any]], names: RequestNames) -> Table:
    table = Table(title="latest", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("request", overflow="fold")
    table.add_column("size")
    table.add_column("late by", justify="right")
    table.add_column("because", overflow="fold")
    for one in latest:
        name, because = escape(_plain(names.short(one["uid"]))), escape(_plain(one["cause"]))
        table.add_row(name, one["size"], _span(one["late_s"]), because)
    return table


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def print_line(text: str, style: str = "") -> None:
    out.print(_plain(text), style=style or None, markup=False, highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    """The text without characters that control a terminal: names and reasons come from clients."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _span(seconds: float) -> str:
    return span_text(ns_from_s(seconds))
