"""Models and LoRAs that come and go on two nodes while requests are served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import tilework
import tiny
from live.nodes import TOKEN, agents
from live.test_workflows import costs_of
from loras import save_lora, use_stock
from tilework.control.controller import ControllerConfig
from tilework.core.lora import UsedLora
from tilework.core.model import LoraSource, ModelSource, NewModel
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.cost.table import merged
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.ticket import Ticket
from waiting import until

pytestmark = pytest.mark.slow
INK = (UsedLora("ink", 0.8),)


def test_each_node_is_a_cell_that_serves_a_model_of_its_own(tmp_path: Path) -> None:
    """Devices of a model are cells, counted through all nodes; no device has a whole model."""
    tiny.prepare()
    names = ("first", "second")
    for name in names:
        tiny.save(tiny.build_sd3(), tmp_path / name, name)
    size = sum(file.stat().st_size for file in (tmp_path / "first").rglob("*.safetensors"))
    sources = [
        ModelSource(path=str(tmp_path / name), name=name, devices=(device_id,)) for device_id, name in enumerate(names)
    ]
    each = LocalConfig(
        num_workers=2, cell_size=2, sources=tuple(sources), weights_bytes=int(0.8 * size), start_timeout_s=120
    )
    costs = merged([costs_of(source.path) for source in sources])
    stock = tiny.run_stock(tilework.reference(str(tmp_path / "first")), tiny.spec()).pixels

    async def run() -> None:
        executor = NodesExecutor(NodesConfig(num_nodes=2, each=each, token=TOKEN.encode()))
        starting = EngineStart(EngineConfig(controller=ControllerConfig(policy="tilework"), table=costs), executor)
        await executor.listen()
        async with agents(executor.port, 2) as running:
            engine = await starting.start()
            try:
                assert engine.status.devices_serving("second") == (1,)
                for ticket in [submitted(engine, name) for name in names]:
                    outcome = await ticket.outcome
                    assert outcome.status is Status.DONE, outcome.reason
                    assert outcome.image is not None
                    assert np.abs(tiny.pixels(outcome.image).astype(int) - stock).max() <= 1
                    (device_id,) = {one for part in outcome.segments for one in part.devices}
                    assert names[device_id] == outcome.uid
                running.kill(running.processes[0])
                await until(lambda: len(executor.devices_up) == 1)
                running.start()
                await until(lambda: len(executor.devices_up) == 2)
                assert (await submitted(engine, "first").outcome).status is Status.DONE
            finally:
                await engine.stop()

    asyncio.run(run())


def submitted(engine: Engine, name: str) -> Ticket:
    answer = engine.submit({name: tiny.spec()}, model=name)
    assert isinstance(answer, tuple), answer
    return answer[0]


def test_both_nodes_serve_what_was_added_and_so_does_one_that_comes_later(tmp_path: Path) -> None:
    tiny.prepare()
    for name in ("first", "second"):
        tiny.save(tiny.build_sd3(), tmp_path / name, name)
    ink = tmp_path / "ink.safetensors"
    save_lora(tiny.build_sd3(), ink, 1)
    size = sum(file.stat().st_size for file in (tmp_path / "first").rglob("*.safetensors"))
    each = LocalConfig(
        num_workers=1,
        sources=(ModelSource(path=str(tmp_path / "first"), name="first"),),
        weights_bytes=3 * size,
        start_timeout_s=120,
    )

    def stock(name: str, spec: Spec) -> np.ndarray:
        pipeline = tilework.reference(str(tmp_path / name))
        if spec.loras:
            use_stock(pipeline, {"ink": ink}, {one.name: one.scale for one in spec.loras})
        return tiny.run_stock(pipeline, spec).pixels

    specs = [("second", tiny.spec(seed=seed, exact=True)) for seed in range(4)]
    specs += [("first", tiny.spec(seed=seed, exact=True, loras=INK)) for seed in range(4)]

    async def run() -> None:
        executor = NodesExecutor(NodesConfig(num_nodes=2, each=each, token=TOKEN.encode()))
        starting = EngineStart(EngineConfig(controller=ControllerConfig(policy="edf"), exact=True), executor)
        await executor.listen()
        async with agents(executor.port, 2) as running:
            engine = await starting.start()
            try:
                await engine.catalog.add(NewModel(path=str(tmp_path / "second"), name="second"), measure=False)
                await engine.catalog.add_lora("first", LoraSource(name="ink", path=str(ink)))
                assert await devices_of(engine, "a") == {0, 1}
                running.kill(running.processes[0])
                running.start()
                await until(lambda: len(executor.devices_up) == 1)
                await until(lambda: len(executor.devices_up) == 2)
                assert await devices_of(engine, "b") == {0, 1}
                await engine.catalog.remove("second")
                assert list(engine.models) == ["first"]
            finally:
                await engine.stop()

    async def devices_of(engine: Engine, prefix: str) -> set[int]:
        """The devices that draw the pictures, which are those of the stock pipeline."""
        tickets = []
        for index, (name, spec) in enumerate(specs):
            answer = engine.submit({f"{prefix}-{index}": spec}, model=name)
            assert isinstance(answer, tuple), answer
            tickets += answer
        outcomes = [await ticket.outcome for ticket in tickets]
        for outcome, (name, spec) in zip(outcomes, specs, strict=True):
            assert outcome.status is Status.DONE, outcome.reason
            assert outcome.image is not None
            assert np.array_equal(tiny.pixels(outcome.image), stock(name, spec)), name
        return {device_id for outcome in outcomes for part in outcome.segments for device_id in part.devices}

    asyncio.run(run())
