"""Ray starts the agents: one per node of its cluster, and again when one is lost. Skipped without `cluster`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from builders import table
from tilework.control.controller import ControllerConfig
from tilework.core.model import ModelSource
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.local_executor import LocalConfig
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.nodes.ray_agents import RayAgents, new_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
# Ray asks for a token on every address but loopback, which it avoids, and reads it when it is imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_worker_niceness": "0"}
ray = pytest.importorskip("ray")
COSTS = table(encode_s=0.02, step_s=0.05, decode_s=0.05, pipeline="shapes")
EACH = LocalConfig(num_workers=1, sources=(ModelSource(path="shapes"),), start_timeout_s=240)


@pytest.fixture
def cluster() -> Iterator[str]:
    """A Ray cluster of two nodes on this machine."""
    from ray.cluster_utils import Cluster

    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    running.add_node(num_cpus=1)
    yield running.address
    running.shutdown()


def test_ray_starts_agents_and_starts_them_again(cluster: str) -> None:
    agents = RayAgents(address=cluster, num_cpus=1, num_accelerators=0)
    host = agents.connect()
    assert agents.num_nodes() == 2
    asyncio.run(_serve(agents, host))


async def _serve(agents: RayAgents, host: str) -> None:
    executor = NodesExecutor(NodesConfig(num_nodes=2, each=EACH, host=host, token=new_token()), agents)
    engine = Engine(EngineConfig(controller=ControllerConfig(policy="edf"), table=COSTS), executor)
    await engine.start()
    try:
        before = await pictures(engine)
        ray.kill(agents.actors[0], no_restart=False)
        async with asyncio.timeout(60):
            while len(executor.devices_up) == 2:
                await asyncio.sleep(0.05)
        assert await pictures(engine) == before
        async with asyncio.timeout(240):
            while len(executor.devices_up) < 2:
                await asyncio.sleep(0.1)
        assert await pictures(engine) == before
    finally:
        await engine.stop()


async def pictures(engine: Engine) -> list[bytes]:
    tickets = []
    for seed in range(4):
        spec = Spec(
            prompt="a red circle",
            negative_prompt="",
            height=64,
            width=64,
            steps=4,
            guidance_scale=4.0,
            seed=seed,
            exact=True,
        )
        answer = engine.submit({f"{engine.now_ns()}-{seed}": spec})
        assert isinstance(answer, tuple)
        tickets += answer
    async with asyncio.timeout(60):
        outcomes = [await ticket.outcome for ticket in tickets]
    assert all(one.status is Status.DONE for one in outcomes), outcomes
    return [bytes(one.image.pixels) for one in outcomes if one.image is not None]
