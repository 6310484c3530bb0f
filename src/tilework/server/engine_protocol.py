"""What the HTTP API needs of an engine: the live one of `runtime`, or a fake one in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from tilework.core.actions import Reject
from tilework.core.checkpoint import Checkpoint
from tilework.core.interfaces import EtaPrediction
from tilework.core.model import LoraSource, ModelInfo, NewModel, NotServed
from tilework.core.request import DEFAULT_TERMS, Shape, Terms
from tilework.core.wire.spec import Spec
from tilework.cost.table import CostTable
from tilework.runtime.observer import Holding, Observer, Usage
from tilework.runtime.ticket import Ticket, Wanted


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


class Catalog(Protocol):
    """How what is served changes, one change after another. Each raises `ModelRefused`."""

    async def add(self, new: NewModel, *, measure: bool, check_name: Callable[[str], object]) -> ModelInfo:
        """Serve another model; its costs may be measured if they are not known.

        `check_name` is called while no other change is made: with the name that is asked for, and with that which the
        model has. What it raises ends the change.
        """

    async def remove(self, name: str) -> None:
        """Serve a model no more; waits for its open requests."""

    async def add_lora(self, model: str, source: LoraSource) -> None:
        """Let requests for a model use another LoRA."""

    async def remove_lora(self, model: str, name: str) -> None:
        """Let requests for a model use a LoRA no more; waits for those that do."""


class Engine(Protocol):
    """Every method runs on the event loop; `submit` and `cancel` answer at once."""

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        """The served models by name, that of requests that name none first; known once the engine has started."""

    @property
    def not_served(self) -> Mapping[str, NotServed]:
        """The models of its start that cannot run on its devices, by name; known once the engine has started."""

    def identity(self, model: str, loras: Iterable[str] = ()) -> str:
        """What its files, dtype and settings are, and which libraries run it: another value is another model.

        With LoRAs, also which files these are.
        """

    @property
    def catalog(self) -> Catalog:
        """Known once the engine has started."""

    @property
    def failed(self) -> asyncio.Event:
        """Set when its scheduler has failed: it has ended requests, takes no more, and can only be stopped."""

    @property
    def failure(self) -> str:
        """Why it has failed; empty before."""

    def standing_refusal(self) -> Reject | None:
        """The refusal of every request that asks for no promise; None if one may be accepted."""

    def devices_with(self, model: str) -> tuple[int, ...]:
        """The devices that have all weights of a model."""

    def devices_serving(self, model: str) -> tuple[int, ...]:
        """The devices that may run requests for a model, up or not."""

    def predicted_sizes(self, model: str) -> tuple[Shape, ...]:
        """The sizes of the cost table at which a model was not measured yet."""

    def is_on_host(self, model: str) -> bool:
        """Whether the host keeps a copy of all weights of a model, from which devices load them."""

    @property
    def policy(self) -> str:
        """The name of the scheduling policy."""

    @property
    def starting(self) -> str:
        """What the start waits for."""

    def cost_table(self) -> CostTable:
        """What things cost, with what was measured since the start; known once the engine has started."""

    def alone_ns(self, model: str, specs: Sequence[Spec]) -> int | None:
        """How long requests for a model take when nothing else runs and weights are loaded; None if it is not known."""

    def submit(
        self,
        specs: Mapping[str, Spec],
        *,
        model: str | None = None,
        deadline_ns: int | None = None,
        terms: Terms = DEFAULT_TERMS,
    ) -> tuple[Ticket, ...] | Reject:
        """Submit requests for a model, all of them or none; `specs` by their uids, which are new. None: the first."""

    def restore(self, kept: Sequence[tuple[Wanted, Checkpoint]]) -> tuple[Ticket, ...]:
        """Take in requests that the previous engine had accepted; once, before any other.

        The ticket of a request that cannot be served any more has already failed.
        """

    def release(self, uid: str) -> None:
        """The picture of a request is stored: the states that it was made of can be removed."""

    def cancel(self, uid: str, reason: str) -> None:
        """End a request as cancelled; does nothing if it is unknown or has ended."""

    def predict(self, uid: str) -> EtaPrediction | None:
        """When an open request is expected to be done, as of now; None once it has ended."""

    def now_ns(self) -> int: ...
    def health(self) -> Health: ...
    def backlog_ns(self) -> int:
        """The predicted device time of the remaining work of open requests."""

    def usage(self) -> Usage:
        """What it holds, right now."""

    def holdings(self) -> Sequence[Holding]:
        """The devices that are up, with the weights that they have."""

    def open_tickets(self) -> Iterator[Ticket]:
        """Those of requests that have not ended, in the order of their arrival."""

    def observe(self, observer: Observer) -> None:
        """Report events to this observer, instead of the one before, from now on."""

    def drain(self) -> None:
        """Say in `health` that no new requests are wanted; those that are in go on."""

    async def start(self) -> None: ...
    async def stop(self) -> None:
        """Stop the devices; every open ticket resolves as cancelled. May be called twice, or without `start`.

        What is kept for a later engine stays.
        """
