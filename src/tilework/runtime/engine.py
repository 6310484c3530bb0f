"""The live driver: turns requests and reports into events, and the controller's actions into commands.

Runs on one event loop; everything public is called on its thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TextIO

from tilework.admission.contract import EtaPrediction
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.watchdog import WatchdogConfig
from tilework.core.actions import Reject
from tilework.core.checkpoint import Checkpoint, CheckpointKeeper
from tilework.core.events import Cancelled, Restored, Submitted
from tilework.core.model import ModelInfo, ModelSource, NotServed
from tilework.core.request import DEFAULT_TERMS, Refusal, RefusalCode, Request, Status, Terms
from tilework.core.wire.reports import LoadedModel
from tilework.core.wire.spec import Spec
from tilework.cost.table import CostTable
from tilework.cost.tabled import UnknownCost
from tilework.runtime.control_loop import ControlLoop, Incoming
from tilework.runtime.device_listener import DeviceListener
from tilework.runtime.encode_cache import EncodeCache
from tilework.runtime.engine_status import EngineStatus
from tilework.runtime.event_log.segmented_file import SegmentedFile
from tilework.runtime.executor import Executor
from tilework.runtime.models.catalog import Catalog
from tilework.runtime.models.costs import CostCache
from tilework.runtime.models.measuring import Measuring
from tilework.runtime.observer import Observer
from tilework.runtime.request_table import RequestTable
from tilework.runtime.ticket import Ticket, Wanted
from tilework.runtime.work_dispatcher import WorkDispatcher

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configuration of an engine.
    `table` is used unchanged, except that the speed of loads is measured if it has none and loads are needed. Without a
    table the devices are measured, as far as `cache` has no measurements of them.

    The start measures for at most `measure_s` seconds, as far as that can be predicted. The rest is predicted, and
    measured later on idle devices. With `require_all` a start fails if some of its models cannot run, instead of
    serving the others. `exact` says that all requests will be exact, so neither groups nor batches are measured.
    `begin_ns` is the time of the engine's clock when the engine is made: it may continue an earlier engine's clock.
    `encode_cache_bytes` is the size of the cache of encoded inputs. `usual` has the settings of the server for models
    that are added.
    """

    controller: ControllerConfig = field(default_factory=ControllerConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    table: CostTable | None = None
    cache: CostCache | None = None
    exact: bool = False
    require_all: bool = False
    measure_s: float = math.inf
    begin_ns: int = 0
    encode_cache_bytes: int = 0
    usual: ModelSource = field(default_factory=partial(ModelSource, path=""))


class Engine:
    """One controller over one executor, whose devices are up: the life of requests, from `submit` to their ends.

    `EngineStart` makes it. `submit` answers at once. With a `keeper` open requests outlive the engine: the next one can
    `restore` them.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        executor: Executor,
        controller: Controller,
        measuring: Measuring,
        loaded: list[LoadedModel],
        log: TextIO | SegmentedFile | None,
        observer: Observer,
        keeper: CheckpointKeeper | None,
        check_lease: Callable[[], None],
        origin_ns: int,
    ) -> None:
        self._executor = executor
        self._controller = controller
        self._keeper = keeper
        self._origin_ns = origin_ns
        self._requests = RequestTable()
        self._encode_cache = EncodeCache(config.encode_cache_bytes, executor)
        infos = {one.info.name: one.info for one in loaded}
        self.models: Mapping[str, ModelInfo] = infos
        """Models that it serves, by name; a request that names none gets the first."""
        self.not_served: Mapping[str, NotServed] = measuring.not_served
        """Other models of its start, by name: they cannot run on its devices."""
        self.policy = config.controller.policy
        self.draining = False
        """True if no new requests are wanted; open requests continue."""
        self.failed = asyncio.Event()
        self.failure = ""
        """Reason why it has `failed`, empty before: its scheduler failed, and only `stop` can still be called."""
        self._control = ControlLoop(
            controller, self._requests, log, config.controller, observer, self.now_ns, self._on_failed, check_lease
        )
        self._dispatcher = WorkDispatcher(
            commands=executor,
            blobs=executor,
            controller=controller,
            watchdog=config.watchdog,
            request_table=self._requests,
            keeper=keeper,
            observer=observer,
            origin_ns=origin_ns,
            handle=self._control.handle,
            encode_cache=self._encode_cache,
        )
        self._control.attach(self._dispatcher, holds_states=keeper is not None)
        self.catalog = Catalog(
            infos=infos,
            not_served=measuring.not_served,
            usual=config.usual.of_others(),
            loaded=loaded,
            executor=executor,
            controller=controller,
            measuring=measuring,
            handle=self._control.handle,
            requests=lambda: [entry.ticket.request for entry in self._requests],
            turns=self._dispatcher.turns,
        )
        self.status = EngineStatus(
            executor=executor,
            controller=controller,
            dispatcher=self._dispatcher,
            encode_cache=self._encode_cache,
            models=infos,
            loaded=tuple(loaded),
            now_ns=self.now_ns,
        )
        self._measuring_left = asyncio.create_task(self._measure_left())  # Before a policy may fail.
        listener = DeviceListener(
            executor=executor,
            controller=controller,
            control=self._control,
            dispatcher=self._dispatcher,
            requests=self._requests,
            now_ns=self.now_ns,
        )
        executor.report_to(listener)
        listener.on_links_changed()
        for device_id in (*executor.devices_up, *executor.slots_up):
            listener.on_joined(device_id)

    async def _measure_left(self) -> None:
        try:
            await self.catalog.measure_left()
        except Exception:
            _log.exception("the measurements that the start has left failed; these costs stay predicted")

    def observe(self, observer: Observer) -> None:
        """Pass events to this observer, and no other, from now on."""
        self._control.observe(observer)

    def _on_failed(self, failure: str) -> None:
        self.failure = failure
        self.drain()
        self.failed.set()

    async def stop(self) -> None:
        """End every request that is still open as cancelled, then the workers.

        With a keeper only their tickets end: what is kept of the requests stays, as if the process had been killed,
        except that running works may first end at their next step.
        """
        self.drain()
        self._dispatcher.close()
        await asyncio.wait([self._measuring_left])
        if self._keeper is None:
            for uid in self._requests.uids:
                self.cancel(uid, "the server was stopped")
        elif not self.failure:
            await self._dispatcher.stop_all()
        self._encode_cache.clear()
        self._control.stop("the server was stopped")
        await self._executor.stop()

    def drain(self) -> None:
        """Say that no new requests are wanted."""
        self.draining = True
        self._measuring_left.cancel()

    def now_ns(self) -> int:
        """Return the time of its clock, which is that of its start."""
        return time.monotonic_ns() - self._origin_ns

    def open_tickets(self) -> Iterator[Ticket]:
        """Return the tickets of requests that have not ended, in the order of their arrival."""
        return (entry.ticket for entry in self._requests)

    def standing_refusal(self) -> Reject | None:
        """Return the refusal of every request without a promise; None if one may be accepted. Takes microseconds."""
        return self._controller.standing_refusal(self.now_ns())

    def submit(
        self,
        specs: Mapping[str, Spec],
        *,
        model: str | None = None,
        deadline_ns: int | None = None,
        terms: Terms = DEFAULT_TERMS,
    ) -> tuple[Ticket, ...] | Reject:
        """Submit requests for a model, all of them or none.

        Without a model, the first one is used. Uids must be new; `deadline_ns` is on the engine's clock.
        """
        arrival_ns = self.now_ns()
        info = self._model(model)
        if (within := self._controller.costs.pools.within(info.name)) and within.isdisjoint(self._dispatcher.up):
            reason = f"no device that serves {info.name} is up"
            return Reject(next(iter(specs)), reason, None, RefusalCode.NO_DEVICE)
        if not self._executor.num_slots and any(spec.video is not None for spec in specs.values()):
            reason = "a video needs a CPU slot, and there is none: name its model when you start the server"
            return Reject(next(iter(specs)), reason, None, RefusalCode.NO_DEVICE)
        incoming: list[Incoming] = []
        for uid, spec in specs.items():
            assert self._requests.job_id(uid) is None, f"two requests have the uid {uid}"
            wanted = Wanted(
                uid=uid, model=info.name, spec=spec, arrival_ns=arrival_ns, deadline_ns=deadline_ns, terms=terms
            )
            request = wanted.request(info)
            incoming.append(Incoming(request, spec, self._encoded(request, spec)))
        first, *others = (one.request for one in incoming)
        positions = tuple(one.checkpoint.position for one in incoming)
        event = Submitted(first, tuple(others), positions if any(positions) else ())
        answer = self._control.submit(event, incoming, arrival_ns)
        if isinstance(answer, Reject):
            for one in incoming:
                for blob in one.checkpoint.blobs:
                    self._executor.discard(blob)
        return answer

    def _encoded(self, request: Request, spec: Spec) -> Checkpoint:
        """Return the checkpoint at which a new request may begin, since its inputs were encoded before."""
        try:
            return self._encode_cache.find(request, spec, self._controller.costs)
        except UnknownCost:  # The controller refuses it.
            return Checkpoint()

    def _model(self, name: str | None) -> ModelInfo:
        return next(iter(self.models.values())) if name is None else self.models[name]

    def restore(self, kept: Sequence[tuple[Wanted, Checkpoint]]) -> tuple[Ticket, ...]:
        """Take over requests that an engine before this one had accepted, in this order; once, before any other.

        They go on from their checkpoints, as far as these are still there. The ticket of a request that can no longer
        be served has failed already.
        """
        there = self._executor.inherit({blob for _, checkpoint in kept for blob in checkpoint.blobs})
        return tuple(self._restore(wanted, checkpoint.among(there)) for wanted, checkpoint in kept)

    def _restore(self, wanted: Wanted, checkpoint: Checkpoint) -> Ticket:
        request = wanted.request(self.models.get(wanted.model))
        if wanted.lost:
            return self._failed(request, wanted.lost)
        if wanted.model in self.not_served:
            reason = self.not_served[wanted.model].reason
            return self._failed(request, f"the model {wanted.model} cannot run here: {reason}", Refusal.MODEL)
        if wanted.model not in self.models:
            return self._failed(request, f"the model {wanted.model} is not served any more", Refusal.MODEL)
        for lora in request.loras:
            if lora.name not in self.models[wanted.model].loras:
                return self._failed(request, f"{wanted.model} has no LoRA {lora.name} any more", Refusal.MODEL)
        incoming = Incoming(request, wanted.spec, checkpoint)
        answer = self._control.submit(Restored(request, checkpoint.position), [incoming], self.now_ns())
        if isinstance(answer, Reject):
            return self._failed(request, answer.reason)
        (ticket,) = answer
        left = self._controller.costs.start(request).itinerary.at[checkpoint.position]
        ticket.progress(request.steps - left.num_steps_left)
        return ticket

    def _failed(self, request: Request, reason: str, refusal: Refusal | None = None) -> Ticket:
        ticket = self._control.ticket(request, request.arrival_ns, request.arrival_ns, Checkpoint())
        ticket.refusal = refusal
        self._control.resolve(ticket, Status.FAILED, reason)
        return ticket

    def release(self, uid: str) -> None:
        """Release the states of a request that is done: its image is stored, and need not be made again."""
        self._dispatcher.release(uid)

    def cancel(self, uid: str, reason: str) -> None:
        """End a request now; its device is free at the next step boundary. Unknown or ended uids are ignored."""
        if self._requests.job_id(uid) is not None:
            self._control.handle(Cancelled(uid, reason))

    def predict(self, uid: str) -> EtaPrediction | None:
        """Return when an open request is expected to be done, as of now; None once it has ended."""
        job_id = self._requests.job_id(uid)
        return None if job_id is None else self._controller.predict(job_id, self.now_ns())
