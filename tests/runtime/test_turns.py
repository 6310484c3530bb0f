"""Measurements that take turns on devices: when they begin, and how each of them ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from clock import ManualLoop, run
from fake_engine import INFO
from tilework.control.measurements import PATIENCE_NS
from tilework.core.actions import Measure
from tilework.core.component import Component, LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.events import Event, MeasurementAsked, MeasurementEnded
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S
from tilework.core.wire.reports import LoadedModel
from tilework.core.work import Group
from tilework.cost.table import CostTable
from tilework.runtime.executor import ModelRefused, WorkerStartFailed
from tilework.runtime.models.turns import FIRST_NS, DevicesBusy, DeviceTurns, TurnMeasurer

BATCHES = ((Shape(64, 64),),)
MODEL = LoadedModel(info=INFO, components={"vae": Component("vae", 1000)})


class Executor:
    """Measures when a test says so."""

    weights_bytes = 5000
    serving: dict[str, Group] = {INFO.name: (0, 1)}

    def __init__(self) -> None:
        self.asked: list[tuple[int, Group]] = []

    def calibrate(
        self, _model: str, _batches: Any, degree: int, _runs: Any, _loras: Any, _known: Any, devices: Group
    ) -> Awaitable[tuple[CostRow, ...]]:
        self.asked.append((degree, devices))
        self.answer: asyncio.Future[tuple[CostRow, ...]] = asyncio.get_running_loop().create_future()
        return self.answer


class Rig:
    """Turns, with the controller and the executor played by the test."""

    def __init__(self, **known: Any) -> None:
        self.events: list[Event] = []
        self.num_ended = 0
        self.turns = DeviceTurns(self.events.append, self.ended)
        self.executor = Executor()
        self.measurer = TurnMeasurer(
            turns=self.turns,
            executor=self.executor,  # type: ignore[arg-type]
            model=MODEL,
            table=CostTable(hardware="toy", rows=(), **known),
        )

    def ended(self) -> None:
        self.num_ended += 1

    def measure(self, degree: int = 1) -> asyncio.Task[tuple[CostRow, ...]]:
        return asyncio.get_running_loop().create_task(self.measurer.calibrate(BATCHES, degree))

    def last(self) -> MeasurementAsked:
        asked = self.events[-1]
        assert isinstance(asked, MeasurementAsked)
        return asked


def test_it_is_sent_to_its_devices_at_once_and_its_end_is_told() -> None:
    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        measuring = rig.measure()
        await loop.until_idle()
        assert rig.last() == MeasurementAsked(1, INFO.name, 1, FIRST_NS + 1000, ("vae",), 1000, (0, 1))
        rig.turns.begin(Measure(1, (1,)))
        assert rig.executor.asked == [(1, (1,))], "before anything else is sent to the device"
        assert rig.turns.devices == (1,)
        await loop.until_idle()
        loop.advance(7)
        rig.executor.answer.set_result(())
        assert await measuring == ()
        assert rig.events[1:] == [MeasurementEnded(1)]
        assert (rig.turns.devices, rig.num_ended) == ((), 1)
        rig.measure()
        await loop.until_idle()
        assert (rig.last().measurement_id, rig.last().run_ns) == (2, 14 * 10**9), "twice the longest so far"

    run(scenario)


def test_where_memory_limits_works_it_needs_all_of_it() -> None:
    row = CostRow(pipeline="x", stage="vae", height=64, width=64, degree=1, seconds=1.0, peak_bytes=1)

    async def scenario(loop: ManualLoop) -> None:
        rig = Rig(load_bytes_per_s={LoadSource.DISK: 500.0, LoadSource.HOST: 1000.0})
        rig.measurer.table = replace(rig.measurer.table, rows=(row,))
        rig.measure()
        await loop.until_idle()
        assert rig.last().room_bytes == Executor.weights_bytes
        assert rig.last().run_ns == FIRST_NS + 2 * 10**9, "with the load of 1000 bytes from the slowest source"

    run(scenario)


def test_a_lost_worker_ends_it_with_its_reason() -> None:
    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        measuring = rig.measure()
        await loop.until_idle()
        rig.turns.begin(Measure(1, (1,)))
        rig.executor.answer.set_exception(WorkerStartFailed("worker 1 was lost: killed"))
        with pytest.raises(WorkerStartFailed, match="worker 1 was lost"):
            await measuring
        assert rig.events[-1] == MeasurementEnded(1)

    run(scenario)


def test_one_that_is_cancelled_before_it_begins_is_wanted_no_more() -> None:
    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        measuring = rig.measure()
        await loop.until_idle()
        measuring.cancel()
        await loop.until_idle()
        assert measuring.cancelled()
        assert rig.events[-1] == MeasurementEnded(1)

    run(scenario)


def test_one_that_is_cancelled_while_it_runs_keeps_its_devices_until_it_has_ended() -> None:
    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        measuring = rig.measure()
        await loop.until_idle()
        rig.turns.begin(Measure(1, (1,)))
        await loop.until_idle()
        measuring.cancel()
        await loop.until_idle()
        assert not measuring.done(), "another change would measure beside it"
        assert len(rig.events) == 1
        rig.executor.answer.set_result(())
        await loop.until_idle()
        assert measuring.cancelled()
        assert rig.events[-1] == MeasurementEnded(1)

    run(scenario)


def test_a_stop_does_not_wait_for_it() -> None:
    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        measuring = rig.measure()
        await loop.until_idle()
        rig.turns.begin(Measure(1, (1,)))
        await loop.until_idle()
        rig.turns.close()
        await loop.until_idle()
        assert measuring.cancelled()

    run(scenario)


def test_a_degree_without_devices_is_left_out_and_so_are_higher_ones(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        measuring = rig.measure(2)
        await loop.until_idle()
        loop.advance(61)
        assert await measuring == ()
        assert rig.events[-1] == MeasurementEnded(1)
        assert await rig.measure(4) == await rig.measure(2) == ()
        assert len(rig.events) == 2, "nothing is asked for again"

    with caplog.at_level(logging.WARNING, "tilework"):
        run(scenario)
    (line,) = caplog.messages
    assert "was not measured on 2 devices" in line


def test_a_model_for_which_no_device_is_to_be_had_is_refused() -> None:
    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        measuring = rig.measure()
        await loop.until_idle()
        loop.advance(601)
        with pytest.raises(ModelRefused, match="for 600 s no device could measure"):
            await measuring
        assert rig.events[-1] == MeasurementEnded(1)

    run(scenario)


@pytest.mark.parametrize("degree", [1, 2])
def test_what_waits_for_idle_devices_never_takes_others(degree: int) -> None:
    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        rig.measurer.idle_ns = 20 * NS_PER_S
        measuring = rig.measure(degree)
        await loop.until_idle()
        assert rig.last().run_ns == 20 * NS_PER_S + 1000, "as long as it is predicted to take, with the load"
        loop.advance(PATIENCE_NS / NS_PER_S - 0.1)
        await loop.until_idle()
        assert measuring.done()
        with pytest.raises(DevicesBusy):
            await measuring
        assert rig.events[-1] == MeasurementEnded(1), "before the controller takes devices that are not idle"

    run(scenario)
