"""The live driver: turns requests and reports into events, and the controller's actions into commands.

Runs on one event loop; everything public is called on its thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TextIO

import tilework
from tilework.admission.contract import EtaPrediction
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.log import header_line
from tilework.control.log_state import LogState
from tilework.control.watchdog import WatchdogConfig
from tilework.core.actions import Reject
from tilework.core.checkpoint import Checkpoint, CheckpointKeeper
from tilework.core.component import Component, Memory
from tilework.core.events import (
    Cancelled,
    ComponentsRead,
    DeviceJoined,
    LinksChanged,
    NodeCordoned,
    NodesSilent,
    Restored,
    StatesFetched,
    Submitted,
)
from tilework.core.graph.stage import DeviceKind
from tilework.core.model import ModelInfo, ModelSource, NotServed
from tilework.core.request import DEFAULT_TERMS, Refusal, RefusalCode, Request, Shape, Status, Terms
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.reports import LoadedModel, Report, WeightsRead
from tilework.core.wire.spec import Spec
from tilework.core.work import Group
from tilework.cost.degrees import alone_ns
from tilework.cost.table import CostTable
from tilework.cost.tabled import UnknownCost
from tilework.policy.registry import check_live
from tilework.policy.traits import PlacesStages
from tilework.runtime.control_loop import ControlLoop, Incoming
from tilework.runtime.encode_cache import EncodeCache
from tilework.runtime.event_log.log_file import LogFile
from tilework.runtime.event_log.segmented_file import SegmentedFile
from tilework.runtime.executor import Executor, WorkerStartFailed
from tilework.runtime.models.catalog import Catalog
from tilework.runtime.models.costs import CostCache
from tilework.runtime.models.measuring import Measuring, name_refused, with_weights
from tilework.runtime.models.start_parts import StartParts
from tilework.runtime.observer import HeldComponent, Holding, Observer, Usage
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of the engine right now, without its CPU slots. `num_jobs` are those that have not ended."""

    num_devices: int
    num_devices_up: int
    num_jobs: int
    draining: bool


class Engine:
    """One controller over one executor. `start` before anything else; `submit` answers at once.

    `log`, if given, receives the event log (`control.log`); `on_progress` receives, during the start, what the start
    waits for. With a `keeper` open requests outlive the engine: the next one can `restore` them. `check_lease` as in
    `ControlLoop`.
    """

    models: Mapping[str, ModelInfo]
    """Models that it serves, by name; a request that names none gets the first."""
    not_served: Mapping[str, NotServed]
    """Other models of its start, by name: they cannot run on its devices."""
    catalog: Catalog
    """Catalog through which the served models are changed."""
    failure: str
    """Reason why it has `failed`, empty before: its scheduler failed, and only `stop` can still be called."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        log: TextIO | SegmentedFile | None = None,
        on_progress: Callable[[str], None] = lambda _text: None,
        keeper: CheckpointKeeper | None = None,
        check_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._log = LogFile(log, on_lost=self._log_lost)
        self._on_progress = on_progress
        self._starting = "loading the models"
        self._start_parts = StartParts()
        self._keeper = keeper
        self._check_lease = check_lease
        self._leaving_at_start = list[Callable[[], None]]()
        self._origin_ns = time.monotonic_ns() - config.begin_ns
        self._requests = RequestTable()
        self._encode_cache = EncodeCache(config.encode_cache_bytes, executor)
        self._started = False
        self._draining = False
        self._stopped = False
        self._measuring_left: asyncio.Task[None] | None = None
        self._observer = Observer()
        self._links = LinksChanged((), False)
        self.failed = asyncio.Event()
        self.failure = ""

    # For the server.

    @property
    def policy(self) -> str:
        return self._config.controller.policy

    @property
    def starting(self) -> str:
        """Activity that the start waits for, or waited for last."""
        return self._starting

    @property
    def start_parts(self) -> StartParts:
        """Durations of the parts of the start, once it has started."""
        return self._start_parts

    def cost_table(self) -> CostTable:
        """Return the cost table, corrected by measurements since the start."""
        return self._controller.costs.corrected_table()

    def _log_header(self, segment: int, state: LogState | None) -> str:
        """Return the header of a segment of the log; that of a later segment has the costs at that time."""
        table = self._controller.costs.table if state is None else self.cost_table()
        return header_line(tilework.__version__, self._config.controller, table, segment, state)

    def observe(self, observer: Observer) -> None:
        """Pass events to this observer, and no other, from now on."""
        self._observer = observer
        if self._started:
            self._control.observe(observer)

    async def start(self) -> None:
        """Load the models on every device and measure them. Raises WorkerStartFailed, UnknownPolicy."""
        check_live(self._config.controller.policy)
        self.on_loading(0)
        begin_ns = time.monotonic_ns()
        loaded = await self._executor.start(self)
        loaded_ns = time.monotonic_ns()
        measuring = Measuring(
            executor=self._executor,
            num_devices=self._executor.num_devices,
            cache=self._config.cache,
            exact=self._config.exact,
            show=self._show,
            require_all=self._config.require_all,
            most_s=self._config.measure_s,
        )
        try:
            served, table = await measuring.start(loaded, self._executor.not_loaded, self._config.table)
        except WorkerStartFailed:
            await self._executor.stop()
            raise
        self._start_parts = StartParts.of(
            loaded, loaded_ns - begin_ns, time.monotonic_ns() - loaded_ns, measuring.first_ns
        )
        infos = self._take(served, measuring.not_served)
        table = with_weights(table, served, self._executor.weights_bytes, self._executor.host_bytes)
        table = replace(table, devices={**table.devices, **self._executor.serving})
        self._controller = Controller(self._config.controller, table)
        self._log.begin(self._log_header)
        self._control = ControlLoop(
            self._controller, self._requests, self._log, self._observer, self.now_ns, self._on_failed, self._check_lease
        )
        self._dispatcher = WorkDispatcher(
            commands=self._executor,
            blobs=self._executor,
            controller=self._controller,
            watchdog=self._config.watchdog,
            request_table=self._requests,
            keeper=self._keeper,
            observer=self._observer,
            origin_ns=self._origin_ns,
            handle=self._control.handle,
            encode_cache=self._encode_cache,
        )
        self._control.attach(self._dispatcher, holds_states=self._keeper is not None)
        self.catalog = Catalog(
            infos=infos,
            not_served=measuring.not_served,
            usual=self._config.usual.of_others(),
            loaded=served,
            executor=self._executor,
            controller=self._controller,
            measuring=measuring,
            handle=self._control.handle,
            requests=lambda: [entry.ticket.request for entry in self._requests],
            turns=self._dispatcher.turns,
        )
        self._started = True
        for let_go in self._leaving_at_start:
            let_go()
        self.on_links_changed()
        for device_id in (*self._executor.devices_up, *self._executor.slots_up):
            self.on_joined(device_id)
        self._measuring_left = asyncio.create_task(self._measure_left())

    async def _measure_left(self) -> None:
        try:
            await self.catalog.measure_left()
        except Exception:
            _log.exception("the measurements that the start has left failed; these costs stay predicted")

    def _take(self, served: Sequence[LoadedModel], not_served: Mapping[str, NotServed]) -> dict[str, ModelInfo]:
        """Serve these of the loaded models, and let devices forget the others; returns `models`."""
        self.models = infos = {one.info.name: one.info for one in served}
        self.not_served = not_served
        for name in [one.name for one in not_served.values() if one.info is not None]:
            self._executor.remove_model(name)
        self._weights = tuple((one.info.name, name, size) for one in served for name, size in one.weights.items())
        name_refused(served)
        return infos

    def on_loading(self, num_ready: int) -> None:
        num_workers = self._executor.num_devices + self._executor.num_slots
        self._show(f"loading the models, {num_ready} of {num_workers} workers ready")

    def _show(self, starting: str) -> None:
        self._starting = starting
        self._on_progress(starting)

    def _log_lost(self) -> None:
        self._observer.on_log_lost()

    def _on_failed(self, failure: str) -> None:
        self._stopped = True
        self.failure = failure
        self.drain()
        self.failed.set()

    async def stop(self) -> None:
        """End every request that is still open as cancelled, then the workers.

        With a keeper only their tickets end: what is kept of the requests stays, as if the process had been killed,
        except that running works may first end at their next step.
        """
        self.drain()
        if self._started:
            self._dispatcher.close()
        if self._measuring_left is not None:
            await asyncio.wait([self._measuring_left])
        if self._keeper is None:
            self._end_all("the server was stopped")
        elif self._started and not self.failure:
            await self._dispatcher.stop_all()
        self._stopped = True
        self._encode_cache.clear()
        if self._started:
            self._control.stop("the server was stopped")
        await self._executor.stop()

    def _end_all(self, reason: str) -> None:
        for uid in self._requests.uids:
            self.cancel(uid, reason)

    def drain(self) -> None:
        """Report in `health` that no new requests are accepted; open requests continue."""
        self._draining = True
        if self._measuring_left is not None:
            self._measuring_left.cancel()

    def now_ns(self) -> int:
        """Return the time of its clock: nanoseconds since the engine was made, plus `begin_ns`."""
        return time.monotonic_ns() - self._origin_ns

    def health(self) -> Health:
        return Health(
            num_devices=self._executor.num_devices,
            num_devices_up=sum(device_id < self._executor.num_devices for device_id in self._dispatcher.up),
            num_jobs=self._controller.num_jobs,
            draining=self._draining,
        )

    def backlog_ns(self) -> int:
        """Return the predicted device time of the remaining work of open requests, right now."""
        return self._controller.backlog_ns(self.now_ns())

    def usage(self) -> Usage:
        """Return the resources that the engine holds right now; takes time in proportion to the open requests."""
        now_ns = self.now_ns()
        policy = self._controller.policy
        occupancy = self._controller.occupancy(now_ns)
        free = {one.device_id: one.memory.free_bytes for one in self._controller.tracker.devices}
        return Usage(
            waiting=occupancy.waiting,
            running=occupancy.running,
            backlog_ns=occupancy.backlog_ns,
            state_blob_bytes=self._dispatcher.state_bytes,
            encode_cache=self._encode_cache.usage,
            memory_bytes=dict(self._dispatcher.memory_bytes),
            kept=dict(self._dispatcher.kept),
            resident_bytes=self._executor.resident_bytes,
            readings=self._executor.readings,
            bad_reports=self._executor.bad_reports,
            guard=self._controller.guard_counts,
            weights_free_bytes={device_id: size for device_id, size in free.items() if size is not None},
            placements=policy.placement_status(now_ns) if isinstance(policy, PlacesStages) else (),
            cost_deviations=self._controller.costs.deviations,
            margins=self._controller.tracker.margins,
        )

    def holdings(self) -> tuple[Holding, ...]:
        """Return the devices that are up and the weights that they have, accelerators first."""
        tracker = self._controller.tracker
        readings = self._executor.readings
        return tuple(
            Holding(
                device_id=device.device_id,
                node=device.node,
                kind=device.kind,
                total_bytes=device.memory.total_bytes,
                free_bytes=device.memory.free_bytes,
                used_bytes=self._dispatcher.memory_bytes.get(device.device_id),
                components=self._held(device.device_id, device.memory),
                readings=tuple(
                    one for name, one in sorted(readings.items()) if name.partition(".")[0] == str(device.device_id)
                ),
            )
            for device in (*tracker.devices, *tracker.slots)
        )

    def _held(self, device_id: int, memory: Memory) -> tuple[HeldComponent, ...]:
        """Return the components of models that an accelerator serves: all of them, if nothing is loaded on demand."""
        named = self._controller.costs.weights.named
        pools = self._controller.costs.pools
        if device_id >= self._executor.num_devices:
            return ()
        if memory.total_bytes is None:
            return tuple(
                HeldComponent(models=(model,), name=name, num_bytes=num_bytes)
                for model, name, num_bytes in self._weights
                if pools.serves(device_id, model)
            )
        held = []
        for one in memory.components:
            users = [(model, name) for model, name in named.get(one, ()) if pools.serves(device_id, model)]
            if users:
                models = tuple(model for model, _ in users)
                held.append(HeldComponent(models=models, name=users[0][1], num_bytes=one.num_bytes))
        return tuple(held)

    def open_tickets(self) -> Iterator[Ticket]:
        """Return the tickets of requests that have not ended, in the order of their arrival."""
        return (entry.ticket for entry in self._requests)

    def standing_refusal(self) -> Reject | None:
        """Return the refusal of every request without a promise; None if one may be accepted. Takes microseconds."""
        return self._controller.standing_refusal(self.now_ns()) if self._started else None

    def devices_with(self, model: str) -> tuple[int, ...]:
        """Return the accelerators that have all weights of a model, once their loads are done."""
        tracker = self._controller.tracker
        pools = self._controller.costs.pools
        needed = self._components(model)
        return tuple(
            device.device_id
            for device in tracker.devices
            if pools.serves(device.device_id, model) and device.memory.has(needed)
        )

    def devices_serving(self, model: str) -> tuple[int, ...]:
        """Return the accelerators that may run requests for a model, up or not."""
        pools = self._controller.costs.pools
        return tuple(one for one in range(self._executor.num_devices) if pools.serves(one, model))

    def predicted_sizes(self, model: str) -> tuple[Shape, ...]:
        """Return the sizes of the cost table at which a model was not measured yet."""
        rows = self._controller.costs.table.rows
        return tuple(sorted({row.shape for row in rows if row.pipeline == model and row.is_predicted}))

    def identity(self, model: str, loras: Iterable[str] = ()) -> str:
        """Return the identity of a served model with these of its LoRAs, which does not depend on their names.

        States of one identity cannot be used with another.
        """
        key = self._executor.profile_key(model)
        known = self._controller.costs.table.loras.get(model, {})
        weights = [known[name].component if name in known else None for name in sorted(loras)]
        parts = [key.content, key.dtype, key.libraries, *("" if one is None else one.digest for one in weights)]
        return ", ".join(parts)

    def is_on_host(self, model: str) -> bool:
        """Return whether the host of a node keeps a copy of all weights of a model, from which devices load them."""
        needed = set(self._components(model))
        tracker = self._controller.tracker
        nodes = {device.node for device in tracker.devices}
        return bool(needed) and any(needed <= set(tracker.sources.kept(node)) for node in nodes)

    def _components(self, model: str) -> list[Component]:
        costs = self._controller.costs
        return [one for stage in costs.graph(model).stages for one in costs.weights.components(stage)]

    def alone_ns(self, model: str, specs: Sequence[Spec]) -> int | None:
        """Return how long requests for a model take when nothing else runs and weights are loaded; None if not known.

        They run side by side, as far as there are devices.
        """
        devices = max(1, len(self.devices_serving(model)))
        wanted = Wanted(uid="", model=model, spec=specs[0], arrival_ns=0, deadline_ns=None, terms=DEFAULT_TERMS)
        try:
            one_ns = alone_ns(self._controller.costs, wanted.request(self.models[model]), max(1, devices // len(specs)))
        except UnknownCost:
            return None
        return one_ns * math.ceil(len(specs) / devices)

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

    # For the executor.

    def on_joined(self, device_id: int) -> None:
        if not self._started:  # A worker has loaded although the start was given up meanwhile.
            return
        self._dispatcher.join(device_id)
        self._observer.on_joined(device_id, self.now_ns())
        is_slot = device_id >= self._executor.num_devices
        kind = DeviceKind.CPU if is_slot else DeviceKind.ACCELERATOR
        room = None if is_slot else self._executor.weights_bytes
        read = tuple(component.digest for component in self._controller.costs.weights.all)  # When it started.
        there = () if room is not None else read
        self._control.handle(DeviceJoined(device_id, self._executor.node(device_id), kind, there, room, read))

    def on_links_changed(self) -> None:
        links = LinksChanged(self._executor.alone, self._executor.is_linking)
        if self._started and not self._stopped and links != self._links:
            self._links = links
            self._control.handle(links)

    def on_lost(self, device_id: int, reason: str) -> None:
        if self._started and device_id in self._dispatcher.up:
            self._dispatcher.lose(device_id, reason)

    def on_fetched(self, origin: int, node: int, num_bytes: int, run_ns: int) -> None:
        if self._started and not self._stopped:
            self._control.handle(StatesFetched(origin, node, num_bytes, run_ns))

    def on_node_leaving(self, node: int, device_ids: Group, reason: str, let_go: Callable[[], None]) -> None:
        if not self._started:
            self._leaving_at_start.append(let_go)  # The node may be measuring.
        elif not self._stopped:
            up = tuple(device_id for device_id in device_ids if device_id in self._dispatcher.up)
            self._dispatcher.cordon(NodeCordoned(node, up, reason), let_go)

    def on_silent(self, nodes: tuple[int, ...]) -> None:
        if self._started and not self._stopped:
            self._control.handle(NodesSilent(nodes))

    def on_node_lost(self, node: int, device_ids: Group, blobs: Collection[StateBlob], reason: str) -> None:
        if self._started and not self._stopped:
            up = tuple(device_id for device_id in device_ids if device_id in self._dispatcher.up)
            self._dispatcher.lose_node(node, up, blobs, reason)

    def on_given_up(self, left: Collection[int]) -> None:
        """Fail the open requests that no worker is left to serve."""
        if not self._started:
            return
        requests = [entry.ticket.request for entry in self._requests]
        unserved = self._controller.costs.pools.unserved({one.pipeline for one in requests}, left)
        for request in requests:
            if request.pipeline in unserved:
                self.cancel(request.uid, "every worker that a stage needs was lost, and none could be started again")

    def on_read(self, read: WeightsRead) -> None:
        if not self._stopped:
            self._control.handle(ComponentsRead(read.read_id, read.is_kept))

    def on_report(self, device_id: int, report: Report) -> None:
        if self._stopped:
            return
        try:
            self._dispatcher.report(device_id, report)
        except Exception as error:  # Of the controller, which has failed then, or of what is known of works in flight.
            self._control.fail(error, report)
            raise
