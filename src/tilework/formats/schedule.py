"""Works, ends of requests, moves and loads over time: the JSON-lines format of a schedule (docs/formats.md).

Its lines are distinguished by their first word: `work`, `request`, `move`, `load` or `drop`. The seconds of one file
are on one clock, that of the workload's `arrival_s`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilework.core.request import Status
from tilework.formats.json_lines import JsonLine, RequestId, read_lines

DROPPED = "dropped"
STATUSES = (str(Status.DONE), DROPPED, str(Status.CANCELLED), str(Status.FAILED), str(Status.EXPIRED))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLine:
    """One executed work; `steps` is 0 for stages without steps."""

    work: int
    stage: str
    requests: tuple[RequestId, ...]
    devices: tuple[int, ...]
    start_s: float
    end_s: float
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """The end of a request, with one of STATUSES. `on_time` is None if it had no deadline."""

    request: RequestId
    finish_s: float
    status: str
    on_time: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveLine:
    """The state of a request moved from one device to another."""

    request: RequestId
    source: int
    target: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLine:
    """A device loaded (`load`) or dropped (`drop`) the weights of a stage."""

    change: str
    device_id: int
    pipeline: str
    stage: str
    start_s: float
    end_s: float


ScheduleLine = WorkLine | RequestLine | MoveLine | WeightsLine


@dataclass(frozen=True, slots=True)
class Schedule:
    """The lines of a file by type, each type in the order of the file."""

    works: tuple[WorkLine, ...] = ()
    requests: tuple[RequestLine, ...] = ()
    moves: tuple[MoveLine, ...] = ()
    weights: tuple[WeightsLine, ...] = ()

    @property
    def lines(self) -> tuple[ScheduleLine, ...]:
        return self.works + self.requests + self.moves + self.weights


def read_schedule(path: Path | str) -> Schedule:
    """Read and check a schedule line by line.

    Raises:
        BadLine: a line is of no known type, or a field is missing, unknown or of the wrong type, or a work or the end
            of a request comes twice. Consistency of the schedule as a whole is not checked here.
        OSError: the file cannot be read.
    """
    works: dict[int, WorkLine] = {}
    requests: dict[RequestId, RequestLine] = {}
    moves: list[MoveLine] = []
    weights: list[WeightsLine] = []
    for line in read_lines(path):
        match _parse(line):
            case WorkLine() as work:
                _check_new(line, "work", work.work, work.work in works)
                works[work.work] = work
            case RequestLine() as request:
                _check_new(line, "request", request.request, request.request in requests)
                requests[request.request] = request
            case MoveLine() as move:
                moves.append(move)
            case WeightsLine() as change:
                weights.append(change)
    return Schedule(tuple(works.values()), tuple(requests.values()), tuple(moves), tuple(weights))


def write_schedule(path: Path | str, schedule: Schedule) -> None:
    """Write all works, then the ends of the requests, then moves and weights."""
    Path(path).write_text(dump_lines(schedule.lines), "utf-8")


def dump_lines(lines: Iterable[ScheduleLine]) -> str:
    """Return the text of these lines, each with its line break."""
    return "".join(json.dumps(_values_of(line), ensure_ascii=False) + "\n" for line in lines)


def _parse(line: JsonLine) -> ScheduleLine:
    word = next((word for word in _PARSERS if word in line.values), None)
    if word is None:
        line.fail("", line.values, f"start the line with one of {', '.join(_PARSERS)}")
    return _PARSERS[word](line)


def _work(line: JsonLine) -> WorkLine:
    line.allow(("work", "stage", "requests", "devices", "start_s", "end_s", "steps"))
    start_s, end_s = _interval(line)
    return WorkLine(
        work=line.integer("work", least=0),
        stage=line.text("stage"),
        requests=line.request_ids("requests"),
        devices=line.integers("devices"),
        start_s=start_s,
        end_s=end_s,
        steps=line.integer("steps", 0, least=0),
    )


def _request(line: JsonLine) -> RequestLine:
    line.allow(("request", "finish_s", "status", "on_time"))
    on_time = line.values.get("on_time")
    if on_time is not None and not isinstance(on_time, bool):
        line.fail("on_time", on_time, "use true or false, or null for a request without a deadline")
    return RequestLine(
        request=line.request_id("request"),
        finish_s=line.number("finish_s"),
        status=line.choice("status", STATUSES),
        on_time=on_time,
    )


def _move(line: JsonLine) -> MoveLine:
    line.allow(("move", "from", "to", "start_s", "end_s"))
    start_s, end_s = _interval(line)
    return MoveLine(
        request=line.request_id("move"),
        source=line.integer("from", least=0),
        target=line.integer("to", least=0),
        start_s=start_s,
        end_s=end_s,
    )


def _weights(line: JsonLine) -> WeightsLine:
    change = "load" if "load" in line.values else "drop"
    line.allow((change, "pipeline", "stage", "start_s", "end_s"))
    start_s, end_s = _interval(line)
    return WeightsLine(
        change=change,
        device_id=line.integer(change, least=0),
        pipeline=line.text("pipeline"),
        stage=line.text("stage"),
        start_s=start_s,
        end_s=end_s,
    )


_PARSERS: dict[str, Callable[[JsonLine], ScheduleLine]] = {
    "work": _work,
    "request": _request,
    "move": _move,
    "load": _weights,
    "drop": _weights,
}


def _interval(line: JsonLine) -> tuple[float, float]:
    start_s = line.number("start_s")
    return start_s, line.number("end_s", above=start_s, or_equal=True)


def _check_new(line: JsonLine, field: str, value: RequestId, known: bool) -> None:
    if known:
        line.fail(field, value, "an earlier line has the same; each comes once")


def _values_of(line: ScheduleLine) -> dict[str, Any]:
    interval = {} if isinstance(line, RequestLine) else {"start_s": line.start_s, "end_s": line.end_s}
    match line:
        case WorkLine():
            head = {"work": line.work, "stage": line.stage, "requests": line.requests, "devices": line.devices}
            return head | interval | {"steps": line.steps}
        case RequestLine():
            end = {"finish_s": line.finish_s, "status": line.status, "on_time": line.on_time}
            return {"request": line.request} | end
        case MoveLine():
            return {"move": line.request, "from": line.source, "to": line.target} | interval
        case WeightsLine():
            return {line.change: line.device_id, "pipeline": line.pipeline, "stage": line.stage} | interval
