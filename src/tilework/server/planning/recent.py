"""The requests of the latest hour, as a plan takes them: without prompts."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.core.request import RefusalCode, Request, Status
from tilework.core.time import NS_PER_S, s_from_ns
from tilework.runtime.observer import Observer
from tilework.runtime.ticket import Outcome, Ticket

WINDOW_NS = 3600 * NS_PER_S
MOST_KEPT = 20_000
"""How many requests are kept at most; of a busier server the traffic is that of less than an hour."""


class Past(NamedTuple):
    """A request that has ended, and whether it was done by its deadline."""

    request: Request
    is_met: bool


class Traffic(NamedTuple):
    """Requests as lines of a workload (docs/formats.md), with the times of their arrival from the first on."""

    lines: str
    num_requests: int
    num_due: int
    num_met: int
    span_s: float


@dataclass(slots=True, eq=False)
class RecentTraffic(Observer):
    """Observes an engine. Requests that their clients cancelled are left out."""

    now_ns: Callable[[], int]
    _past: deque[Past] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))

    def on_refused(self, request: Request, code: RefusalCode) -> None:
        self._past.append(Past(request, False))

    def on_ended(self, ticket: Ticket, outcome: Outcome) -> None:
        if outcome.status is not Status.CANCELLED:
            is_met = ticket.request.met_deadline(outcome.status, outcome.finished_ns) is True
            self._past.append(Past(ticket.request, is_met))

    def traffic(self) -> Traffic:
        """Those that came in the latest hour, in order of arrival."""
        since_ns = self.now_ns() - WINDOW_NS
        recent = [one for one in self._past if one.request.arrival_ns >= since_ns]
        recent.sort(key=lambda one: (one.request.arrival_ns, one.request.uid))
        begin_ns = recent[0].request.arrival_ns if recent else 0
        lines = [json.dumps(_line(place, one.request, begin_ns)) for place, one in enumerate(recent)]
        return Traffic(
            lines="".join(f"{line}\n" for line in lines),
            num_requests=len(recent),
            num_due=sum(one.request.deadline_ns is not None for one in recent),
            num_met=sum(one.is_met for one in recent),
            span_s=s_from_ns(recent[-1].request.arrival_ns - begin_ns) if recent else 0.0,
        )


def _line(place: int, request: Request, begin_ns: int) -> dict[str, object]:
    deadline_ns = request.deadline_ns
    line: dict[str, object] = {
        "id": place,
        "arrival_s": s_from_ns(request.arrival_ns - begin_ns),
        "pipeline": request.pipeline,
        "height": request.shape.height,
        "width": request.shape.width,
        "frames": request.shape.frames,
        "steps": request.steps,
        "slo_s": None if deadline_ns is None else s_from_ns(max(1, deadline_ns - request.arrival_ns)),
        "tenant": request.tenant,
        "priority": request.priority,
        "on_miss": request.on_miss.value,
        "exact": request.exact,
    }
    return line | ({"loras": {one.name: one.scale for one in request.loras}} if request.loras else {})
