"""A chart in Chrome's trace-event format, as https://ui.perfetto.dev and chrome://tracing open it.

Every node is a process and every device a thread of it; a work is a complete event ("X") on each of its devices, and
arrows lead from one work of a request to its next. Process 0 is the cluster: an asynchronous span ("b", "e") per
request from arrival to end, instants for what went wrong, and counters. Times are whole microseconds, counted from
the start of the chart, since the format wants small numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from tilework.core.request import Status
from tilework.formats.json_lines import RequestId
from tilework.formats.schedule import DROPPED
from tilework.report.chart import Chart, ChartRequest, ChartWork

CLUSTER = 0
_INSTANTS = {"dropped to best effort", "moved", "turned to its cache"}
_Event = dict[str, Any]
_Spans = dict[tuple[int, int], tuple[int, int]]


def write_trace(path: Path | str, chart: Chart, *, title: str = "") -> None:
    """Write the chart as one JSON object.

    Raises:
        OSError: the file cannot be written.
    """
    document = {"traceEvents": trace_events(chart), "displayTimeUnit": "ms", "otherData": {"title": title}}
    Path(path).write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")


def trace_events(chart: Chart) -> list[_Event]:
    """Return the events, those that name processes and threads first, the others by time."""
    tracks = _Tracks(chart)
    spans = _spans(chart, tracks)
    events = [event for work in chart.works for event in _slices(work, spans, tracks)]
    events += _arrows(chart, spans, tracks)
    events += [
        event for number, request in enumerate(chart.requests) for event in _request_span(request, number, tracks)
    ]
    events += _instants(chart, tracks)
    events += _counters(chart, tracks)
    return tracks.names() + sorted(events, key=lambda event: event["ts"])


def _spans(chart: Chart, tracks: _Tracks) -> _Spans:
    """Begin and end, in microseconds, of each (work, device).

    A work that seems to begin before the one ahead of it has ended begins with that end: slices of a thread must not
    overlap, and a log knows when an end was reported, which is a little later than it was.
    """
    spans: _Spans = {}
    free_us: dict[int, int] = {}
    for work in sorted(chart.works, key=lambda work: work.end_s):
        for device_id in work.devices:
            start_us = max(tracks.us(work.start_s), free_us.get(device_id, 0))
            free_us[device_id] = max(tracks.us(work.end_s), start_us)
            spans[work.work, device_id] = (start_us, free_us[device_id])
    return spans


class _Tracks:
    """Maps devices to processes and threads of the trace, and times to whole microseconds."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        self._nodes = dict(chart.nodes)
        for work in chart.works:
            for device_id in work.devices:
                self._nodes.setdefault(device_id, 0)
        self._start_s = chart.start_s
        self.end_us = self.us(chart.end_s)

    @property
    def devices(self) -> Collection[int]:
        return self._nodes

    def us(self, at_s: float) -> int:
        return round((at_s - self._start_s) * 1e6)

    def of(self, device_id: int) -> dict[str, int]:
        return {"pid": self._nodes[device_id] + 1, "tid": device_id}

    def names(self) -> list[_Event]:
        names = [_named("process", {"pid": CLUSTER, "tid": 0}, "cluster")]
        names += [
            _named("process", {"pid": node + 1, "tid": 0}, f"node {node}") for node in sorted({*self._nodes.values()})
        ]
        return names + [
            _named("thread", self.of(device_id), self._chart.name_of(device_id)) for device_id in sorted(self._nodes)
        ]


def _named(track_type: str, track: dict[str, int], name: str) -> _Event:
    return {"ph": "M", "name": f"{track_type}_name", "ts": 0, **track, "args": {"name": name}}


def _slices(work: ChartWork, spans: _Spans, tracks: _Tracks) -> Iterable[_Event]:
    args: _Event = {
        "work": work.work,
        "requests": [str(request) for request in work.requests],
        "steps": _steps_text(work),
        "degree": len(work.devices),
        "why": work.why,
        "predicted_s": work.predicted_s,
        "lost": work.lost,
    }
    args = {key: value for key, value in args.items() if value not in ("", None)}
    name = " ".join([*(str(request) for request in work.requests), _steps_text(work) or work.stage])
    for device_id in work.devices:
        start_us, end_us = spans[work.work, device_id]
        yield {
            "ph": "X",
            "name": name,
            "cat": "lost" if work.lost else work.stage,
            "ts": start_us,
            "dur": end_us - start_us,
            **tracks.of(device_id),
            "args": args,
        }


def _steps_text(work: ChartWork) -> str:
    if not work.steps:
        return ""
    if work.first_step is None:
        return f"{work.steps} steps"
    return f"steps {work.first_step}-{work.first_step + max(0, work.steps - 1)}"


def _arrows(chart: Chart, spans: _Spans, tracks: _Tracks) -> Iterable[_Event]:
    """Yield arrows: each begins within the earlier work's slice on its first device, and ends where that begins."""
    works: dict[RequestId, list[ChartWork]] = {}
    for work in sorted(chart.works, key=lambda work: work.end_s):
        for request in work.requests:
            works.setdefault(request, []).append(work)
    number = 0
    for request, own in works.items():
        for before, after in pairwise(own):
            source, target = before.devices[0], after.devices[0]
            start_us, end_us = spans[before.work, source]
            to_us, _ = spans[after.work, target]
            from_us = max(start_us, min(end_us - 1, to_us))
            head = {"name": str(request), "cat": "request", "id": number}
            yield {"ph": "s", **head, "ts": from_us, **tracks.of(source)}
            yield {"ph": "f", "bp": "e", **head, "ts": max(from_us, to_us), **tracks.of(target)}
            number += 1


def _request_span(request: ChartRequest, number: int, tracks: _Tracks) -> Iterable[_Event]:
    arrival_us, end_us = _request_times_us(request, tracks)
    known = {
        "size": None if request.shape is None else str(request.shape),
        "steps": request.steps,
        "tenant": request.tenant or None,
        "deadline_s": _after(request.deadline_s, request),
        "eta_s": _after(request.eta_s, request),
        "finish_s": _after(request.finish_s, request),
        "slack_s": None if request.slack_s is None else round(request.slack_s, 6),
        "on_time": request.on_time,
        "outcome": request.status,
    }
    head = {"name": str(request.id), "cat": "request", "id": number, "pid": CLUSTER, "tid": 0}
    args = {key: value for key, value in known.items() if value is not None}
    yield {"ph": "b", **head, "ts": arrival_us, "args": args}
    yield {"ph": "e", **head, "ts": end_us, "args": {"outcome": request.status}}


def _request_times_us(request: ChartRequest, tracks: _Tracks) -> tuple[int, int]:
    """Write a request from arrival to end, or to the end of the chart if its own is unknown."""
    arrival_us = tracks.us(request.arrival_s)
    return arrival_us, tracks.end_us if request.finish_s is None else max(arrival_us, tracks.us(request.finish_s))


def _after(at_s: float | None, request: ChartRequest) -> float | None:
    """Return the seconds after the request's arrival."""
    return None if at_s is None else round(at_s - request.arrival_s, 6)


def _instants(chart: Chart, tracks: _Tracks) -> Iterable[_Event]:
    """Yield marks at one time: refusals, drops to best effort, moves, requests not served, changes of devices."""
    cluster = {"pid": CLUSTER, "tid": 0, "s": "p"}
    for request in chart.requests:
        for decision in request.decisions:
            if decision.kind in _INSTANTS:
                name = f"{request.id} {decision.kind}"
                yield _instant(name, tracks.us(decision.at_s), {"text": decision.text}) | cluster
        if request.finish_s is not None and request.status != Status.DONE:
            args = {"text": request.decisions[-1].text} if request.decisions else {}
            yield _instant(f"{request.id} {request.status}", tracks.us(request.finish_s), args) | cluster
    for load in chart.loads:
        start_us, end_us = tracks.us(load.start_s), tracks.us(load.end_s)
        args = {"source": load.source} if load.source else {}
        name = f"{'its host reads ahead' if load.is_read_ahead else 'loads'} {load.stage}"
        slice_ = {"ph": "X", "name": name, "ts": start_us, "dur": end_us - start_us, "args": args}
        yield slice_ | ({"pid": CLUSTER, "tid": 0} if load.is_read_ahead else tracks.of(load.device_id))
    for placement, uses in chart.new_uses():
        for device_id in uses.keys() & set(tracks.devices):
            track = tracks.of(device_id) | {"s": "t"}
            yield _instant(f"for {uses[device_id]}", tracks.us(placement.at_s), {"why": placement.why}) | track
    for outage in chart.outages:
        track = tracks.of(outage.device_id) | {"s": "t"}
        yield _instant(f"device {outage.device_id} lost", tracks.us(outage.start_s), {"reason": outage.reason}) | track


def _instant(name: str, at_us: int, args: _Event) -> _Event:
    return {"ph": "i", "name": name, "ts": at_us, "args": args}


def _counters(chart: Chart, tracks: _Tracks) -> Iterable[_Event]:
    """Yield the numbers of waiting and running requests and of busy devices, whenever one of them changes."""
    changes: dict[int, Counter[str]] = {}

    def count(state: str, start_us: int, end_us: int, by: int) -> None:
        if start_us < end_us:
            changes.setdefault(start_us, Counter())[state] += by
            changes.setdefault(end_us, Counter())[state] -= by

    times_us = {request.id: _request_times_us(request, tracks) for request in chart.requests}
    for request in chart.requests:
        if request.status != DROPPED:
            count("queued", *times_us[request.id], 1)
    for work in chart.works:
        start_us, end_us = tracks.us(work.start_s), tracks.us(work.end_s)
        count("running", start_us, end_us, len(work.requests))
        count("busy", start_us, end_us, len(work.devices))
        for arrival_us, finish_us in (times_us[request] for request in work.requests):
            count("queued", max(start_us, arrival_us), min(end_us, finish_us), -1)  # A work may outlive its request.
    levels: Counter[str] = Counter()
    for at_us in sorted(changes):
        levels.update(changes[at_us])
        track = {"ph": "C", "ts": at_us, "pid": CLUSTER, "tid": 0}
        args = {"queued": levels["queued"], "running": levels["running"]}
        yield track | {"name": "requests", "args": args}
        yield track | {"name": "busy devices", "args": {"busy": levels["busy"]}}
