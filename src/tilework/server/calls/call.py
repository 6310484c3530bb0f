"""One accepted call, from its submission until its images are encoded. It does not depend on its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tilework.runtime.ticket import Ticket
from tilework.server.calls.errors import CallError
from tilework.server.calls.idempotency import Key
from tilework.server.calls.journal import KeptCall
from tilework.server.calls.parsing.image_call import ImageCall
from tilework.server.schema.answers import RequestTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of a call that is done: a timeline of each image, and its files, one per frame of a clip.

    A video is one file.
    """

    uid: str
    arrived_s: float
    ask: ImageCall
    timelines: tuple[RequestTimeline, ...]
    files: tuple[bytes, ...] = field(repr=False)

    def parts(self, index: int) -> Iterator[tuple[int | None, bytes]]:
        """Yield the files of an image, each with the number of its frame; None for an image that is no clip."""
        num_parts = self.ask.num_parts
        for part in range(num_parts):
            yield None if num_parts == 1 else part, self.files[index * num_parts + part]


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """An accepted call. `end` resolves exactly once, after the call registry has let go of the open call.

    `arrival_ns` is on the engine's clock, `arrived_s` the same as Unix time. `identity` is that of its model, as the
    engine has it. `num_owners` counts the connections that asked for this call and still wait for it; a call that
    `is_detached` (its answer was "later") needs none.
    """

    uid: str
    ask: ImageCall
    key: Key | None
    arrival_ns: int
    arrived_s: float
    tickets: tuple[Ticket, ...]
    end: asyncio.Future[Finished | CallError]
    identity: str = ""
    is_detached: bool = False
    num_owners: int = 0
    cancel_reason: str | None = None
    abandoned: asyncio.TimerHandle | None = None

    @property
    def tenant(self) -> str:
        return self.ask.terms.tenant

    def kept(self) -> KeptCall:
        """Return what a later start of the server needs to go on with the call."""
        return KeptCall(
            uid=self.uid,
            key=self.key,
            ask=self.ask,
            identity=self.identity,
            arrival_ns=self.arrival_ns,
            arrived_s=self.arrived_s,
        )

    @property
    def is_kept(self) -> bool:
        """True if a client may fetch its images later."""
        return self.ask.as_url or self.is_detached or self.key is not None


@contextmanager
def changes(call: Call) -> Iterator[asyncio.Event]:
    """Yield an event that is set after every change of a call. Its reader clears it, so changes never queue up."""
    changed = asyncio.Event()
    stops = [ticket.watch(changed.set) for ticket in call.tickets]

    def on_end(_end: object) -> None:
        changed.set()

    call.end.add_done_callback(on_end)
    try:
        yield changed
    finally:
        call.end.remove_done_callback(on_end)
        for stop in stops:
            stop()
