"""Costs of models on these devices: measured when the engine starts, and known or measured for an added model."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tilework.core.component import LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.lora import Lora
from tilework.core.model import ModelInfo, NotServed
from tilework.core.wire.reports import LoadedModel, NotLoaded
from tilework.cost.rows import missing_batches, row_key
from tilework.cost.table import CostTable, graphs_of, merged, only, renamed
from tilework.runtime.executor import CannotRun, ExecutorModels, ModelRefused, WorkerStartFailed
from tilework.runtime.models.calibration_weights import lacks_room
from tilework.runtime.models.costs import (
    LORA_ROUNDS,
    CostCache,
    Measurer,
    ModelMeasurer,
    calibration_shapes,
    earlier_costs,
    lora_batch,
    lora_slowdown,
    warm_up,
)
from tilework.runtime.models.model_costs import ModelCosts, Part

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Measuring:
    """Measures models; with `exact` neither groups nor batches. `show` is called with a text about its activity.

    A start with `require_all` fails if one of its models cannot run; otherwise it serves the others, and `not_served`
    has the reasons of those that it does not serve, by name. `first_ns` is the time that models took to run at their
    first sizes, which includes compiling and recording.

    A start begins no measurement that would end later than `most_s` after the first one began, as far as that can be
    predicted. What it has not measured is `left`, and its models are served by times predicted from what it has
    measured.
    """

    executor: ExecutorModels
    num_devices: int
    cache: CostCache | None
    exact: bool
    show: Callable[[str], None]
    require_all: bool = False
    most_s: float = math.inf
    now_s: Callable[[], float] = time.monotonic
    not_served: dict[str, NotServed] = field(default_factory=dict, init=False)
    first_ns: int = field(default=0, init=False)
    left: list[tuple[LoadedModel, ModelCosts]] = field(default_factory=list, init=False)
    _tried: dict[str, tuple[CostRow, ...]] = field(default_factory=dict, init=False)

    async def start(
        self, loaded: Sequence[LoadedModel], not_loaded: Sequence[NotLoaded], given: CostTable | None
    ) -> tuple[list[LoadedModel], CostTable]:
        """Return the models of a start that can run, and their costs: those of the `given` table, or measured ones.

        Other models were `not_loaded`. Each model is tried before the first is measured, which takes far longer. With a
        given table nothing is run.

        Raises WorkerStartFailed if none can run, or not all that are required.
        """
        self.not_served |= {
            one.name: NotServed(name=one.name, reason=f"it cannot be loaded ({one.reason})", is_first=one.place == 0)
            for one in not_loaded
        }
        first = None if any(one.is_first for one in self.not_served.values()) else loaded[0]
        reasons = {one.info.name: lacks_room(one, self.executor.weights_bytes) for one in loaded}
        if given is None and not (self.not_served and self.require_all):
            await self._try([one for one in loaded if not reasons[one.info.name]], reasons)
        for one in loaded:
            name = one.info.name
            if reasons[name]:
                self.not_served[name] = NotServed(name=name, reason=reasons[name], is_first=one is first, info=one.info)
        served = [one for one in loaded if not reasons[one.info.name]]
        if not served or (self.not_served and self.require_all):
            raise WorkerStartFailed(self._told(len(loaded) + len(not_loaded)))
        for refused in self.not_served.values():
            _log.error("%s is not served, and others are: %s", refused.name, refused.reason)
        return served, await (self.table(served) if given is None else self.completed(given, served))

    async def _try(self, models: Sequence[LoadedModel], reasons: dict[str, str]) -> None:
        """Run each at its smallest size, and set the `reasons` of those that run at none.

        Of models that differ in their weights alone, only the first that runs is tried.
        """
        has_run: list[LoadedModel] = []
        for number, one in enumerate(models, 1):
            if any(self.alike(one, other) for other in has_run):
                continue
            self.show(f"trying {one.info.name}, {number} of {len(models)}" if len(models) > 1 else "trying the model")
            begin_ns = time.monotonic_ns()
            try:
                self._tried[one.info.name] = await warm_up(self._measurer(one), one.info)
                has_run.append(one)
            except CannotRun as error:
                reasons[one.info.name] = str(error)
            self.first_ns += time.monotonic_ns() - begin_ns

    def _told(self, num_models: int) -> str:
        """Return why a start fails."""
        if len(self.not_served) == num_models > 1:
            return "no model can run here: " + "; ".join(
                f"{name}: {one.reason}" for name, one in self.not_served.items()
            )
        told = "; ".join(f"{name} cannot run here: {one.reason}" for name, one in self.not_served.items())
        return told if num_models == 1 else f"{told}; leave out --require-all to serve the others"

    async def table(self, loaded: Sequence[LoadedModel]) -> CostTable:
        """Return the costs of models that can run. Of those that differ in their weights alone, the first is measured.

        A stage that several models have is measured for the first of them (`LoadedModel.stage_keys`).

        Raises WorkerStartFailed.
        """
        ends_s = self.now_s() + self.most_s
        measured = await self._measure_in_turn(loaded, ends_s)
        tables: list[CostTable] = []
        for one in loaded:
            costs = next(costs for other, costs in measured if self.alike(one, other))
            table = await self._table_of(costs)
            takes_s = LORA_ROUNDS * costs.measuring_s((lora_batch(one.info), 1))
            has_time = self.now_s() + takes_s < ends_s
            if one.loras and not has_time:
                _log.warning(
                    "%s: the cost of its LoRAs is not measured; steps with them are predicted as without", one.info.name
                )
            tables.append(await self._like(one, table, measures_loras=has_time))
        speeds = await self.executor.end_calibration()
        return replace(merged(tables), load_bytes_per_s=speeds)

    async def _measure_in_turn(
        self, loaded: Sequence[LoadedModel], ends_s: float
    ) -> list[tuple[LoadedModel, ModelCosts]]:
        """Return the costs of the first of models that are alike; the smallest sizes of all are measured first."""
        costs: list[tuple[LoadedModel, ModelCosts]] = []
        for one in loaded:
            if not any(self.alike(one, other) for other, _ in costs):
                costs.append((one, self._begun(one, self._measurer(one))))
        self._show_plan([each for _, each in costs])

        def may_begin(each: ModelCosts, is_first: bool, part: Part) -> bool:
            if is_first and part[0] != (calibration_shapes(each.info)[0],):
                return False
            return self.now_s() + each.measuring_s(part) < ends_s

        for is_first in (True, False) if len(costs) > 1 else (False,):
            for place, (one, each) in enumerate(costs):
                each.shared = _shared(one, costs[:place])
                shown = one.info.name if len(loaded) > 1 else ""
                await self._measure(each, self._measurer(one), shown, partial(may_begin, each, is_first))
        self.left = [(one, each) for one, each in costs if each.missing]
        return costs

    async def _table_of(self, costs: ModelCosts) -> CostTable:
        """Return the table of a model's costs. Raises WorkerStartFailed if the model runs at no size."""
        if (table := costs.table()) is None:
            sizes = ", ".join(map(str, calibration_shapes(costs.info)))
            raise WorkerStartFailed(f"{costs.info.name} ran at none of {sizes}; the log says why")
        return table

    def _begun(self, model: LoadedModel, measurer: Measurer) -> ModelCosts:
        name = model.info.name
        degrees = self._degrees(model.info)
        tried = self._tried.get(name, ())
        return ModelCosts.of(measurer, model.info, degrees, self.cache, with_batches=not self.exact, tried=tried)

    def _show_plan(self, costs: Sequence[ModelCosts]) -> None:
        """Show how long measuring takes, if there is something to measure and the time is limited."""
        takes_s = sum(each.measuring_s(part) for each in costs for part in each.missing)
        if takes_s and self.most_s < math.inf:
            text = f"measuring the cost of steps here takes about {takes_s:.0f} s"
            if takes_s > self.most_s:
                text += f": it ends after at most {self.most_s:.0f} s, and the rest is measured when devices are idle"
            self.show(text)

    async def completed(self, table: CostTable, loaded: Sequence[LoadedModel]) -> CostTable:
        """Return a given table, completed by the measured speed of loading weights, where requests need that."""
        if self.executor.weights_bytes is None or LoadSource.DISK in table.load_bytes_per_s:
            return table
        self.show("measuring the speed of loading weights here")
        for one in loaded:
            await self.executor.calibrate(one.info.name, ())  # Its weights are loaded, and nothing is run.
        speeds = await self.executor.end_calibration()
        return replace(table, load_bytes_per_s={**speeds, **table.load_bytes_per_s})

    async def _like(self, model: LoadedModel, table: CostTable, *, measures_loras: bool) -> CostTable:
        """Return the costs of a model that differs only in its weights and LoRAs from the one of this table."""
        info = model.info
        ours = replace(renamed(table, info.name), graphs=graphs_of(info.graph), loras={})
        if not model.loras:
            return ours
        loras = await self._measured_loras(model, self._measurer(model)) if measures_loras else model.loras
        return replace(ours, loras={info.name: loras})

    def _measurer(self, model: LoadedModel) -> Measurer:
        """Return a measurer of a model on all devices at once, which do nothing else yet."""
        return ModelMeasurer(self.executor, model.info.name)

    async def added(self, model: LoadedModel, known: CostTable | None, measurer: Measurer) -> CostTable:
        """Return the costs of a model that workers have just received, and the speed of loading its weights.

        If its costs are `known`, only that speed is measured. Raises ModelRefused.
        """
        try:
            if known is not None:
                await measurer.calibrate(())
            if known is None:
                await warm_up(measurer, model.info)
            table = known or await self._measured(model, measurer)
        except CannotRun as error:
            raise ModelRefused(f"{model.info.name} cannot run here: {error}") from error
        except WorkerStartFailed as error:
            raise ModelRefused(f"a worker was lost while {model.info.name} was measured: {error}") from error
        finally:
            speeds = await self.executor.end_calibration()
        if table is None:
            raise ModelRefused(f"{model.info.name} ran at none of its usual sizes; the log says why")
        return replace(table, load_bytes_per_s=speeds)

    def lacks_speeds(self, table: CostTable, model: LoadedModel) -> bool:
        """Return whether a model is the first that has weights, so that their speed of loading is unknown."""
        return bool(model.components) and LoadSource.DISK not in table.load_bytes_per_s

    async def _measured(self, model: LoadedModel, measurer: Measurer) -> CostTable | None:
        """Return a model's costs when all missing parts have been measured; None if it runs at no size."""
        costs = self._begun(model, measurer)
        await self._measure(costs, measurer, model.info.name)
        table = costs.table()
        if table is None or not model.loras:
            return table
        return replace(table, loras={model.info.name: await self._measured_loras(model, measurer)})

    def _degrees(self, info: ModelInfo) -> tuple[int, ...]:
        """Return powers of two, as policies use them; 1 if all requests are exact."""
        num_devices = len(self.executor.serving.get(info.name, range(self.num_devices)))
        most = 1 if self.exact else min(info.max_degree, num_devices)
        return tuple(1 << power for power in range(most.bit_length()))

    async def _measured_loras(self, model: LoadedModel, measurer: Measurer) -> Mapping[str, Lora]:
        """Return the LoRAs of a model. The factor by which they slow steps is measured with the largest one."""
        name = max(model.loras, key=lambda one: (_size(model.loras[one]), one))
        limit = self.executor.weights_bytes
        if limit is not None and model.largest_stage((name,))[1] > limit:
            return model.loras  # It does not fit in beside the stage that it changes, so no request will use it.
        self.show(f"{model.info.name}: measuring the cost of a LoRA")
        slowdown = await lora_slowdown(measurer, model.info, name)
        return {one: replace(lora, slowdown=slowdown) for one, lora in model.loras.items()}

    def known(self, model: LoadedModel, others: Sequence[LoadedModel], table: CostTable) -> CostTable | None:
        """Return the costs of a model that was measured at an earlier start, or is like one of `others`; else None."""
        info = model.info
        for other in others:
            if self.alike(model, other):
                return self.part(table, model, renamed(only(table, other.info.name), info.name))
        known = earlier_costs(self.cache, self.executor.profile_key(info.name), info.graph)
        singles = tuple((shape,) for shape in calibration_shapes(info))
        if known is None or missing_batches(known.rows, info.graph, singles, 1):
            return None
        return self.part(table, model, known)

    def part(self, table: CostTable, model: LoadedModel, costs: CostTable) -> CostTable:
        """Return the part of a table of all models for one with these costs; the speed of loading from either."""
        name = model.info.name
        assert set(costs.pipelines) == {name}, f"costs of {costs.pipelines} are not those of {name}"
        slowdown = max((one.slowdown for one in costs.loras.get(name, {}).values()), default=1.0)
        loras = {one: replace(lora, slowdown=slowdown) for one, lora in model.loras.items()}
        return replace(
            table,
            rows=costs.rows,
            sources=costs.sources,
            slo_s={},
            batch_models=costs.batch_models,
            graphs={name: model.info.graph},
            components={name: model.components},
            loras={name: loras} if loras else {},
            devices={},
            load_bytes_per_s={**costs.load_bytes_per_s, **table.load_bytes_per_s},
        )

    def alike(self, one: LoadedModel, other: LoadedModel) -> bool:
        """Return whether two models have the same costs."""
        return _are_alike(one, other) and self._degrees(one.info) == self._degrees(other.info)

    async def _measure(
        self,
        costs: ModelCosts,
        measurer: Measurer,
        shown: str,
        may_begin: Callable[[Part], bool] = lambda _part: True,
    ) -> None:
        """Measure the missing parts of a model; each part is left out if it may not begin at its turn."""
        show = partial(self._show_measuring, shown, costs)
        show()
        await costs.measure(measurer, filter(may_begin, costs.missing), show)

    def _show_measuring(self, model: str, costs: ModelCosts) -> None:
        if costs.num_all:
            what = f"measuring the cost of steps here, {costs.num_all - len(costs.missing)} of {costs.num_all}"
            self.show(f"{model}: {what}" if model else what)


def _shared(model: LoadedModel, others: Sequence[tuple[LoadedModel, ModelCosts]]) -> tuple[CostRow, ...]:
    """Return the measured rows of stages of a model that others have as well."""
    found: dict[tuple[object, ...], CostRow] = {}
    for other, costs in others:
        stages = {key: stage for stage, key in other.stage_keys.items()}
        theirs = {stages[key]: stage for stage, key in model.stage_keys.items() if key in stages}
        for row in costs.measured:
            if row.stage in theirs:
                ours = replace(row, pipeline=model.info.name, stage=theirs[row.stage])
                found.setdefault(row_key(ours), ours)
    return tuple(found.values())


def _are_alike(one: LoadedModel, other: LoadedModel) -> bool:
    """Return whether two models differ in their weights alone, so that they take the same time."""
    keys = [(each.architecture, each.info.dtype, each.info.library) for each in (one, other)]
    return keys[0] == keys[1]


def with_weights(
    table: CostTable, loaded: Sequence[LoadedModel], memory_bytes: int | None, host_bytes: int | None = None
) -> CostTable:
    """Return the table with the models' weights: all of them if they are loaded on demand, else which LoRAs they have.

    Weights are loaded on demand where a device has `memory_bytes` for them; its host keeps `host_bytes`.
    """
    on_demand = memory_bytes is not None
    if not on_demand and not any(one.loras for one in loaded):
        return table
    return replace(
        table,
        graphs={one.info.name: one.info.graph for one in loaded},  # Their stages name the components.
        components={one.info.name: one.components for one in loaded} if on_demand else {},
        loras={one.info.name: _with_slowdown(table, one, on_demand=on_demand) for one in loaded if one.loras},
        memory_bytes=memory_bytes,
        host_bytes=host_bytes,
    )


def _with_slowdown(table: CostTable, model: LoadedModel, *, on_demand: bool) -> Mapping[str, Lora]:
    """Return the LoRAs of a model, with the slowdowns of the table, whose other data may be of other files."""
    known = table.loras.get(model.info.name, {})
    return {
        name: replace(
            lora,
            component=lora.component if on_demand else None,
            slowdown=known[name].slowdown if name in known else lora.slowdown,
        )
        for name, lora in model.loras.items()
    }


def name_refused(loaded: Sequence[LoadedModel]) -> None:
    """Warn of LoRAs that requests for no model may use; a LoRA that fits another model is no mistake."""
    usable = {name for one in loaded for name in one.loras}
    refused = {name: reason for one in loaded for name, reason in one.refused.items() if name not in usable}
    for name, reason in refused.items():
        _log.warning("no request can use the LoRA %s: %s", name, reason)


def _size(lora: Lora) -> int:
    return 0 if lora.component is None else lora.component.num_bytes
