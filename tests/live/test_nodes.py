"""A server over two nodes on this machine: a workload across both, and one of them killed under it."""

from __future__ import annotations

import asyncio
import io
from collections import Counter

import pytest

from builders import table
from live.nodes import TOKEN, agents
from tilework.control.controller import ControllerConfig
from tilework.control.log import replay
from tilework.core.model import ModelSource
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.local_executor import LocalConfig, LocalExecutor
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.ticket import Outcome, Ticket

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
COSTS = table(encode_s=0.02, step_s=0.05, decode_s=0.05, degrees=(1, 2), pipeline="shapes")
EACH = LocalConfig(num_workers=1, sources=(ModelSource(path="shapes"),), start_timeout_s=120)
COLOURS = ("red", "green", "blue", "yellow")


def spec(seed: int) -> Spec:
    prompt = f"a large {COLOURS[seed % len(COLOURS)]} circle"
    return Spec(prompt=prompt, negative_prompt="", height=64, width=64, steps=12, guidance_scale=4.0, seed=seed)


def engine_config() -> EngineConfig:
    return EngineConfig(controller=ControllerConfig(policy="edf"), table=COSTS, encode_cache_bytes=1 << 26)


async def on_one_machine(count: int) -> dict[str, bytes]:
    """The pictures that a server on one machine draws."""
    engine = Engine(engine_config(), LocalExecutor(EACH))
    await engine.start()
    try:
        return {one.uid: pixels(one) for one in await ended(submit(engine, count))}
    finally:
        await engine.stop()


def submit(engine: Engine, count: int) -> list[Ticket]:
    tickets = []
    for seed in range(count):
        answer = engine.submit({str(seed): spec(seed)})
        assert isinstance(answer, tuple)
        tickets += answer
    return tickets


async def ended(tickets: list[Ticket]) -> list[Outcome]:
    async with asyncio.timeout(90):
        return [await ticket.outcome for ticket in tickets]


def pixels(outcome: Outcome) -> bytes:
    assert outcome.status is Status.DONE, outcome.reason
    assert outcome.image is not None
    return bytes(outcome.image.pixels)


async def begun(engine: Engine, executor: NodesExecutor, node: int) -> None:
    """Until a device of a node is making steps of a request that was moved there or began there."""
    async with asyncio.timeout(30):
        while not any(
            executor.node(one) == node and work.stage.has_steps and work.first_steps[0]
            for work in engine._controller.tracker.works.values()
            for one in work.devices
        ):
            await asyncio.sleep(0.01)


def test_a_node_is_killed_under_load_and_another_takes_its_place() -> None:
    """All requests are done once, with the pictures of one machine; a new node joins, and works."""
    asyncio.run(_kill_a_node())


async def _kill_a_node() -> None:
    log = io.StringIO()
    expected = await on_one_machine(12)
    executor = NodesExecutor(NodesConfig(num_nodes=2, each=EACH, token=TOKEN.encode()))
    engine = Engine(engine_config(), executor, log)
    await executor.listen()
    async with agents(executor.port, 2) as running:
        await engine.start()
        try:
            assert executor.devices_up == (0, 1)
            tickets = submit(engine, 12)
            await begun(engine, executor, node=0)
            running.kill(running.processes[0])
            outcomes = await ended(tickets)
            assert {one.uid: pixels(one) for one in outcomes} == expected
            devices = Counter(device_id for one in outcomes for part in one.segments for device_id in part.devices)
            assert devices.keys() == {0, 1}, "both nodes worked"
            running.start()
            async with asyncio.timeout(60):
                while executor.devices_up != (0, 1):
                    await asyncio.sleep(0.05)
            again = await ended(submit(engine, 12))
            assert {one.uid: pixels(one) for one in again} == expected
            assert 0 in {device_id for one in again for part in one.segments for device_id in part.devices}
        finally:
            await engine.stop()
    log.seek(0)
    lines = log.readlines()
    assert any('"NodeLost"' in line for line in lines)
    assert replay(lines) == (len(lines) - 1, None)
