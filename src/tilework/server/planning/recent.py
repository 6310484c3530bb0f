"""The requests of the latest hour, as a plan takes them: without prompts."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.core.lora import UsedLora
from tilework.core.request import OnMiss, RefusalCode, Request, Shape, Status
from tilework.core.time import NS_PER_S, s_from_ns
from tilework.runtime.observer import Observer
from tilework.runtime.ticket import Outcome, Ticket

WINDOW_NS = 3600 * NS_PER_S
MOST_KEPT = 10_000
"""Most requests that are kept; on a busier server the traffic is that of less than an hour."""


class Past(NamedTuple):
    """The data of an ended request that a plan needs. `is_met`: it was done by its deadline."""

    arrival_ns: int
    deadline_ns: int | None
    pipeline: str
    shape: Shape
    steps: int
    tenant: str
    priority: str
    on_miss: OnMiss
    exact: bool
    loras: tuple[UsedLora, ...]
    is_met: bool

    @staticmethod
    def of(request: Request, is_met: bool) -> Past:
        return Past(
            request.arrival_ns,
            request.deadline_ns,
            request.pipeline,
            request.shape,
            request.steps,
            request.tenant,
            request.priority,
            request.on_miss,
            request.exact,
            request.loras,
            is_met,
        )


class TrafficLines(NamedTuple):
    """Requests as lines of a workload (docs/formats.md); arrivals count from the first one."""

    lines: str
    num_requests: int
    num_due: int
    num_met: int
    span_s: float


@dataclass(slots=True, eq=False)
class RecentTraffic(Observer):
    """Observes an engine, and keeps its recent requests. Requests that their clients cancelled are left out."""

    now_ns: Callable[[], int]
    _past: deque[Past] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))

    def on_refused(self, request: Request, code: RefusalCode) -> None:
        self._past.append(Past.of(request, is_met=False))

    def on_ended(self, ticket: Ticket, outcome: Outcome) -> None:
        if outcome.status is not Status.CANCELLED:
            is_met = ticket.request.met_deadline(outcome.status, outcome.finished_ns) is True
            self._past.append(Past.of(ticket.request, is_met))

    def traffic(self) -> TrafficLines:
        """Return the requests that came in the latest hour, in order of arrival."""
        since_ns = self.now_ns() - WINDOW_NS
        recent = [one for one in self._past if one.arrival_ns >= since_ns]
        recent.sort(key=lambda one: one.arrival_ns)
        begin_ns = recent[0].arrival_ns if recent else 0
        lines = [json.dumps(_line(place, one, begin_ns)) for place, one in enumerate(recent)]
        return TrafficLines(
            lines="".join(f"{line}\n" for line in lines),
            num_requests=len(recent),
            num_due=sum(one.deadline_ns is not None for one in recent),
            num_met=sum(one.is_met for one in recent),
            span_s=s_from_ns(recent[-1].arrival_ns - begin_ns) if recent else 0.0,
        )


def _line(place: int, past: Past, begin_ns: int) -> dict[str, object]:
    deadline_ns = past.deadline_ns
    line: dict[str, object] = {
        "id": place,
        "arrival_s": s_from_ns(past.arrival_ns - begin_ns),
        "pipeline": past.pipeline,
        "height": past.shape.height,
        "width": past.shape.width,
        "frames": past.shape.frames,
        "steps": past.steps,
        "slo_s": None if deadline_ns is None else s_from_ns(max(1, deadline_ns - past.arrival_ns)),
        "tenant": past.tenant,
        "priority": past.priority,
        "on_miss": past.on_miss.value,
        "exact": past.exact,
    }
    return line | ({"loras": {one.name: one.scale for one in past.loras}} if past.loras else {})
