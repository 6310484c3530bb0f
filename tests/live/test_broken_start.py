"""Starts with one broken worker of four, whose groups talk as with NCCL: the others do not wait for it for ever.

And a start with one broken model of two: the other is served.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from runtime.test_worker_process import Listener
from tilework.core.cost_row import CostRow
from tilework.core.model import ModelSource
from tilework.core.request import Shape, Status
from tilework.core.wire.commands import Calibrate, EnterNode
from tilework.core.work import Group
from tilework.pipelines.model_index import shipped_directory
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.links import communicator
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.models import calibration, catalog
from tilework.runtime.outbox import Outgoing
from waiting import until

pytestmark = pytest.mark.slow
SHAPES = ModelSource(path="shapes")
BROKEN, ABSENT = 2, 9


class OneBroken(LocalExecutor):
    """One worker cannot run what groups measure: it fails before its first message, or stands still."""

    stands_still = False

    def send(self, device_id: int, outgoing: Outgoing) -> None:
        if isinstance(outgoing, Calibrate) and outgoing.group is not None and device_id == BROKEN:
            if self.stands_still:
                stop(self, BROKEN, signal.SIGSTOP)
            outgoing = replace(outgoing, batches=((Shape(-64, 64),),))
        super().send(device_id, outgoing)


class OneModelBroken(LocalExecutor):
    """The workers cannot run a model, whatever they are to measure of it."""

    def send(self, device_id: int, outgoing: Outgoing) -> None:
        if isinstance(outgoing, Calibrate) and outgoing.model == "broken":
            outgoing = replace(outgoing, batches=((Shape(-64, 64),),))
        super().send(device_id, outgoing)


class OneLost(LocalExecutor):
    """A worker is lost while it measures what the start has left."""

    num_lost = 0

    def _calibrate_on(self, devices: Group, command: Calibrate) -> Awaitable[tuple[CostRow, ...]]:
        rows = super()._calibrate_on(devices, command)
        if self.num_lost == 0:
            self.num_lost = 1
            stop(self, devices[0], signal.SIGKILL)
        return rows


class OneFrozen(LocalExecutor):
    """One worker stands still when the node is to form."""

    async def _form_groups(self) -> None:
        stop(self, BROKEN, signal.SIGSTOP)
        await super()._form_groups()


class OneDeaf(LocalExecutor):
    """One worker comes to another meeting than the others, until that is mended."""

    is_mended = False

    def _send(self, worker_id: int, outgoing: Outgoing) -> None:
        if isinstance(outgoing, EnterNode) and worker_id == BROKEN and not self.is_mended:
            meeting = Path(self._rendezvous.address) / str(outgoing.node.group_id)
            meeting.mkdir(exist_ok=True)
            for come in (BROKEN, ABSENT):  # So that all of both meetings have come, and none can connect.
                (meeting / f"device-{come}").touch()
            outgoing = EnterNode(replace(outgoing.node, devices=(BROKEN, ABSENT)))
        super()._send(worker_id, outgoing)


def stop(executor: LocalExecutor, device_id: int, number: signal.Signals) -> None:
    pid = executor.pids.get(str(device_id))
    assert pid is not None
    os.kill(pid, number)


async def restarted(executor: LocalExecutor) -> None:
    """Until the only worker, or cell, is lost and up again."""
    await until(lambda: not executor.devices_up)
    await until(lambda: bool(executor.devices_up))


def config(**options: Any) -> LocalConfig:
    return LocalConfig(num_workers=4, sources=(SHAPES,), collectives="gloo", stop_grace_s=0.5, **options)


async def draws(engine: Engine, uid: str) -> set[int]:
    """On how many devices its steps ran."""
    answer = engine.submit({uid: tiny.spec(height=64, width=64, steps=4)})
    assert isinstance(answer, tuple), answer
    outcome = await answer[0].outcome
    assert outcome.status is Status.DONE, outcome.reason
    return {len(segment.devices) for segment in outcome.segments}


@pytest.mark.parametrize("stands_still", [False, True], ids=["fails", "stands still"])
def test_a_worker_that_cannot_measure_in_a_group_ends_that_for_its_group_alone(
    stands_still: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By gloo and NCCL the others waited for ever. One that does not even answer then is lost, as the start says."""
    monkeypatch.setattr(calibration, "LEAST_S", 3.0)
    monkeypatch.setattr("tilework.runtime.local_executor.LEAST_S", 3.0)
    monkeypatch.setattr(calibration, "_END_S", 1.0)

    async def start() -> None:
        executor = OneBroken(config())
        executor.stands_still = stands_still
        engine = await EngineStart(EngineConfig(), executor).start()
        try:
            assert 1 in await draws(engine, "alone")
        finally:
            await engine.stop()

    if stands_still:
        with pytest.raises(WorkerStartFailed, match=f"worker {BROKEN} .*did not end a measurement"):
            asyncio.run(start())
        assert "worker 2 did not answer within" in caplog.text or "workers 2, 3 did not answer within" in caplog.text
        return
    asyncio.run(start())
    (said,) = {line for line in caplog.text.splitlines() if "devices 2, 3 are not measured together" in line}
    assert "64x-64 cannot run here" in said or "-64x64 cannot run here" in said


def test_a_worker_that_stands_still_is_named_by_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others form groups without it, and do not wait for what it is to measure alone."""
    monkeypatch.setattr(calibration, "LEAST_S", 2.0)
    monkeypatch.setattr(calibration, "_END_S", 0.5)
    monkeypatch.setattr(communicator, "_COME_S", 0.5)

    async def start() -> None:
        executor = OneFrozen(config())
        await EngineStart(EngineConfig(), executor).start()

    with pytest.raises(WorkerStartFailed, match=f"worker {BROKEN} .*did not end a measurement within"):
        asyncio.run(start())
    assert f"workers {BROKEN} do not answer; others form groups without them" in caplog.text


def test_workers_that_cannot_talk_serve_each_request_on_one_device(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with wrong settings of a host, until someone mends them."""
    monkeypatch.setattr(communicator, "_AGAIN_S", 0.2)

    async def start() -> None:
        executor = OneDeaf(config(link_timeout_s=1.0))
        engine = await EngineStart(EngineConfig(), executor).start()
        try:
            assert executor.alone == (0, 1, 2, 3)
            assert await draws(engine, "alone") == {1}
            executor.is_mended = True
            await until(lambda: not executor.alone)
        finally:
            await engine.stop()

    asyncio.run(start())
    assert "the workers could not connect within 1 s" in caplog.text
    assert "serve each request on one device: worker" in caplog.text
    assert "was lost" not in caplog.text


def test_a_worker_that_is_lost_while_it_measures_beside_requests_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice: that loss must not be taken for the end of the start."""
    monkeypatch.setattr(catalog, "_PAUSE_S", 0.01)

    async def start() -> None:
        executor = OneLost(LocalConfig(num_workers=1, sources=(SHAPES,), stop_grace_s=0.5, restart_delay_s=0.05))
        engine = await EngineStart(EngineConfig(measure_s=0.0), executor).start()
        try:
            await until(lambda: executor.num_lost == 1)
            await restarted(executor)
            assert await draws(engine, "first") == {1}
            stop(executor, 0, signal.SIGKILL)
            await restarted(executor)
            assert await draws(engine, "second") == {1}
        finally:
            await engine.stop()

    asyncio.run(start())


def test_cells_do_not_start_without_a_communicator() -> None:
    async def start() -> None:
        said = r"cell cannot talk to each other: worker \d: the workers (could not|have connected, but)"
        with pytest.raises(WorkerStartFailed, match=said):
            await OneDeaf(config(link_timeout_s=1.0, weights_bytes=10**9, cell_size=2)).start(Listener())

    asyncio.run(start())


def test_a_model_that_cannot_run_is_left_out_and_workers_forget_it(caplog: pytest.LogCaptureFixture) -> None:
    async def start() -> None:
        sources = (replace(SHAPES, name="broken"), replace(SHAPES, name="good"))
        executor = OneModelBroken(LocalConfig(num_workers=1, sources=sources, stop_grace_s=0.5, restart_delay_s=0.05))
        engine = await EngineStart(EngineConfig(), executor).start()
        try:
            assert list(engine.models) == ["good"]
            (refused,) = engine.not_served.values()
            assert refused.is_first
            assert refused.reason.startswith("64x-64 cannot run here (")
            assert await draws(engine, "first") == {1}
            pid = executor.pids.get("0")
            executor.kill(0, "a test")
            await until(lambda: executor.pids.get("0") not in (None, pid) and bool(executor.devices_up))
            assert [one.name for one in executor._started_with[0]] == ["good"]  # type: ignore[union-attr]
            assert await draws(engine, "second") == {1}
        finally:
            await engine.stop()

    asyncio.run(start())
    assert [line for line in caplog.messages if "broken is not served, and others are: 64x-64" in line]


@pytest.fixture
def damaged(tmp_path: Path) -> ModelSource:
    """A model of which a file was cut off while it was copied. It has a name of its own."""
    directory = tmp_path / "copy"
    shutil.copytree(shipped_directory(), directory)
    weights = directory / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (directory / "tilework.json").write_text(json.dumps({"name": "house"}))
    return ModelSource(path=str(directory))


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 1, "weights_bytes": 10**9},
        {"num_workers": 2, "weights_bytes": 10**9, "cell_size": 2, "collectives": "gloo"},
    ],
    ids=["all on the device", "on demand", "in cells"],
)
def test_a_model_that_cannot_be_loaded_is_left_out(options: dict[str, Any], damaged: ModelSource) -> None:
    """With its weights on demand, too, and when its worker has been replaced."""

    async def start() -> None:
        executor = LocalExecutor(LocalConfig(sources=(damaged, SHAPES), stop_grace_s=0.5, **options))
        engine = await EngineStart(EngineConfig(), executor).start()
        try:
            assert list(engine.models) == ["shapes"]
            (refused,) = engine.not_served.values()
            assert (refused.name, refused.is_first, refused.info) == ("house", True, None)
            assert refused.reason.startswith("it cannot be loaded (")
            assert "(house/transformer/diffusion_pytorch_model.safetensors: cannot be read (" in refused.reason
            assert damaged.path not in refused.reason, "clients read it"
            assert await draws(engine, "first") == {1}
            executor.kill(0, "a test")
            await restarted(executor)
            assert await draws(engine, "second") == {1}
        finally:
            await engine.stop()

    asyncio.run(start())


def test_a_worker_of_which_no_model_can_be_loaded_waits_for_others(damaged: ModelSource) -> None:
    """One on the other worker is served."""

    async def start() -> None:
        sources = (
            replace(damaged, devices=(0,)),
            replace(SHAPES, devices=(1,)),
            replace(damaged, name="b", devices=(1,)),
        )
        executor = LocalExecutor(LocalConfig(num_workers=2, sources=sources, stop_grace_s=0.5))
        engine = await EngineStart(EngineConfig(), executor).start()
        try:
            assert list(engine.models) == ["shapes"]
            assert list(engine.not_served) == ["house", "b"]
            assert await draws(engine, "on the other") == {1}
        finally:
            await engine.stop()

    asyncio.run(start())


def test_a_start_with_no_model_that_can_be_loaded_names_all(damaged: ModelSource) -> None:
    async def start(*sources: ModelSource) -> str:
        with pytest.raises(WorkerStartFailed) as caught:
            await LocalExecutor(LocalConfig(num_workers=1, sources=sources, stop_grace_s=0.5)).start(Listener())
        return str(caught.value)

    assert asyncio.run(start(damaged)).startswith("house cannot be loaded: ")
    absent = ModelSource(path="/nowhere/b", name="b")
    said = asyncio.run(start(damaged, absent))
    assert said.startswith("no model can be loaded: house: ")
    assert "; b: path is 'b', which does not exist" in said
