"""Passes events to the controller, and its actions to dispatcher, tickets and observer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

import tilework
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.log import header_line
from tilework.control.log_state import LogState
from tilework.core.actions import Accept, Action, Finish, Place, Reject, UseCache, WakeAt, jobs_of
from tilework.core.checkpoint import Checkpoint
from tilework.core.events import Event, Restored, Submitted, Woke
from tilework.core.request import RefusalCode, Request, Status
from tilework.core.time import NS_PER_S
from tilework.core.wire.spec import File, Image, Spec
from tilework.runtime.event_log.log_file import LogFile
from tilework.runtime.event_log.segmented_file import SegmentedFile
from tilework.runtime.observer import Observer
from tilework.runtime.request_table import RequestTable
from tilework.runtime.ticket import Outcome, Ticket
from tilework.runtime.work_dispatcher import WorkDispatcher

_log = logging.getLogger(__name__)
FAILED = "the scheduler failed, and the server stops: its log says why"


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request to submit. `checkpoint` is not empty if it is restored, or was encoded before (`EncodeCache`)."""

    request: Request
    spec: Spec
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


class ControlLoop:
    """Passes each event to the controller, logs it with the answer, and performs the actions.

    An exception in that process is a bug, after which the controller's state cannot be relied on. The controller gets
    no more events, `on_failed` is called, and its requests fail. Where the next start of the server takes the requests
    over, only those fail that were already taken over once: a request that breaks every controller would otherwise do
    so forever.

    `check_lease` is called before each event, and does not return if another server decides by now.
    """

    def __init__(
        self,
        controller: Controller,
        requests: RequestTable,
        log: TextIO | SegmentedFile | None,
        config: ControllerConfig,
        observer: Observer,
        now_ns: Callable[[], int],
        on_failed: Callable[[str], None],
        check_lease: Callable[[], None],
    ) -> None:
        self._controller = controller
        self._requests = requests
        self._config = config
        self._observer = observer
        self._log = LogFile(log, on_lost=self._on_log_lost)
        self._log.begin(self._log_header)
        self._now_ns = now_ns
        self._on_failed = on_failed
        self._check_lease = check_lease
        self._loop = asyncio.get_running_loop()
        self._incoming: dict[str, Incoming] = {}
        self._accepted: dict[str, Ticket] = {}  # By the event that is handled now.
        self._restored: set[str] = set()
        self.is_stopped = False
        """True once the controller receives no further events."""

    def _log_header(self, segment: int, state: LogState | None) -> str:
        """Return the header of a segment of the log; that of a later segment has the costs at that time."""
        costs = self._controller.costs
        table = costs.table if state is None else costs.corrected_table()
        return header_line(tilework.__version__, self._config, table, segment, state)

    def _on_log_lost(self) -> None:
        self._observer.on_log_lost()

    def attach(self, dispatcher: WorkDispatcher, holds_states: bool) -> None:
        """Set the dispatcher that runs works. With `holds_states`, states of done requests are held until `release`."""
        self._dispatcher = dispatcher
        self._holds_states = holds_states

    def observe(self, observer: Observer) -> None:
        """Replace the observer."""
        self._observer = observer
        self._dispatcher.observe(observer)

    def stop(self, reason: str) -> None:
        """End all open tickets. The controller receives no further events."""
        self.is_stopped = True
        for entry in self._requests:
            self.resolve(entry.ticket, Status.CANCELLED, reason)
        self._requests.clear()

    def submit(
        self, event: Submitted | Restored, incoming: Sequence[Incoming], now_ns: int
    ) -> Reject | tuple[Ticket, ...]:
        """Submit requests; returns their tickets, which may have ended already, or the refusal of all."""
        if self.is_stopped:
            return Reject(incoming[0].request.uid, FAILED, None, RefusalCode.NO_DEVICE)
        if isinstance(event, Restored):
            self._restored.add(event.request.uid)
        self._incoming |= {one.request.uid: one for one in incoming}
        answer = self.handle(event, now_ns)[0]
        tickets, self._accepted = self._accepted, {}
        return answer if isinstance(answer, Reject) else tuple(tickets[one.request.uid] for one in incoming)

    def handle(self, event: Event, now_ns: int | None = None) -> tuple[Action, ...]:
        """Let the controller handle an event; returns its actions, which have been performed. None after `stop`."""
        if self.is_stopped:
            return ()
        self._check_lease()
        try:
            return self._handle(event, self._now_ns() if now_ns is None else now_ns)
        except Exception as error:
            self.fail(error, event)
            raise

    def fail(self, error: Exception, what: object) -> None:
        """Note that an error occurred while `what` was handled. The first one counts."""
        if self.is_stopped:
            return
        self.is_stopped = True
        _log.critical("the scheduler failed at %.2000r", what, exc_info=error)
        for uid in self._requests.uids:
            if not self._holds_states or uid in self._restored:
                job_id = self._requests.job_id(uid)
                assert job_id is not None
                self.resolve(self._requests.remove(job_id).ticket, Status.FAILED, FAILED)
        self._on_failed(f"the scheduler failed ({type(error).__name__}: {error})")

    def _handle(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        began_ns = time.perf_counter_ns()
        actions = self._controller.handle(event, now_ns)
        took_ns = time.perf_counter_ns() - began_ns
        self._observer.on_decided(now_ns, took_ns, self._controller.num_waiting)
        self._log.add(event, actions, now_ns)
        for action in actions:
            self._perform(action)
            self._note(action, now_ns)
        return actions

    def _note(self, action: Action, now_ns: int) -> None:
        """Add an action to the history of its requests. `Finish` is in the outcome instead."""
        for job_id in jobs_of(action):
            if entry := self._requests.get(job_id):
                entry.ticket.note(now_ns, action)

    def _perform(self, action: Action) -> None:
        match action:
            case Accept():
                self._accept(action)
            case UseCache(job_id):
                self._requests[job_id].use_cache()
            case Reject(uid, code=code):
                self._observer.on_refused(self._incoming.pop(uid).request, code)
            case Finish(job_id, uid, status, reason):
                self._finish(job_id, uid, status, reason)
            case WakeAt(at_ns):
                delay_s = max(0, at_ns - self._now_ns()) / NS_PER_S
                self._loop.call_later(delay_s, self._wake)
            case Place(placement):
                self._observer.on_placed(placement)
            case _:
                self._dispatcher.perform(action)

    def _wake(self) -> None:
        if not self.is_stopped:
            self.handle(Woke())

    def _accept(self, accept: Accept) -> None:
        incoming = self._incoming.pop(accept.uid)
        request = accept.accepted(incoming.request)
        spec = incoming.spec.with_spare_cache if accept.uses_cache else incoming.spec
        ticket = self._accepted[accept.uid] = self.ticket(
            request, accept.eta_ns, accept.eta_p90_ns, incoming.checkpoint
        )
        self._requests.add(accept.job_id, spec, ticket)
        self._dispatcher.begin(accept.job_id, request, incoming.checkpoint)

    def ticket(self, request: Request, eta_ns: int, eta_p90_ns: int, checkpoint: Checkpoint) -> Ticket:
        outcome = self._loop.create_future()
        return Ticket(request=request, eta_ns=eta_ns, eta_p90_ns=eta_p90_ns, outcome=outcome, checkpoint=checkpoint)

    def _finish(self, job_id: int, uid: str, status: Status, reason: str) -> None:
        entry = self._requests.remove(job_id)
        if status is Status.DONE and (inexact := _inexact(entry.ticket)):
            status = Status.FAILED
            reason = inexact
        if self._holds_states and status is Status.DONE:
            self._dispatcher.hold(job_id, uid)
        else:
            self._dispatcher.end(job_id)
        image, file = (entry.image, entry.file) if status is Status.DONE else (None, None)
        self.resolve(entry.ticket, status, reason, image, file)

    def resolve(
        self, ticket: Ticket, status: Status, reason: str, image: Image | None = None, file: File | None = None
    ) -> None:
        """End a ticket."""
        outcome = Outcome(
            uid=ticket.request.uid,
            status=status,
            reason=reason,
            finished_ns=self._now_ns(),
            image=image,
            segments=tuple(ticket.segments),
            file=file,
            refusal=ticket.refusal,
        )
        self._observer.on_ended(ticket, outcome)
        ticket.end(outcome)


def _inexact(ticket: Ticket) -> str:
    """Return why the image of a request that should be exact is not; empty if it is, or need not be."""
    if not ticket.request.exact or all(segment.is_exact for segment in ticket.segments):
        return ""
    return "it is exact, but a part of it ran on several devices, together with other requests or in slices"
