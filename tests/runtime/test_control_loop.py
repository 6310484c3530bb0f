"""A controller that raises: no request hangs, nothing is done with what it knows, and the next start does not break."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import pytest

import tiny
from builders import request, table
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Accept, Action, Finish, Reject
from tilework.core.checkpoint import Checkpoint
from tilework.core.events import Event, Restored, Submitted, Woke
from tilework.core.request import Status
from tilework.cost.table_costs import TableCosts
from tilework.runtime.control_loop import FAILED, ControlLoop, Incoming
from tilework.runtime.observer import Observer
from tilework.runtime.request_table import RequestTable
from tilework.runtime.ticket import Ticket


@dataclass
class Broken:
    """Accepts what comes, ends what comes late, and raises when it is woken."""

    num_waiting: int = 0
    events: list[Event] = field(default_factory=list)
    costs: TableCosts = field(default_factory=lambda: TableCosts(table()))

    def handle(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        self.events.append(event)
        match event:
            case Submitted() | Restored():
                job_id, uid = len(self.events), event.request.uid
                accept = Accept(job_id, uid, now_ns, now_ns, "")
                return (accept, Finish(job_id, uid, Status.EXPIRED, "late")) if uid == "late" else (accept,)
        raise AssertionError("a work begins twice")


class Nothing:
    """Takes the place of the dispatcher."""

    def begin(self, *_: Any) -> None: ...

    def end(self, *_: Any) -> None: ...


@dataclass
class Bench:
    holds_states: bool
    controller: Broken = field(default_factory=Broken)
    requests: RequestTable = field(default_factory=RequestTable)
    failures: list[str] = field(default_factory=list)
    log: StringIO = field(default_factory=StringIO)
    is_owner: bool = True

    def __post_init__(self) -> None:
        self.loop = ControlLoop(
            self.controller,  # type: ignore[arg-type]
            self.requests,
            self.log,
            ControllerConfig(),
            Observer(),
            lambda: 0,
            self.failures.append,
            self.check_lease,
        )
        self.loop.attach(Nothing(), self.holds_states)  # type: ignore[arg-type]

    def check_lease(self) -> None:
        if not self.is_owner:
            raise SystemExit

    def submit(self, uid: str, *, is_restored: bool = False) -> Ticket | Reject:
        asked = request(uid)
        event = Restored(asked, 0) if is_restored else Submitted(asked, (), ())
        answer = self.loop.submit(event, [Incoming(asked, tiny.spec(), Checkpoint())], 0)
        return answer if isinstance(answer, Reject) else answer[0]

    def fail(self) -> None:
        with pytest.raises(AssertionError, match="begins twice"):
            self.loop.handle(Woke())


def on_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario()

    asyncio.run(run())


def outcomes(tickets: Sequence[Any]) -> list[tuple[Status, str] | None]:
    ended = [ticket.outcome.result() if ticket.outcome.done() else None for ticket in tickets]
    return [None if one is None else (one.status, one.reason) for one in ended]


def test_all_requests_fail_and_no_event_follows() -> None:
    async def scenario() -> None:
        bench = Bench(holds_states=False)
        tickets = [bench.submit(uid) for uid in "ab"]
        bench.fail()
        assert outcomes(tickets) == [(Status.FAILED, FAILED)] * 2
        assert bench.failures == ["the scheduler failed (AssertionError: a work begins twice)"]
        known = len(bench.controller.events)
        assert bench.loop.handle(Woke()) == ()
        refused = bench.submit("c")
        assert isinstance(refused, Reject)
        assert refused.reason == FAILED
        assert len(bench.controller.events) == known

    on_loop(scenario)


def test_the_next_start_takes_over_what_it_can_and_not_for_ever() -> None:
    """What was open at two failures may be what breaks it."""

    async def scenario() -> None:
        bench = Bench(holds_states=True)
        tickets = [bench.submit("old", is_restored=True), bench.submit("new")]
        bench.fail()
        assert outcomes(tickets) == [(Status.FAILED, FAILED), None]
        bench.loop.stop("the server was stopped")  # Its calls are kept by then.
        assert outcomes(tickets)[1] == (Status.CANCELLED, "the server was stopped")

    on_loop(scenario)


def test_what_ends_as_it_is_taken_over_has_its_ticket() -> None:
    """Its deadline may have passed while no server ran."""

    async def scenario() -> None:
        bench = Bench(holds_states=True)
        tickets = [bench.submit("late", is_restored=True), bench.submit("new")]
        assert outcomes(tickets) == [(Status.EXPIRED, "late"), None]
        assert bench.requests.uids == ["new"]

    on_loop(scenario)


def test_who_owns_the_directory_no_more_decides_and_logs_nothing() -> None:
    """In the test the process goes on after its end."""

    async def scenario() -> None:
        bench = Bench(holds_states=True)
        bench.submit("before")
        known, logged = list(bench.controller.events), bench.log.getvalue()
        assert logged.count("\n") == 1 + len(known), "a header and the events"
        bench.is_owner = False
        with pytest.raises(SystemExit):
            bench.submit("late")
        with pytest.raises(SystemExit):
            bench.loop.handle(Woke())
        assert (bench.controller.events, bench.log.getvalue()) == (known, logged)

    on_loop(scenario)
