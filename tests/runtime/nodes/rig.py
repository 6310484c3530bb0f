"""An executor over nodes whose agents are played by the test, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from tilework.comm.net.channel import Channel
from tilework.comm.net.handshake import join
from tilework.core.model import ModelInfo, ModelSource
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.commands import Execute, GroupRef, ImportState
from tilework.core.wire.content import FileContent
from tilework.core.wire.reports import Ended, LoadedModel, Report, WeightsRead
from tilework.core.wire.spec import Image, Spec
from tilework.core.work import Group
from tilework.cost.profile import ProfileKey
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.nodes.messages import (
    BeginNode,
    Contents,
    Ping,
    Started,
    node_codec,
)
from waiting import PATIENCE_S, until

TOKEN = b"known to both"
T = TypeVar("T")
INFO = ModelInfo(
    name="toy",
    family="toy",
    side_multiple=8,
    max_side=64,
    default_height=64,
    default_width=64,
    default_steps=4,
    default_guidance_scale=1.0,
    parameters=1,
    library="none",
)
KEY = ProfileKey(
    hardware="abacus", architecture="Toy", model="toy", dtype="float32", threads=1, workers=2, libraries="none"
)


class Heard:
    """A listener that notes what it is told, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []
        self.silent: tuple[int, ...] = ()

    def on_loading(self, num_ready: int) -> None:
        self.all.append(("loading", num_ready))

    def on_report(self, device_id: int, report: Report) -> None:
        self.all.append(("report", device_id, report))

    def on_lost(self, device_id: int, reason: str) -> None:
        self.all.append(("lost", device_id, reason))

    def on_node_lost(self, node: int, device_ids: Group, blobs: Collection[StateBlob], reason: str) -> None:
        self.all.append(("node lost", node, device_ids, {blob.name for blob in blobs}))

    def on_fetched(self, origin: int, node: int, num_bytes: int, run_ns: int) -> None:
        self.all.append(("fetched", origin, node, num_bytes, run_ns))

    def on_node_leaving(self, node: int, device_ids: Group, reason: str, let_go: Callable[[], None]) -> None:
        self.all.append(("node leaving", node, device_ids, reason))
        self.let_go = let_go

    def on_silent(self, nodes: tuple[int, ...]) -> None:
        self.silent = nodes

    def on_links_changed(self) -> None: ...
    def on_joined(self, device_id: int) -> None:
        self.all.append(("joined", device_id))

    def on_read(self, read: WeightsRead) -> None:
        self.all.append(("read", read))

    def on_given_up(self, left: Collection[int]) -> None:
        self.all.append(("given up", set(left)))

    async def hears(self, *expected: tuple[Any, ...]) -> None:
        """Wait until it has been told at least as much; then this was the last of it."""
        await until(lambda: set(map(repr, self.all)).issuperset(map(repr, expected)))
        assert self.all[-len(expected) :] == list(expected)


class PlayedAgent:
    """An agent of two workers. What it is told is in `told`, but for pings."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.told: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self.num_pings = 0
        self._task = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        async for address, message in self.channel.messages():
            if isinstance(message, Ping):
                self.num_pings += 1
            else:
                await self.told.put((address, message))
        await self.told.put((-1, None))

    def say(self, message: object, device_id: int = -1) -> None:
        self.channel.send(message, device_id)

    async def hears(self, kind: type[T]) -> T:
        """The next thing that it is told; it is of this kind."""
        message = await self.hears_for(-1)
        assert isinstance(message, kind), message
        return message

    async def hears_for(self, device_id: int) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            address, message = await self.told.get()
        assert address == device_id, (address, message)
        return message

    def close(self) -> None:
        self._task.cancel()
        self.channel.close()


def started(key: ProfileKey = KEY, name: str = "", blobs: tuple[str, ...] = ()) -> Started:
    model = LoadedModel(info=INFO, identity="toy")
    return Started(models=(model,), keys={"toy": key}, num_slots=1, host_bytes=None, port=5000, name=name, blobs=blobs)


def contents(model: str = "toy", **weights: FileContent) -> Contents:
    """A configuration, and these weights."""
    files = {f"{name}.safetensors": one for name, one in weights.items()}
    return Contents({model: {"config.json": FileContent(num_bytes=2, quick="0"), **files}})


def begin() -> BeginNode:
    """What an agent of two workers is told first."""
    return BeginNode(
        node=0,
        silence_s=PATIENCE_S,
        models=(ModelSource(path="toy"),),
        simulated=(),
        num_workers=2,
        num_slots=1,
        weights_bytes=None,
        states_bytes=1,
        cache_bytes=1,
        cell_size=1,
        collectives=None,
    )


async def connect(executor: NodesExecutor, begins: bool = True, key: ProfileKey = KEY, name: str = "") -> PlayedAgent:
    reader, writer = await asyncio.open_connection("127.0.0.1", executor.port)
    codec = node_codec()
    agent = PlayedAgent(Channel(reader, writer, codec, await join(reader, writer, TOKEN, codec.digest)))
    if begins:
        assert (await agent.hears(BeginNode)).num_workers == 2
        agent.say(started(key, name))
    return agent


def config(**options: Any) -> NodesConfig:
    each = LocalConfig(num_workers=2, sources=(ModelSource(path="toy"),), start_timeout_s=PATIENCE_S, stop_grace_s=0.1)
    return NodesConfig(**({"num_nodes": 2, "each": each, "token": TOKEN, "silence_s": 2 * PATIENCE_S} | options))


@asynccontextmanager
async def nodes(key: ProfileKey = KEY, **options: Any) -> AsyncIterator[tuple[NodesExecutor, Heard, list[PlayedAgent]]]:
    """An executor that has started, with the agents of its nodes 0 and 1.

    Devices 0 and 1, and the CPU slot 4, are of node 0; devices 2 and 3, and the CPU slot 5, of node 1.
    """
    executor, heard = NodesExecutor(config(**options)), Heard()
    await executor.listen()
    starting = asyncio.get_running_loop().create_task(executor.start(heard))
    agents = [await connect(executor, key=key) for _ in range(options.get("num_nodes", 2))]
    try:
        assert [one.info for one in await starting] == [INFO]
        heard.all.clear()
        yield executor, heard, agents
    finally:
        await executor.stop()
        for agent in agents:
            agent.close()


def ended(work_id: int, *blobs: str) -> Ended:
    """The report on an `execute` of as many jobs as there are blobs, or of one that has got its picture."""
    images = {} if blobs else {0: Image(1, 1, b"rgb")}
    written = {index: StateBlob(name, 1) for index, name in enumerate(blobs)}
    return Ended(work_id, 5, 9, 1, blobs=written, images=images)


async def does(executor: NodesExecutor, agent: PlayedAgent, device_id: int, report: Ended) -> None:
    """Give a device of an agent a work, skip what the agent was told before, and let the device report its end."""
    members = tuple((job_id, 1) for job_id in range(max(1, len(report.blobs))))
    executor.send(device_id, replace(execute(report.work_id), members=members))
    async with asyncio.timeout(PATIENCE_S):
        on_node, command = await agent.told.get()
        while not isinstance(command, Execute):
            on_node, command = await agent.told.get()
    agent.say(report, on_node)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


SPEC = Spec(prompt="", height=8, width=8, steps=4, guidance_scale=1.0, seed=0)
A, B = StateBlob("a", 1), StateBlob("b", 1)


def execute(work_id: int, group: GroupRef | None = None, *, revoked: bool = False) -> Execute:
    return Execute(work_id, "toy", "steps", ((0, 1),), group=group, revoked=revoked)


def imported(*blobs: StateBlob) -> ImportState:
    states = tuple(SavedState(0, 1 + index, blob) for index, blob in enumerate(blobs))
    return ImportState(0, "toy", SPEC, len(blobs), states, known=False)
