"""Measurements beside requests: each takes a turn on devices that the controller gives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from tilework.control.measurements import PATIENCE_NS
from tilework.core.actions import Measure
from tilework.core.component import num_bytes
from tilework.core.cost_row import Batch, CostRow
from tilework.core.events import Event, MeasurementAsked, MeasurementEnded
from tilework.core.lora import UsedLora
from tilework.core.time import NS_PER_S, s_from_ns
from tilework.core.wire.reports import LoadedModel
from tilework.core.work import Group
from tilework.cost.profile import ProfileKey
from tilework.cost.table import CostTable
from tilework.runtime.executor import ExecutorModels, ModelRefused

_log = logging.getLogger(__name__)

FIRST_NS = 5 * NS_PER_S
"""Time for which devices are asked for, beside loads of weights, before any measurement of the model."""
_USUAL_BYTES_PER_S = 1e9
_FACTOR = 2  # The next measurement may take longer than the longest so far by this factor: sizes grow.
_MOST_WAIT_S = 600.0  # For one device, if all are busy with works that keep promises.
_MOST_WAIT_FOR_GROUP_S = 60.0
_MOST_WAIT_FOR_IDLE_S = s_from_ns(PATIENCE_NS) / 2  # After all of it a measurement takes devices that are not idle.

Run = Callable[[Group], Awaitable[tuple[CostRow, ...]]]


class DevicesBusy(RuntimeError):
    """No devices were idle to measure on."""


class DeviceTurns:
    """Runs one measurement at a time on devices that the controller has freed for it.

    `handle` passes events to the controller, `ended` is called when a measurement has ended that had begun.
    """

    def __init__(self, handle: Callable[[Event], object], ended: Callable[[], object]) -> None:
        self._handle = handle
        self._ended = ended
        self._next_id = 1
        self._run: Run | None = None  # Function of the measurement that waits for devices.
        self._begun: asyncio.Future[asyncio.Future[tuple[CostRow, ...]]] | None = None
        self.devices: Group = ()
        """Devices on which it measures now."""

    async def take(self, asked: MeasurementAsked, run: Run, wait_s: float) -> tuple[CostRow, ...] | None:
        """Run a measurement when the controller gives it devices; None if it does not within this time.

        If this is cancelled, it waits for the end of a measurement that has begun: devices cannot be interrupted.

        Raises what `run` raises.
        """
        asked = replace(asked, measurement_id=self._next_id)
        self._next_id += 1
        self._run = run
        begun = asyncio.get_running_loop().create_future()
        self._begun = begun
        self._handle(asked)
        try:
            await asyncio.wait([begun], timeout=wait_s)
            return await asyncio.shield(begun.result()) if begun.done() else None
        finally:
            if not begun.done():
                self._handle(MeasurementEnded(asked.measurement_id))
            elif not begun.result().done():
                await asyncio.wait([begun.result()])

    def begin(self, measure: Measure) -> None:
        """Begin the measurement that waits; it sends its commands to devices at once."""
        assert self._run is not None
        assert self._begun is not None
        self.devices = measure.devices
        running = asyncio.ensure_future(self._run(measure.devices))
        running.add_done_callback(lambda _: self._end(measure.measurement_id, running))
        self._begun.set_result(running)

    def _end(self, measurement_id: int, running: asyncio.Future[tuple[CostRow, ...]]) -> None:
        self.devices = ()
        if not running.cancelled():
            running.exception()  # It may have no reader: see `take`.
        self._handle(MeasurementEnded(measurement_id))
        self._ended()

    def close(self) -> None:
        """Stop waiting for a measurement: its devices are about to be ended."""
        if self._begun is not None and self._begun.done():
            self._begun.result().cancel()


@dataclass(slots=True, kw_only=True)
class TurnMeasurer:
    """A `Measurer` of a model that is added, on devices that also serve others: each batch is a turn.

    `table` has the costs of the models that are served. With `idle_ns` a turn is taken only on idle devices, and that
    is its predicted time.
    """

    turns: DeviceTurns
    executor: ExecutorModels
    model: LoadedModel
    table: CostTable
    idle_ns: int | None = None
    _longest_ns: int = field(default=0, init=False)
    _least_lacking: int | None = field(default=None, init=False)  # The least degree for which there were no devices.

    @property
    def profile_key(self) -> ProfileKey:
        return self.executor.profile_key(self.model.info.name)

    async def calibrate(
        self,
        batches: tuple[Batch, ...],
        degree: int = 1,
        num_runs: int | None = None,
        loras: tuple[UsedLora, ...] = (),
        known: frozenset[str] = frozenset(),
    ) -> tuple[CostRow, ...]:
        """Measure on one group. A degree for which no devices become free has no rows, and one warning says so.

        Raises:
            WorkerStartFailed: a device was lost.
            ModelRefused: no device became available.
            DevicesBusy: no devices were idle.
        """
        name = self.model.info.name
        if self._least_lacking is not None and degree >= self._least_lacking:
            return ()

        def run(devices: Group) -> Awaitable[tuple[CostRow, ...]]:
            return self._timed(self.executor.calibrate(name, batches, degree, num_runs, loras, known, devices))

        wait_s = _MOST_WAIT_S if degree == 1 else _MOST_WAIT_FOR_GROUP_S
        rows = await self.turns.take(
            self._asked(degree, loras), run, wait_s if self.idle_ns is None else _MOST_WAIT_FOR_IDLE_S
        )
        if rows is not None:
            return rows
        if self.idle_ns is not None:
            raise DevicesBusy(f"no {degree} devices were idle together")
        if degree == 1:
            raise ModelRefused(
                f"for {wait_s:g} s no device could measure {name} without breaking a promise to a request; add it when "
                "there is less to do"
            )
        self._least_lacking = degree
        _log.warning(
            "%s was not measured on %d devices, and is served on fewer: they did not become free together in %g s",
            *(name, degree, wait_s),
        )
        return ()

    async def _timed(self, rows: Awaitable[tuple[CostRow, ...]]) -> tuple[CostRow, ...]:
        begin_s = asyncio.get_running_loop().time()
        measured = await rows
        took_s = asyncio.get_running_loop().time() - begin_s
        self._longest_ns = max(self._longest_ns, round(took_s * NS_PER_S))
        return measured

    def _asked(self, degree: int, loras: Sequence[UsedLora]) -> MeasurementAsked:
        """Return what the next measurement needs; `DeviceTurns` numbers it."""
        name = self.model.info.name
        total_bytes = self.executor.weights_bytes
        components = {one for needed in self.model.needed([lora.name for lora in loras]).values() for one in needed}
        declared = max(stage.spec.memory_bytes for stage in self.model.info.graph.stages)
        room_bytes = num_bytes(components) + declared
        if total_bytes is not None and any(row.peak_bytes is not None for row in self.table.rows):
            room_bytes = total_bytes  # Where memory limits works, the need of this one is not known yet.
        first_ns = (self.idle_ns or FIRST_NS) + round(num_bytes(components) / self._load_bytes_per_s * NS_PER_S)
        return MeasurementAsked(
            measurement_id=0,
            pipeline=name,
            degree=degree,
            run_ns=_FACTOR * self._longest_ns or first_ns,
            digests=tuple(sorted(one.digest for one in components)),
            room_bytes=room_bytes,
            devices=self.executor.serving.get(name),
        )

    @property
    def _load_bytes_per_s(self) -> float:
        return min(self.table.load_bytes_per_s.values(), default=_USUAL_BYTES_PER_S)
