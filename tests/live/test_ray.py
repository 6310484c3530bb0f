"""A workflow over a Ray cluster of two nodes: each part is killed under load, and every accepted request ends once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import debian
import tilework
import tiny
from live.ray_here import ray
from live.test_workflows import POSTER, costs_of
from processes import descendants, title
from runtime.rig import PingPong
from store.test_redis import free_port, redis_server
from tilework.control.controller import ControllerConfig
from tilework.core.model import ModelSource
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.policy import registry
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.nodes.ray_agents import RayAgents, new_token
from tilework.runtime.ticket import Outcome, Ticket
from waiting import until

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]
EACH = LocalConfig(num_workers=1, num_slots=1, sources=(ModelSource(path=POSTER),), start_timeout_s=240)
NUM_SPECS = 4
IN_FLIGHT = 3
Kill = Callable[["Cluster", RayAgents], None]


@dataclass
class Cluster:
    """A Ray cluster of two nodes on this machine; the server is on the first, with Ray's head."""

    ray: Any
    second: Any

    def kill_second(self) -> None:
        """Kill the second node with all that runs on it, and let another one join."""
        running = descendants(self.second.all_processes["raylet"][0].process.pid)
        self.ray.remove_node(self.second, allow_graceful=False)
        kill_all(running)
        self.second = self.ray.add_node(num_cpus=1)

    def kill_head(self) -> None:
        """Kill what knows the cluster, and start it again; Redis has what it knew."""
        self.ray.head_node.kill_gcs_server()
        self.ray.head_node.start_gcs_server()


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def kill_worker(cluster: Cluster, _agents: RayAgents) -> None:
    of_node = descendants(cluster.second.all_processes["raylet"][0].process.pid)
    workers = [pid for pid in of_node if "tilework: worker 0" in title(pid)]
    assert len(workers) == 1
    kill_all(workers)


def kill_agent(_cluster: Cluster, agents: RayAgents) -> None:
    ray.kill(agents.actors[0], no_restart=False)


KILLS: dict[str, Kill] = {
    "worker": kill_worker,
    "agent": kill_agent,
    "node": lambda cluster, _: cluster.kill_second(),
    "head": lambda cluster, _: cluster.kill_head(),
}


@contextmanager
def running_cluster(redis: str) -> Iterator[Cluster]:
    from ray.cluster_utils import Cluster as RayCluster

    os.environ["RAY_REDIS_ADDRESS"] = redis.removeprefix("redis://").removesuffix("/0")
    started = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "gcs_server_port": free_port()})
    try:
        yield Cluster(started, started.add_node(num_cpus=1))
    finally:
        started.shutdown()
        del os.environ["RAY_REDIS_ADDRESS"]


@dataclass
class Load:
    """Requests, so many at a time, until it is told to stop. Every fifth is cancelled by its client."""

    engine: Engine
    accepted: list[Ticket] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    is_over: bool = False

    async def run(self) -> list[Outcome]:
        """The outcomes of all."""
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(self._one_after_another())
        return [await ticket.outcome for ticket in self.accepted]

    async def _one_after_another(self) -> None:
        while not self.is_over:
            number = len(self.accepted)
            answer = self.engine.submit({f"request {number}": spec_of(number % NUM_SPECS)})
            assert isinstance(answer, tuple), answer
            self.accepted += answer
            if number % 5 == 4:
                await self._cancel(f"request {number}", answer[0])
            await answer[0].outcome

    async def _cancel(self, uid: str, ticket: Ticket) -> None:
        """Once it has made a step."""
        await until(lambda: ticket.steps_done > 0 or ticket.outcome.done())
        self.cancelled.add(uid)
        self.engine.cancel(uid, "its client has gone")


def spec_of(number: int) -> Spec:
    return tiny.spec(prompt=("red circle", "green square")[number % 2], seed=number, steps=6, exact=True)


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """The pictures of the workflow's parts, called in a row in this process."""
    tiny.prepare()
    stock = tilework.reference("shapes")
    return [np.asarray(tiny.poster(stock, POSTER, spec_of(number))) for number in range(NUM_SPECS)]


def test_each_part_is_killed_under_load_and_every_request_ends_once(tmp_path: Path, expected: list[np.ndarray]) -> None:
    if not debian.has("redis-server", "redis-server"):
        pytest.skip("there is no redis-server, and apt-get cannot install it here")
    registry._GIVEN["ping-pong"] = PingPong
    with redis_server(tmp_path) as (url, _), running_cluster(url) as cluster:
        agents = RayAgents(address=cluster.ray.address, num_cpus=1, num_accelerators=0)
        host = agents.connect("127.0.0.1")
        assert agents.num_nodes() == 2
        outcomes, cancelled = asyncio.run(serve(cluster, agents, host))
    del registry._GIVEN["ping-pong"]
    assert {one.status for one in outcomes} <= {Status.DONE, Status.CANCELLED, Status.FAILED}
    assert all(one.reason for one in outcomes if one.status is Status.FAILED)
    assert {one.uid for one in outcomes if one.status is Status.CANCELLED} <= cancelled
    done = [one for one in outcomes if one.status is Status.DONE]
    assert len(done) > len(outcomes) / 2
    for one in done:
        assert one.image is not None
        number = int(one.uid.split()[1]) % NUM_SPECS
        assert np.array_equal(tiny.pixels(one.image), expected[number]), f"{one.uid} differs"
    crossed = [one for one in done if {0, 1} <= {device for each in one.segments for device in each.devices}]
    assert len(crossed) >= IN_FLIGHT, "works of both nodes made them"


async def serve(cluster: Cluster, agents: RayAgents, host: str) -> tuple[list[Outcome], set[str]]:
    executor = NodesExecutor(NodesConfig(num_nodes=2, each=EACH, host=host, token=new_token(), silence_s=60), agents)
    engine = await EngineStart(
        EngineConfig(controller=ControllerConfig(policy="ping-pong"), table=costs_of(POSTER)), executor
    ).start()
    load = Load(engine)
    running = asyncio.create_task(load.run())

    async def reached(condition: Callable[[], bool]) -> None:
        await until(lambda: running.done() or condition())
        assert not running.done(), running.exception()

    try:
        for part, kill in KILLS.items():
            num_before = len(load.accepted)
            await reached(lambda: any(0 < one.steps_done < 5 for one in load.accepted if not one.outcome.done()))
            kill(cluster, agents)  # Ray starts nodes in the main thread alone.
            if part != "head":  # Devices go on without it.
                await reached(lambda: len(executor.devices_up) < 2)
            await reached(lambda: len(executor.devices_up) == 2)
            await reached(lambda before=num_before: len(load.accepted) > before + 2 * IN_FLIGHT)  # type: ignore[misc]
        # What knows the cluster was started again: it still starts agents that are lost.
        kill_agent(cluster, agents)
        await reached(lambda: len(executor.devices_up) < 2)
        await reached(lambda: len(executor.devices_up) == 2)
        load.is_over = True
        return await asyncio.wait_for(running, 120), load.cancelled
    finally:
        running.cancel()
        await engine.stop()
