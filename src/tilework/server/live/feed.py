"""Activity of an engine, recent and present, for clients that watch it: works as tiles, and ended requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple

from tilework.core.component import LoadSource
from tilework.core.request import RefusalCode, Request, Status
from tilework.core.wire.reports import Ending
from tilework.core.work import Group, Work
from tilework.runtime.observer import EndedWork, Observer
from tilework.runtime.ticket import Outcome, Ticket
from tilework.server.live.attainment import Attainment

MOST_KEPT = 10_000
"""Most entries of the past that are kept: works, loads and ends of requests."""
LOAD = "load weights"
"""Name in place of a stage for a tile in which a device loads weights."""

_TIMED = frozenset({Ending.DONE, Ending.STOPPED})
"""Endings of works whose start is known."""


class Tile(NamedTuple):
    """A work on its devices; `requests` are their numbers (`Feed.number`), none for a load of weights.

    `end_ns` of a work that has not ended is predicted. `first_step` counts from 0; `steps` is 0 for a stage without
    steps.
    """

    start_ns: int
    end_ns: int
    devices: Group
    stage: str
    requests: tuple[int, ...]
    first_step: int
    steps: int
    ending: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request that has ended, by its number: its status, its end, and the steps that it had made."""

    number: int
    request: Request
    status: Status
    finished_ns: int
    eta_ns: int
    steps_done: int


class _Sent(NamedTuple):
    work: Work
    numbers: tuple[int, ...]
    predicted_ns: int
    sent_ns: int


@dataclass(slots=True, eq=False)
class Feed(Observer):
    """Observes an engine. The past is a sequence that grows at its end, which is kept; `num_past` counts all of it.

    Requests have numbers here, since their uids are only for their own tenants.
    """

    now_ns: Callable[[], int]
    attainment: Attainment = field(default_factory=Attainment)
    num_past: int = 0
    _past: deque[Tile | EndedRequest] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))
    _sent: dict[int, _Sent] = field(default_factory=dict)
    _free_ns: dict[int, int] = field(default_factory=dict)  # The time when the latest work of a device ended.
    _numbers: dict[str, int] = field(default_factory=dict)  # Numbers of open requests.
    _next: count[int] = field(default_factory=lambda: count(1))

    def number(self, uid: str) -> int:
        """Return the number of an open request, which gets one when it is first asked for."""
        number = self._numbers.get(uid)
        if number is None:
            number = self._numbers[uid] = next(self._next)
        return number

    def since(self, place: int) -> Iterator[Tile | EndedRequest]:
        """Return what was kept of the past from this place of the sequence on."""
        return islice(self._past, max(0, len(self._past) - (self.num_past - place)), None)

    def planned(self, now_ns: int) -> list[Tile]:
        """Return works that run or are queued on devices, with the starts and ends that are predicted now."""
        free_ns = dict(self._free_ns)
        tiles = []
        for sent in self._sent.values():
            work = sent.work
            start_ns = max(sent.sent_ns, *(free_ns.get(device_id, 0) for device_id in work.devices))
            end_ns = max(start_ns + sent.predicted_ns, now_ns)
            free_ns |= dict.fromkeys(work.devices, end_ns)
            tiles.append(_tile(work, sent.numbers, work.num_steps, start_ns, end_ns, ""))
        return tiles

    # For the engine.

    def on_work_sent(self, work: Work, requests: tuple[Request, ...], predicted_ns: int, now_ns: int) -> None:
        numbers = tuple([self.number(request.uid) for request in requests])
        self._sent[work.work_id] = _Sent(work, numbers, predicted_ns, now_ns)

    def on_work_ended(self, ended: EndedWork) -> None:
        sent = self._sent.pop(ended.work.work_id, None)
        if sent is None:  # The work was sent before anything was observed.
            return
        for device_id in ended.work.devices:
            self._free_ns[device_id] = ended.end_ns
        start_ns = ended.start_ns if ended.ending in _TIMED else sent.sent_ns
        self._add(_tile(ended.work, sent.numbers, ended.steps_done, start_ns, ended.end_ns, ended.ending))

    def on_weights_loaded(self, device_id: int, source: LoadSource, num_bytes: int, run_ns: int) -> None:
        end_ns = self.now_ns()
        self._add(Tile(end_ns - run_ns, end_ns, (device_id,), LOAD, (), 0, 0, source))

    def on_lost(self, device_id: int) -> None:
        self._free_ns.pop(device_id, None)

    def on_refused(self, request: Request, code: RefusalCode) -> None:
        self.attainment.refused(request, self.now_ns())

    def on_ended(self, ticket: Ticket, outcome: Outcome) -> None:
        request = ticket.request
        number = self.number(request.uid)
        del self._numbers[request.uid]
        ended = EndedRequest(  # Without the outcome, which holds the image.
            number=number,
            request=request,
            status=outcome.status,
            finished_ns=outcome.finished_ns,
            eta_ns=ticket.eta_ns,
            steps_done=ticket.steps_done,
        )
        self._add(ended)
        self.attainment.ended(request, request.met_deadline(outcome.status, outcome.finished_ns), outcome.finished_ns)

    def _add(self, one: Tile | EndedRequest) -> None:
        self._past.append(one)
        self.num_past += 1


def _tile(work: Work, numbers: tuple[int, ...], steps: int, start_ns: int, end_ns: int, ending: str) -> Tile:
    steps = steps if work.stage.has_steps else 0
    return Tile(start_ns, end_ns, work.devices, work.stage.name, numbers, work.members[0].first_step, steps, ending)
