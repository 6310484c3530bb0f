"""The interface of an engine for the HTTP API: the live one of `runtime`, or a fake one in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from tilework.admission.contract import EtaPrediction
from tilework.core.actions import Reject
from tilework.core.checkpoint import Checkpoint
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
        """Number of accepted requests that have not ended."""

    @property
    def draining(self) -> bool: ...


class Catalog(Protocol):
    """Changes to what is served, one after another. Each raises `ModelRefused`."""

    async def add(self, new: NewModel, *, measure: bool, check_name: Callable[[str], object]) -> ModelInfo:
        """Serve another model; its costs may be measured if they are not known.

        `check_name` is called while no other change is made: with the name that is asked for, and with the one that the
        model has. An exception that it raises ends the change.
        """

    async def remove(self, name: str) -> None:
        """Stop serving a model; waits for its open requests."""

    async def add_lora(self, model: str, source: LoraSource) -> None:
        """Let requests for a model use another LoRA."""

    async def remove_lora(self, model: str, name: str) -> None:
        """Stop letting requests for a model use a LoRA; waits for those that do."""


class Engine(Protocol):
    """Runs requests. Every method runs on the event loop; `submit` and `cancel` answer at once."""

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        """Served models by name, that of requests that name none first; known once the engine has started."""

    @property
    def not_served(self) -> Mapping[str, NotServed]:
        """Models of its start that cannot run on its devices, by name; known once the engine has started."""

    def identity(self, model: str, loras: Iterable[str] = ()) -> str:
        """Return an identity of a model: its files, dtype and settings, and the libraries that run it.

        A model with another identity is another model. With LoRAs, their files count, too.
        """

    @property
    def catalog(self) -> Catalog:
        """Changes to what is served; known once the engine has started."""

    @property
    def failed(self) -> asyncio.Event:
        """Event, set when the scheduler has failed: it has ended requests, takes no more, and can only be stopped."""

    @property
    def failure(self) -> str:
        """Reason of its failure; empty before."""

    def standing_refusal(self) -> Reject | None:
        """Return the refusal of every request that asks for no promise; None if one may be accepted."""

    def devices_with(self, model: str) -> tuple[int, ...]:
        """Return the devices that have all weights of a model."""

    def devices_serving(self, model: str) -> tuple[int, ...]:
        """Return the devices that may run requests for a model, up or not."""

    def predicted_sizes(self, model: str) -> tuple[Shape, ...]:
        """Return the sizes of the cost table at which a model was not measured yet."""

    def is_on_host(self, model: str) -> bool:
        """Return whether the host keeps a copy of all weights of a model, from which devices load them."""

    @property
    def policy(self) -> str:
        """Name of the scheduling policy."""

    @property
    def starting(self) -> str:
        """Text that says what the start waits for."""

    def cost_table(self) -> CostTable:
        """Return the costs, with what was measured since the start; known once the engine has started."""

    def alone_ns(self, model: str, specs: Sequence[Spec]) -> int | None:
        """Return the time that requests take alone, with weights loaded; None if it is not known."""

    def submit(
        self,
        specs: Mapping[str, Spec],
        *,
        model: str | None = None,
        deadline_ns: int | None = None,
        terms: Terms = DEFAULT_TERMS,
    ) -> tuple[Ticket, ...] | Reject:
        """Submit requests for a model (None: the first), all of them or none; `specs` by their uids, which are new."""

    def restore(self, kept: Sequence[tuple[Wanted, Checkpoint]]) -> tuple[Ticket, ...]:
        """Take over requests that the previous engine had accepted; once, before any other.

        The ticket of a request that cannot be served any more has already failed.
        """

    def release(self, uid: str) -> None:
        """Remove the states of a request whose image is stored."""

    def cancel(self, uid: str, reason: str) -> None:
        """End a request as cancelled; do nothing if it is unknown or has ended."""

    def predict(self, uid: str) -> EtaPrediction | None:
        """Return when an open request is expected to be done, as of now; None once it has ended."""

    def now_ns(self) -> int: ...
    def health(self) -> Health: ...
    def backlog_ns(self) -> int:
        """Return the predicted device time of the remaining work of open requests."""

    def usage(self) -> Usage:
        """Return the resources that the engine holds right now."""

    def holdings(self) -> Sequence[Holding]:
        """Return the devices that are up, with the weights that they have."""

    def open_tickets(self) -> Iterator[Ticket]:
        """Return the tickets of requests that have not ended, in order of arrival."""

    def observe(self, observer: Observer) -> None:
        """Report events to this observer, instead of the one before, from now on."""

    def drain(self) -> None:
        """Report in `health` that no new requests are wanted; accepted ones go on."""

    async def start(self) -> None: ...
    async def stop(self) -> None:
        """Stop the devices; every open ticket resolves as cancelled. May be called twice, or without `start`.

        What is kept for a later engine stays.
        """
