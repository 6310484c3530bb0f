"""A server over two nodes with agents played by the test: one does its works, the other turns against the server."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from builders import table
from runtime.nodes.rig import INFO, SPEC, TOKEN, config, started
from tilework.comm.net.channel import Channel
from tilework.comm.net.codec import Codec
from tilework.comm.net.handshake import join
from tilework.control.controller import ControllerConfig
from tilework.core.request import Status
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Execute
from tilework.core.wire.node_blobs import BlobsFetched, FetchBlobs
from tilework.core.wire.reports import Ended, Ending, Progress
from tilework.core.wire.spec import Image
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.nodes.messages import BeginNode, Leave, NodeMemory, Ping, Pong, node_codec
from tilework.runtime.ticket import Ticket
from waiting import PATIENCE_S, until

COSTS = table(encode_s=0.02, step_s=0.05, decode_s=0.05, pipeline="toy")
PICTURE = Image(8, 8, bytes(192))
LAST = INFO.graph.stages[-1].name


class Agent:
    """It does each work at once, but those of which it `holds` the first step: `held` has these, with their device."""

    def __init__(self, channel: Channel, *, holds: bool = False) -> None:
        self.channel, self._holds = channel, holds
        self.held: list[tuple[int, Execute]] = []
        self.done: list[int] = []
        self.left: str | None = None
        self.pings: list[int] = []
        self._names, self._prefix = count(), secrets.token_hex(4)
        self._task = asyncio.get_running_loop().create_task(self._listen())

    def say(self, message: object, device_id: int = -1) -> None:
        self.channel.send(message, device_id)

    async def _listen(self) -> None:
        async for address, message in self.channel.messages():
            match message:
                case Ping(sent_ns):
                    self.say(Pong(sent_ns, time.monotonic_ns()))
                    self.say(NodeMemory({"0": 1}, {}))
                case BeginNode():
                    self.say(started())
                case FetchBlobs(fetch_id, blobs):
                    self.say(BlobsFetched(fetch_id, blobs, 7))
                case Leave(reason):
                    self.left = reason
                case Execute():
                    self._run(address, message)

    def _run(self, device_id: int, command: Execute) -> None:
        if self._holds and command.num_steps > 1 and not command.revoked:
            self.held.append((device_id, command))
            self.say(Progress(command.work_id, 1), device_id)
        else:
            self.done.append(command.work_id)
            self.say(self.end_of(command), device_id)

    def end_of(self, command: Execute) -> Ended:
        """The right report on a work."""
        now_ns = time.monotonic_ns()
        if command.revoked:
            return Ended(command.work_id, now_ns, now_ns, 0, ending=Ending.STOPPED)
        job_ids = [job_id for job_id, _ in command.members]
        ended = Ended(command.work_id, now_ns, now_ns, command.num_steps)
        if command.stage == LAST:
            ended.images = dict.fromkeys(job_ids, PICTURE)
        else:
            ended.blobs = {one: StateBlob(f"{self._prefix}-{next(self._names)}", 9) for one in job_ids}
        return ended

    def close(self) -> None:
        self._task.cancel()
        self.channel.close()


@dataclass(eq=False)
class Siege:
    """An engine that has accepted `tickets`; the second agent, at place 1, `holds` works of some of them."""

    engine: Engine
    executor: NodesExecutor
    good: Agent
    bad: Agent
    tickets: Sequence[Ticket]
    turned: bool = field(default=False)

    async def holds(self) -> tuple[int, Execute]:
        """A device of the second agent, and the work that runs there."""
        await until(lambda: bool(self.bad.held))
        return self.bad.held[0]

    async def is_withstood(self) -> None:
        """All requests end well, each once, on the node that is left; the other was lost, and this is counted."""
        await until(lambda: 1 not in self.executor.nodes or bool(self.engine.failure))
        assert not self.engine.failure
        async with asyncio.timeout(PATIENCE_S):
            outcomes = [await ticket.outcome for ticket in self.tickets]
        assert [one.status for one in outcomes] == [Status.DONE] * len(outcomes), outcomes
        assert all(one.image == PICTURE for one in outcomes)
        assert not self.engine.failure
        assert self.engine.status.usage().bad_reports == {0: 0, 1: 1}
        assert len(self.good.done) == len(set(self.good.done))


async def _agent(executor: NodesExecutor, codec: Codec, *, holds: bool = False) -> Agent:
    reader, writer = await asyncio.open_connection("127.0.0.1", executor.port)
    return Agent(Channel(reader, writer, codec, await join(reader, writer, TOKEN, codec.digest)), holds=holds)


@asynccontextmanager
async def siege(make_codec: Callable[[], Codec] = node_codec, **options: Any) -> AsyncIterator[Siege]:
    """A server that has begun to serve four requests, on four devices."""
    executor = NodesExecutor(config(**options))
    start = EngineStart(EngineConfig(controller=ControllerConfig(policy="edf"), table=COSTS), executor)
    await executor.listen()
    starting = asyncio.get_running_loop().create_task(start.start())
    codec = make_codec()
    good = await _agent(executor, codec)
    await until(lambda: any(node.started for node in executor.nodes.values()))
    bad = await _agent(executor, codec, holds=True)
    engine = await starting
    try:
        answers = [engine.submit({str(number): SPEC}) for number in range(4)]
        tickets = [ticket for answer in answers if isinstance(answer, tuple) for ticket in answer]
        assert len(tickets) == len(answers), answers
        yield Siege(engine, executor, good, bad, tickets)
    finally:
        await engine.stop()
        good.close()
        bad.close()
