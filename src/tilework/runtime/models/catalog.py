"""The models that an engine serves, which may change while it serves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from tilework.control.controller import Controller
from tilework.core.events import Event, ModelRemoved, ModelServed
from tilework.core.lora import Lora
from tilework.core.model import LoraSource, ModelInfo, ModelSource, NewModel, NotServed
from tilework.core.request import Request
from tilework.core.time import ns_from_s
from tilework.core.wire.reports import LoadedModel
from tilework.cost.table import CostTable, only
from tilework.cost.table_file import table_json
from tilework.runtime.executor import ExecutorModels, ModelRefused, WorkerStartFailed, name_taken
from tilework.runtime.models.calibration_weights import lacks_room
from tilework.runtime.models.measuring import Measuring
from tilework.runtime.models.model_costs import ModelCosts, Part
from tilework.runtime.models.turns import DevicesBusy, DeviceTurns, TurnMeasurer

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_PAUSE_S, _MOST_PAUSE_S = 5.0, 300.0  # Pauses between measurements that the start has left: devices are for requests.
MOST_BESIDE_S = 60.0
"""Longest measurement beside requests, which wait for it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Catalog:
    """Models by name, in `infos`, and how they change: one after another, each completely or not at all.

    All that a change needs is read, built and checked while everything is served as before, and undone if that fails.
    Then one event makes the change for the controller.

    The models of `not_served` could not run at the start. `usual` has the settings for further models. `handle` passes
    events to the controller, `requests` are the open ones. Measurements take `turns` on devices.
    """

    infos: dict[str, ModelInfo]
    not_served: dict[str, NotServed] = field(default_factory=dict)
    loaded: list[LoadedModel]
    executor: ExecutorModels
    usual: ModelSource
    controller: Controller
    measuring: Measuring
    handle: Callable[[Event], object]
    requests: Callable[[], Iterable[Request]]
    turns: DeviceTurns
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def add(
        self, new: NewModel, *, measure: bool, check_name: Callable[[str], object] = lambda _name: None
    ) -> ModelInfo:
        """Serve another model.

        `check_name` may refuse its name by an exception of its own. It is called while no other change is made: with
        the requested name, "" if that is left to the model's files, and with the name that the files give.

        The costs of its requests must be known, from an earlier start or from a model that differs in its weights
        alone; and the speed of loading weights, from any model that has some. Otherwise they are measured if that is
        allowed, beside the requests: on devices that are idle, and that no promise needs meanwhile.

        Raises:
            ModelRefused: it cannot be served.
        """
        async with self._lock:
            self._check_on_demand("A model")
            self._check_new(new.name)
            check_name(new.name)
            source = replace(
                self.usual, path=new.path, name=new.name, dtype=new.dtype or self.usual.dtype, loras=new.loras
            )
            model = await self.executor.read_model(source, set(self.infos))
            name = model.info.name
            try:
                check_name(name)
                self._serve(await self._added(model, replace(source, name=name), measure=measure))
            except BaseException:
                self.executor.remove_model(name)
                raise
            self.infos[name] = model.info
            self.not_served.pop(name, None)
            self.loaded.append(model)
            return model.info

    async def _added(self, model: LoadedModel, source: ModelSource, *, measure: bool) -> CostTable:
        """Return the costs of requests for a model that was read; workers serve it then."""
        self._check_room(model)
        table = self.controller.costs.table
        part = self.measuring.known(model, self.loaded, table)
        lacks_speeds = self.measuring.lacks_speeds(table, model)
        if (part is None or lacks_speeds) and not measure:
            what = f"the cost of requests for {source.name}" if part is None else "the speed of loading weights"
            raise ModelRefused(f"{what} is not known here; set measure to true, or start a server with it once")
        await self.executor.add_model(source)
        return part if part is not None and not lacks_speeds else await self._measured(model, part)

    async def measure_left(self) -> None:
        """Measure what the start has left, on devices that are idle, and use each time as soon as it is known.

        Models that have gone, and measurements longer than `MOST_BESIDE_S`, are left to the next start.
        """
        left = [each for one, costs in self.measuring.left for each in _short(one, costs)]
        pause_s = _PAUSE_S
        while left:
            again: list[tuple[LoadedModel, ModelCosts, Part]] = []
            for each in left:
                await asyncio.sleep(pause_s)
                if not await self._measure_left(*each):
                    again.append(each)
            pause_s = _PAUSE_S if len(again) < len(left) else min(2 * pause_s, _MOST_PAUSE_S)
            left = again

    async def _measure_left(self, model: LoadedModel, costs: ModelCosts, part: Part) -> bool:
        """Measure a part if devices are idle; returns whether it need not be tried again."""
        async with self._lock:
            if not any(one is model for one in self.loaded):
                return True
            measurer = TurnMeasurer(
                turns=self.turns,
                executor=self.executor,
                model=model,
                table=self.controller.costs.table,
                idle_ns=ns_from_s(2 * costs.measuring_s(part)),
            )
            try:
                await costs.measure(measurer, (part,))
            except (DevicesBusy, WorkerStartFailed):
                return False
            table = costs.table()
            assert table is not None  # The model was served by a table.
            for other in self.loaded:
                if self.measuring.alike(other, model):
                    self._serve(self._with_rows(other.info.name, table))
            return True

    def _with_rows(self, name: str, measured: CostTable) -> CostTable:
        """Return the costs by which a model is served, with the rows that were measured of a similar one."""
        known = only(self.controller.costs.table, name)
        return replace(known, slo_s={}, rows=tuple(replace(row, pipeline=name) for row in measured.rows))

    async def remove(self, name: str) -> None:
        """Stop serving a model: new requests for it are refused at once, and this waits for the open ones.

        Raises:
            ModelRefused: it is the last model, or has gone meanwhile.
        """
        async with self._lock:
            self._check_on_demand("A model")
            self._served(name)
            if len(self.infos) == 1:
                raise ModelRefused(f"{name} is the only model; add another one first")
            before = dict(self.infos)
            del self.infos[name]
            await self._ended_or_as(before, lambda one: one.pipeline == name)
            self.loaded = [one for one in self.loaded if one.info.name != name]
            self.handle(ModelRemoved(name))
            self.executor.remove_model(name)

    async def add_lora(self, model: str, source: LoraSource) -> None:
        """Let requests for a model use another LoRA. Raises ModelRefused."""
        async with self._lock:
            self._check_on_demand("A LoRA")
            info = self._served(model)
            if source.name in info.loras:
                raise ModelRefused(f"{model} has a LoRA {source.name} already; remove it first")
            lora = await self.executor.add_lora(model, source)
            known = self.controller.costs.table.loras.get(model, {})
            slowdown = max((one.slowdown for one in known.values()), default=1.0)
            try:
                self._change_loras(model, {**known, source.name: replace(lora, slowdown=slowdown)})
            except BaseException:
                self.executor.remove_lora(model, source.name)
                raise

    async def remove_lora(self, model: str, name: str) -> None:
        """Stop letting requests use a LoRA: new ones are refused at once, and this waits for open ones.

        Raises ModelRefused.
        """
        async with self._lock:
            self._check_on_demand("A LoRA")
            info = self._served(model)
            before = dict(self.infos)
            self.infos[model] = replace(info, loras=tuple(one for one in info.loras if one != name))
            await self._ended_or_as(before, partial(_uses, model, name))
            known = self.controller.costs.table.loras.get(model, {})
            self._change_loras(model, {one: lora for one, lora in known.items() if one != name})
            self.executor.remove_lora(model, name)

    async def _measured(self, model: LoadedModel, known: CostTable | None) -> CostTable:
        """Return the costs of a model that workers have, measured as far as they are not known."""
        measurer = TurnMeasurer(
            turns=self.turns, executor=self.executor, model=model, table=self.controller.costs.table
        )
        part = await self.measuring.added(model, known, measurer)
        return self.measuring.part(self.controller.costs.table, model, part)

    async def _ended(self, concerns: Callable[[Request], bool]) -> None:
        """Wait until no such request is open."""
        while any(map(concerns, self.requests())):
            await asyncio.sleep(_POLL_S)

    async def _ended_or_as(self, before: Mapping[str, ModelInfo], concerns: Callable[[Request], bool]) -> None:
        """Wait until no such request is open. If the wait is cancelled, restore what was served `before`."""
        try:
            await self._ended(concerns)
        except BaseException:
            self.infos.clear()
            self.infos.update(before)
            raise

    def _change_loras(self, model: str, loras: Mapping[str, Lora]) -> None:
        known = only(self.controller.costs.table, model)
        self._serve(replace(known, slo_s={}, loras={model: loras} if loras else {}))
        self.infos[model] = replace(self.infos[model], loras=tuple(sorted(loras)))

    def _serve(self, part: CostTable) -> None:
        """Let the controller serve by these costs, of one pipeline, from now on.

        Raises ModelRefused if it could not; the controller is unchanged then.
        """
        served = ModelServed(json.dumps(table_json(part)))
        try:
            self.controller.check(served)
        except Exception as error:
            (name,) = part.pipelines
            _log.exception("%s cannot be served by its costs", name)
            raise ModelRefused(f"the costs of requests for {name} cannot be used: {error}") from error
        self.handle(served)

    def _check_on_demand(self, what: str) -> None:
        if self.executor.weights_bytes is None:
            raise ModelRefused(
                f"{what} can be added and removed only where weights are loaded on demand; start the server with "
                "--weights-memory"
            )

    def _served(self, name: str) -> ModelInfo:
        """Return a model that may have gone while an earlier change was made. Raises ModelRefused."""
        if name not in self.infos:
            raise ModelRefused(f"{name} is no longer served")
        return self.infos[name]

    def _check_new(self, name: str) -> None:
        if name in self.infos:
            raise ModelRefused(name_taken(name))

    def _check_room(self, model: LoadedModel) -> None:
        if reason := lacks_room(model, self.executor.weights_bytes):
            raise ModelRefused(reason)


def _short(model: LoadedModel, costs: ModelCosts) -> Iterator[tuple[LoadedModel, ModelCosts, Part]]:
    """Yield the missing parts of a model that are short enough to measure beside requests; a warning counts others."""
    times_s = {part: costs.measuring_s(part) for part in costs.missing}
    yield from ((model, costs, part) for part, takes_s in times_s.items() if takes_s <= MOST_BESIDE_S)
    long_s = [takes_s for takes_s in times_s.values() if takes_s > MOST_BESIDE_S]
    if long_s:
        _log.warning(
            "%s: %d of %d measurements take more than %.0f s (%.0f s together), too long beside requests, so these "
            "costs stay predicted; start with a longer --measure-seconds, or run `tilework profile`",
            *(model.info.name, len(long_s), costs.num_all, MOST_BESIDE_S, sum(long_s)),
        )


def _uses(model: str, lora: str, request: Request) -> bool:
    return request.pipeline == model and lora in [one.name for one in request.loras]
