"""Requests in a file: the JSON-lines format of a workload (docs/formats.md).

A request without `id` has the number of its line, counted from 0, as its id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tilework.core.cache import BLOCK_CACHES, DEFAULT_THRESHOLD, MAX_THRESHOLD, OFF
from tilework.core.lora import UsedLora
from tilework.core.priority import DEFAULT_CLASS
from tilework.core.request import OnMiss, Shape
from tilework.formats.json_lines import JsonLine, RequestId, read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One line of a workload. Times in seconds; `slo_s` counts from `arrival_s`, None means best effort.

    `cache` is one of `core.cache.BLOCK_CACHES`, and `cache_threshold` is for it.

    `id` None means the request's index in the workload; the reader fills it in.
    """

    arrival_s: float
    pipeline: str
    height: int
    width: int
    frames: int = 1
    steps: int
    slo_s: float | None = None
    id: RequestId | None = None
    seed: int | None = None
    tenant: str | None = None
    priority: str = DEFAULT_CLASS
    on_miss: OnMiss = OnMiss.BEST_EFFORT
    prompt: str | None = None
    exact: bool = False
    loras: tuple[UsedLora, ...] = ()
    cache: str = OFF
    cache_threshold: float = DEFAULT_THRESHOLD

    @property
    def shape(self) -> Shape:
        return Shape(self.height, self.width, self.frames)

    @property
    def is_clip(self) -> bool:
        return self.frames > 1

    @property
    def deadline_s(self) -> float | None:
        """Deadline on the clock of `arrival_s`; None without an SLO."""
        return None if self.slo_s is None else self.arrival_s + self.slo_s


_FIELDS = tuple(field.name for field in fields(WorkloadRequest))
_DEFAULTS = {field.name: field.default for field in fields(WorkloadRequest)}


def by_id(requests: Sequence[WorkloadRequest]) -> dict[RequestId, WorkloadRequest]:
    """Return the requests by id, or by index where they have none."""
    return {index if r.id is None else r.id: r for index, r in enumerate(requests)}


def read_workload(path: Path | str) -> tuple[WorkloadRequest, ...]:
    """Read a workload in the order of its lines; `id` is filled in.

    Raises:
        BadLine: a line is no JSON object, a field is missing, unknown or of the wrong type, or an id comes twice.
        OSError: the file cannot be read.
    """
    seen: dict[RequestId, int] = {}
    requests = []
    for line in read_lines(path):
        request = _parse(line)
        assert request.id is not None
        if request.id in seen:
            line.fail("id", request.id, f"line {seen[request.id]} has the same; give each request its own id")
        seen[request.id] = line.line
        requests.append(request)
    return tuple(requests)


def write_workload(path: Path | str, requests: Iterable[WorkloadRequest]) -> None:
    """Write one line per request; optional fields that have their default are left out."""
    Path(path).write_text("".join(json.dumps(_line_of(r), ensure_ascii=False) + "\n" for r in requests), "utf-8")


def _parse(line: JsonLine) -> WorkloadRequest:
    line.allow(_FIELDS)
    _check_cache(line)
    return WorkloadRequest(
        arrival_s=line.number("arrival_s", above=0, or_equal=True),
        pipeline=line.text("pipeline"),
        height=line.integer("height", least=1),
        width=line.integer("width", least=1),
        frames=line.integer("frames", 1, least=1),
        steps=line.integer("steps", least=1),
        slo_s=line.number("slo_s", above=0) if line.given("slo_s") else None,
        id=line.request_id("id") if line.given("id") else line.line - 1,
        seed=line.integer("seed", least=0) if line.given("seed") else None,
        tenant=line.text("tenant") if line.given("tenant") else None,
        priority=line.text("priority") if line.given("priority") else DEFAULT_CLASS,
        on_miss=OnMiss(line.choice("on_miss", OnMiss, OnMiss.BEST_EFFORT)),
        prompt=line.text("prompt") if line.given("prompt") else None,
        exact=line.truth("exact", False),
        loras=_loras(line) if line.given("loras") else (),
        cache=line.choice("cache", BLOCK_CACHES, OFF),
        cache_threshold=line.number("cache_threshold", DEFAULT_THRESHOLD, above=0, or_equal=True),
    )


def _check_cache(line: JsonLine) -> None:
    """Refuse a threshold above the largest, or without a cache, and a cache of an exact request."""
    cache = line.choice("cache", BLOCK_CACHES, OFF)
    threshold = line.number("cache_threshold", DEFAULT_THRESHOLD, above=0, or_equal=True)
    if threshold > MAX_THRESHOLD:
        line.fail("cache_threshold", threshold, f"give a number from 0 to {MAX_THRESHOLD:g}")
    if cache == OFF and line.given("cache_threshold"):
        line.fail("cache_threshold", threshold, "it has no effect without a cache; give cache, too")
    if cache != OFF and line.truth("exact", False):
        line.fail("cache", cache, "a request with a cache is not exact; leave one of them out")


def _loras(line: JsonLine) -> tuple[UsedLora, ...]:
    return tuple(UsedLora(name, scale) for name, scale in line.numbers_by_name("loras").items())


def _line_of(request: WorkloadRequest) -> Mapping[str, Any]:
    values = {name: getattr(request, name) for name in _FIELDS}
    always = ("frames", "slo_s")
    line = {name: value for name, value in values.items() if name in always or value != _DEFAULTS[name]}
    return line | ({"loras": {one.name: one.scale for one in request.loras}} if request.loras else {})
