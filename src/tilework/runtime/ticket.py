"""What a submitter holds: a ticket that resolves to the one outcome of its request, with the story of how it went."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tilework.core.request import Request, Status
from tilework.core.wire import Image
from tilework.core.work import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One executed work of a request, on the engine's clock. `num_steps` is 1 for encode and decode."""

    stage: str
    gpus: Group
    num_steps: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended. `image` is there if and only if `status` is done. Times are on the engine's clock."""

    uid: str
    status: Status
    reason: str
    finished_ns: int
    image: Image | None
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The request did not come in; `earliest_ns` is the earliest deadline that could be met, if there is one."""

    uid: str
    reason: str
    earliest_ns: int | None


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """An accepted request. `outcome` resolves exactly once; `steps_done` follows the running work."""

    request: Request
    eta_ns: int
    outcome: asyncio.Future[Outcome]
    segments: list[Segment] = field(default_factory=list)
    steps_done: int = 0
    first_start_ns: int | None = None

    @property
    def queue_ns(self) -> int | None:
        """Time from arrival to the start of its first work; None while it has not started."""
        return None if self.first_start_ns is None else self.first_start_ns - self.request.arrival_ns
