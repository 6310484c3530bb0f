"""What the HTTP API needs of an engine: the live one of `runtime`, or a fake one in tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tilework.core.classes import DEFAULT_CLASS
from tilework.core.request import OnMiss
from tilework.core.wire import ModelInfo, Spec
from tilework.runtime.observer import Observer, Usage
from tilework.runtime.ticket import Refusal, Ticket


class Health(Protocol):
    @property
    def num_devices_up(self) -> int: ...
    @property
    def num_devices(self) -> int: ...
    @property
    def num_jobs(self) -> int:
        """Accepted requests that have not ended."""

    @property
    def draining(self) -> bool: ...


class Engine(Protocol):
    """Every method runs on the event loop; `submit` and `cancel` answer at once."""

    @property
    def info(self) -> ModelInfo:
        """The served model; known once the engine has started."""

    @property
    def policy(self) -> str:
        """The name of the scheduling policy."""

    def submit(
        self,
        specs: Mapping[str, Spec],
        *,
        deadline_ns: int | None,
        on_miss: OnMiss,
        tenant: str = "default",
        priority: str = DEFAULT_CLASS,
        weight: float = 1.0,
    ) -> tuple[Ticket, ...] | Refusal:
        """Bring requests in, all of them or none; `specs` by their uids, which are new."""

    def cancel(self, uid: str, reason: str) -> None:
        """End a request as cancelled; does nothing if it is unknown or has ended."""

    def eta_ns(self, uid: str) -> int | None:
        """When an open request is expected to be done, as of now; None once it has ended."""

    def now_ns(self) -> int: ...
    def health(self) -> Health: ...
    def usage(self) -> Usage:
        """What it holds, right now."""

    def observe(self, observer: Observer) -> None:
        """Tell this one, and no other, what happens from now on."""

    def drain(self) -> None:
        """Say in `health` that no new requests are wanted; those that are in go on."""

    async def start(self) -> None: ...
    async def stop(self) -> None:
        """Stop the devices; every open ticket resolves as cancelled. May be called twice, or without `start`."""
