"""Answers about an engine's devices, models and costs: for status pages, metrics and the descriptions of models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilework.control.controller import Controller
from tilework.core.component import Component, Memory
from tilework.core.model import ModelInfo
from tilework.core.request import DEFAULT_TERMS, Shape
from tilework.core.wire.reports import LoadedModel
from tilework.core.wire.spec import Spec
from tilework.cost.degrees import alone_ns
from tilework.cost.table import CostTable
from tilework.cost.tabled import UnknownCost
from tilework.policy.traits import PlacesStages
from tilework.runtime.encode_cache import EncodeCache
from tilework.runtime.executor import Executor
from tilework.runtime.observer import HeldComponent, Holding, Usage
from tilework.runtime.ticket import Wanted
from tilework.runtime.work_dispatcher import WorkDispatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of the engine right now, without its CPU slots. `num_jobs` are those that have not ended."""

    num_devices: int
    num_devices_up: int
    num_jobs: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineStatus:
    """Answers questions about an engine, and changes nothing.

    `models` are served, by name; `loaded` are those that the start has loaded.
    """

    executor: Executor
    controller: Controller
    dispatcher: WorkDispatcher
    encode_cache: EncodeCache
    models: Mapping[str, ModelInfo]
    loaded: Sequence[LoadedModel]
    now_ns: Callable[[], int]

    def health(self) -> Health:
        return Health(
            num_devices=self.executor.num_devices,
            num_devices_up=sum(device_id < self.executor.num_devices for device_id in self.dispatcher.up),
            num_jobs=self.controller.num_jobs,
        )

    def backlog_ns(self) -> int:
        """Return the predicted device time of the remaining work of open requests, right now."""
        return self.controller.backlog_ns(self.now_ns())

    def usage(self) -> Usage:
        """Return the resources that the engine holds right now; takes time in proportion to the open requests."""
        now_ns = self.now_ns()
        policy = self.controller.policy
        occupancy = self.controller.occupancy(now_ns)
        free = {one.device_id: one.memory.free_bytes for one in self.controller.tracker.devices}
        return Usage(
            waiting=occupancy.waiting,
            running=occupancy.running,
            backlog_ns=occupancy.backlog_ns,
            state_blob_bytes=self.dispatcher.state_bytes,
            encode_cache=self.encode_cache.usage,
            memory_bytes=dict(self.dispatcher.memory_bytes),
            kept=dict(self.dispatcher.kept),
            resident_bytes=self.executor.resident_bytes,
            readings=self.executor.readings,
            bad_reports=self.executor.bad_reports,
            guard=self.controller.guard_counts,
            weights_free_bytes={device_id: size for device_id, size in free.items() if size is not None},
            placements=policy.placement_status(now_ns) if isinstance(policy, PlacesStages) else (),
            cost_deviations=self.controller.costs.deviations,
            margins=self.controller.tracker.margins,
        )

    def holdings(self) -> tuple[Holding, ...]:
        """Return the devices that are up and the weights that they have, accelerators first."""
        tracker = self.controller.tracker
        readings = self.executor.readings
        return tuple(
            Holding(
                device_id=device.device_id,
                node=device.node,
                kind=device.kind,
                total_bytes=device.memory.total_bytes,
                free_bytes=device.memory.free_bytes,
                used_bytes=self.dispatcher.memory_bytes.get(device.device_id),
                components=self._held(device.device_id, device.memory),
                readings=tuple(
                    one for name, one in sorted(readings.items()) if name.partition(".")[0] == str(device.device_id)
                ),
            )
            for device in (*tracker.devices, *tracker.slots)
        )

    def _held(self, device_id: int, memory: Memory) -> tuple[HeldComponent, ...]:
        """Return the components of models that an accelerator serves: all of them, if nothing is loaded on demand."""
        named = self.controller.costs.weights.named
        pools = self.controller.costs.pools
        if device_id >= self.executor.num_devices:
            return ()
        if memory.total_bytes is None:
            return tuple(
                HeldComponent(models=(one.info.name,), name=name, num_bytes=num_bytes)
                for one in self.loaded
                if pools.serves(device_id, one.info.name)
                for name, num_bytes in one.weights.items()
            )
        held = []
        for one in memory.components:
            users = [(model, name) for model, name in named.get(one, ()) if pools.serves(device_id, model)]
            if users:
                models = tuple(model for model, _ in users)
                held.append(HeldComponent(models=models, name=users[0][1], num_bytes=one.num_bytes))
        return tuple(held)

    def cost_table(self) -> CostTable:
        """Return the cost table, corrected by measurements since the start."""
        return self.controller.costs.corrected_table()

    def devices_with(self, model: str) -> tuple[int, ...]:
        """Return the accelerators that have all weights of a model, once their loads are done."""
        tracker = self.controller.tracker
        pools = self.controller.costs.pools
        needed = self._components(model)
        return tuple(
            device.device_id
            for device in tracker.devices
            if pools.serves(device.device_id, model) and device.memory.has(needed)
        )

    def devices_serving(self, model: str) -> tuple[int, ...]:
        """Return the accelerators that may run requests for a model, up or not."""
        pools = self.controller.costs.pools
        return tuple(one for one in range(self.executor.num_devices) if pools.serves(one, model))

    def predicted_sizes(self, model: str) -> tuple[Shape, ...]:
        """Return the sizes of the cost table at which a model was not measured yet."""
        rows = self.controller.costs.table.rows
        return tuple(sorted({row.shape for row in rows if row.pipeline == model and row.is_predicted}))

    def identity(self, model: str, loras: Iterable[str] = ()) -> str:
        """Return the identity of a served model with these of its LoRAs, which does not depend on their names.

        States of one identity cannot be used with another.
        """
        key = self.executor.profile_key(model)
        known = self.controller.costs.table.loras.get(model, {})
        weights = [known[name].component if name in known else None for name in sorted(loras)]
        parts = [key.content, key.dtype, key.libraries, *("" if one is None else one.digest for one in weights)]
        return ", ".join(parts)

    def is_on_host(self, model: str) -> bool:
        """Return whether the host of a node keeps a copy of all weights of a model, from which devices load them."""
        needed = set(self._components(model))
        tracker = self.controller.tracker
        nodes = {device.node for device in tracker.devices}
        return bool(needed) and any(needed <= set(tracker.sources.kept(node)) for node in nodes)

    def _components(self, model: str) -> list[Component]:
        costs = self.controller.costs
        return [one for stage in costs.graph(model).stages for one in costs.weights.components(stage)]

    def alone_ns(self, model: str, specs: Sequence[Spec]) -> int | None:
        """Return how long requests for a model take when nothing else runs and weights are loaded; None if not known.

        They run side by side, as far as there are devices.
        """
        devices = max(1, len(self.devices_serving(model)))
        wanted = Wanted(uid="", model=model, spec=specs[0], arrival_ns=0, deadline_ns=None, terms=DEFAULT_TERMS)
        try:
            one_ns = alone_ns(self.controller.costs, wanted.request(self.models[model]), max(1, devices // len(specs)))
        except UnknownCost:
            return None
        return one_ns * math.ceil(len(specs) / devices)
