"""The timelines that a server sends with its answers (`tilework` in a response): their schedule, and figures of it.

The server counts from the arrival of each request there, which the client does not see. Here it is the time at which
the client began to send. So bars may be off by the network's delay. A timeline that is not as `docs/serving.md` says,
from a server of another version, is left out and not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeGuard

from tilework.core.request import Shape, Status
from tilework.formats.json_lines import RequestId
from tilework.formats.schedule import DROPPED, RequestLine, Schedule, WorkLine
from tilework.report.tables import DONE, percentile

REFUSED = "rejected"
Segment = Mapping[str, Any]


class Answered(Protocol):
    """A request as the client saw it; `timeline` is the server's own, None if it sent none."""

    @property
    def shape(self) -> Shape: ...
    @property
    def status(self) -> str: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def lag_s(self) -> float: ...
    @property
    def latency_s(self) -> float: ...
    @property
    def on_time(self) -> bool | None: ...
    @property
    def timeline(self) -> Mapping[str, Any] | None: ...


def schedule_of_timelines(records: Iterable[tuple[RequestId, Answered]]) -> Schedule:
    """Return the works of all timelines, numbered by start, each with the requests that shared it.

    Ends are the client's. Without any timeline the schedule has ends only.
    """
    records = list(records)
    lines = [
        (_work(request, record.arrival_s + record.lag_s, segment), _batch(segment))
        for request, record in records
        for segment in segments(record)
    ]
    works = _joined(sorted(lines, key=lambda one: one[0].start_s))
    return Schedule(
        works=tuple(replace(work, work=number) for number, work in enumerate(works)),
        requests=tuple(_end(request, record) for request, record in records),
    )


def segments(record: Answered) -> Sequence[Segment]:
    """Return the segments of a timeline; none if it cannot be read."""
    found = None if record.timeline is None else record.timeline.get("segments")
    return found if isinstance(found, list) and all(_is_segment(segment) for segment in found) else ()


def served_figures(records: Sequence[Answered]) -> dict[str, Any] | None:
    """Sum up what timelines add to the client's view, over the images that came; None without any timeline.

    `queue_s` {"mean", "p50", "p99"}: from arrival to the first work. `device_s` {"mean"}: device seconds of one
    image. `mean_degree`: devices per denoising step. `steps_by_degree`: steps by the number of their devices.
    """
    readable = [record for record in records if record.status == DONE and segments(record)]
    if not readable:
        return None
    queue_s = [
        record.timeline["queue_s"]
        for record in readable
        if record.timeline and _is_number(record.timeline.get("queue_s"))
    ]
    all_segments = [segment for record in readable for segment in segments(record)]
    degrees: dict[int, int] = {}
    for segment in all_segments:
        if segment["steps"]:
            degree = len(segment["devices"])
            degrees[degree] = degrees.get(degree, 0) + segment["steps"]
    steps = sum(degrees.values())
    device_s = math.fsum((s["end_s"] - s["start_s"]) * len(s["devices"]) / _batch(s) for s in all_segments)
    return {
        "timelines": len(readable),
        "queue_s": _latency(queue_s) if queue_s else None,
        "device_s": {"mean": device_s / len(readable)},
        "mean_degree": sum(degree * number for degree, number in degrees.items()) / steps if steps else None,
        "steps_by_degree": {str(degree): degrees[degree] for degree in sorted(degrees)},
    }


def _batch(segment: Segment) -> int:
    """Return the number of images that shared a segment's work; 1 where the server does not say."""
    batch = segment.get("batch", 1)
    return batch if isinstance(batch, int) and batch > 0 else 1


def _latency(values: Sequence[float]) -> dict[str, float]:
    return {"mean": math.fsum(values) / len(values)} | {f"p{p}": percentile(values, p) for p in (50, 99)}


def _work(request: RequestId, origin_s: float, segment: Segment) -> WorkLine:
    return WorkLine(
        work=0,
        stage=segment["stage"],
        requests=(request,),
        devices=tuple(sorted(segment["devices"])),
        start_s=round(origin_s + segment["start_s"], 6),
        end_s=round(origin_s + segment["end_s"], 6),
        steps=segment["steps"],
    )


def _joined(lines: Iterable[tuple[WorkLine, int]]) -> list[WorkLine]:
    """Return works by start. Several requests may list one work, each at a slightly different time; they become one."""
    works: list[WorkLine] = []
    latest: dict[tuple[int, ...], int] = {}  # Place of the latest work among the works, by group.
    for line, batch in lines:
        place = latest.get(line.devices)
        if place is not None and batch > 1 and _is_one(works[place], line, batch):
            works[place] = replace(works[place], requests=works[place].requests + line.requests)
        else:
            latest[line.devices] = len(works)
            works.append(line)
    return works


def _is_one(work: WorkLine, line: WorkLine, batch: int) -> bool:
    has_room = len(work.requests) < batch and line.requests[0] not in work.requests
    return has_room and work.steps == line.steps and 2 * line.start_s < work.start_s + work.end_s


def _end(request: RequestId, record: Answered) -> RequestLine:
    status = DONE if record.status == DONE else DROPPED if record.status == REFUSED else str(Status.FAILED)
    finish_s = round(record.arrival_s + record.latency_s, 6)
    return RequestLine(request=request, finish_s=finish_s, status=status, on_time=record.on_time)


def _is_segment(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    devices, steps, start_s, end_s = (value.get(name) for name in ("devices", "steps", "start_s", "end_s"))
    return (
        isinstance(value.get("stage"), str)
        and isinstance(devices, list)
        and bool(devices)
        and all(isinstance(device, int) for device in devices)
        and isinstance(steps, int)
        and _is_number(start_s)
        and _is_number(end_s)
        and bool(start_s <= end_s)
    )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
