"""Models of a simulated server, and the changes of them that an operator asks for."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tilework.control.controller import Controller
from tilework.core.events import Event, ModelRemoved, ModelServed
from tilework.core.lora import Lora
from tilework.core.request import Request
from tilework.cost.table import CostTable, only
from tilework.cost.table_file import table_json


class ChangeMisjudged(AssertionError):
    """A change that cannot be made was not refused, one that can was, or one that was refused has left something."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """LoRAs that new requests may ask for, by pipeline."""

    loras: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, table: CostTable) -> _Offer:
        return cls({pipeline: frozenset(table.loras.get(pipeline, {})) for pipeline in table.pipelines})

    def without(self, pipeline: str, lora: str | None = None) -> _Offer:
        if lora is None:
            return _Offer({name: loras for name, loras in self.loras.items() if name != pipeline})
        return _Offer({**self.loras, pipeline: self.loras[pipeline] - {lora}})

    def admits(self, request: Request) -> bool:
        return {one.name for one in request.loras} <= self.loras.get(request.pipeline, frozenset()) and (
            request.pipeline in self.loras
        )


class SimCatalog:
    """Makes changes one after another, each as a whole or not at all, as `runtime.models.catalog` does.

    What is to go gets no new requests, and goes when its open ones have ended. `controller` returns the one of the
    server that runs, `handle` passes events to it, `open_requests` are those that it has accepted.
    """

    def __init__(
        self,
        controller: Callable[[], Controller],
        handle: Callable[[Event], None],
        open_requests: Callable[[], Iterable[Request]],
    ) -> None:
        self._controller = controller
        self._handle = handle
        self._open_requests = open_requests
        self._offer = _Offer.of(controller().costs.table)
        self._waiting = deque[Change]()
        self.num_made = 0
        self.num_refused = 0

    def refusal(self, request: Request) -> str:
        """Return why a request is refused before the controller hears of it; empty if it is not."""
        return "" if self._offer.admits(request) else f"{request.pipeline} is not served, or not with its LoRAs"

    @property
    def is_waiting(self) -> bool:
        """True if a change waits for requests to end."""
        return bool(self._waiting)

    def ask(self, change: Change) -> None:
        """Take a change; `go_on` makes it."""
        self._waiting.append(change)

    def go_on(self) -> bool:
        """Make the change that is next, unless it must wait; returns whether another may follow."""
        if not self._waiting or not self._make(self._waiting[0]):
            return False
        self._waiting.popleft()
        return bool(self._waiting)

    def restart(self) -> None:
        """Begin as the next server: it serves what the one before did; changes not done yet are lost."""
        self._waiting.clear()
        self._offer = _Offer.of(self._table)

    @property
    def _table(self) -> CostTable:
        return self._controller().costs.table

    def _make(self, change: Change) -> bool:
        """Make a change, or refuse it; returns whether it has ended."""
        if self._is_impossible(change):
            self.num_refused += 1
            return True
        if isinstance(change, RemoveModel | RemoveLora):
            lora = change.name if isinstance(change, RemoveLora) else None
            self._offer = self._offer.without(change.pipeline, lora)
            if any(_concerns(change, request) for request in self._open_requests()):
                return False
        event = self._event(change)
        if isinstance(event, ModelServed) and self._is_refused(event, getattr(change, "is_unusable", False)):
            self.num_refused += 1
            return True
        self.num_made += 1
        self._handle(event)
        self._offer = _Offer.of(self._table)
        return True

    def _is_impossible(self, change: Change) -> bool:
        """Return whether a change asks for a taken or an unknown name, or for the only model."""
        table = self._table
        match change:
            case ServeModel():
                return change.pipeline in table.pipelines
            case RemoveModel(pipeline=pipeline):
                return pipeline not in table.pipelines or len(table.pipelines) == 1
            case AddLora(pipeline=pipeline, name=name):
                return pipeline not in table.pipelines or name in table.loras.get(pipeline, {})
            case RemoveLora(pipeline=pipeline, name=name):
                return name not in table.loras.get(pipeline, {})

    def _event(self, change: Change) -> ModelServed | ModelRemoved:
        match change:
            case ServeModel(costs=costs):
                return ModelServed(json.dumps(table_json(costs)))
            case RemoveModel(pipeline=pipeline):
                return ModelRemoved(pipeline)
            case AddLora(pipeline=pipeline, name=name, lora=lora):
                return self._with_loras(pipeline, {**self._table.loras.get(pipeline, {}), name: lora})
            case RemoveLora(pipeline=pipeline, name=name):
                known = self._table.loras[pipeline]
                return self._with_loras(pipeline, {other: lora for other, lora in known.items() if other != name})

    def _with_loras(self, pipeline: str, loras: Mapping[str, Lora]) -> ModelServed:
        known = only(self._table, pipeline)
        return ModelServed(json.dumps(table_json(replace(known, slo_s={}, loras={pipeline: loras} if loras else {}))))

    def _is_refused(self, served: ModelServed, is_unusable: bool) -> bool:
        """Raises ChangeMisjudged."""
        costs = self._controller().costs
        before = self._table
        version = costs.version
        try:
            self._controller().check(served)
        except Exception as error:
            if not is_unusable:
                raise ChangeMisjudged(f"a change that can be made is refused: {error}") from error
            if costs.table is not before or costs.version != version:
                raise ChangeMisjudged("a change that was refused has changed costs") from error
            return True
        if is_unusable:
            raise ChangeMisjudged(f"a change that cannot be made is not refused: {served}")
        return False


def _concerns(change: RemoveModel | RemoveLora, request: Request) -> bool:
    if isinstance(change, RemoveLora) and change.name not in [one.name for one in request.loras]:
        return False
    return request.pipeline == change.pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeModel:
    """Serve the one pipeline of a cost table. One that `is_unusable` must be refused."""

    costs: CostTable
    is_unusable: bool = False

    @property
    def pipeline(self) -> str:
        return self.costs.pipelines[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveModel:
    pipeline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddLora:
    pipeline: str
    name: str
    lora: Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveLora:
    pipeline: str
    name: str


Change = ServeModel | RemoveModel | AddLora | RemoveLora


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedChange:
    """A change that is asked for at `at_ns`. Its `number` in the scenario stays when others are left out."""

    number: int
    at_ns: int
    change: Change
