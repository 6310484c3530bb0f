"""A server over two nodes on this machine: a workload across both, and one of them killed under it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest

from builders import Idle, table
from live.nodes import TOKEN, Agents, agents
from tilework.control.controller import ControllerConfig
from tilework.control.log import replay
from tilework.core.model import ModelSource
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.core.work import Group, Plan, Start
from tilework.policy import registry
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.ticket import Outcome, Ticket
from waiting import until

pytestmark = pytest.mark.slow
NUM_REQUESTS = 8
STEPS_EACH = 3
ROUTE = (0,), (2, 3), (1,), (2,)
"""The devices of each chunk of steps: 0 and 1 are of one node, 2 and 3 of another. An exact request has the first."""
COSTS = table(encode_s=0.02, step_s=0.05, decode_s=0.05, degrees=(1, 2), pipeline="shapes")
EACH = LocalConfig(num_workers=2, sources=(ModelSource(path="shapes"),), start_timeout_s=120)
Pictures = dict[bool, list[bytes]]
NUMBERS = count()
COLOURS = ("red", "green", "blue", "yellow")


class Across(Idle):
    """Each request crosses to the other node after each chunk of steps; where that is lost, it stays."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        free, starts = {one.device_id for one in view.devices if not one.works}, list[Start]()
        for job in view.waiting():
            assert job.left.stage is not None
            done, is_stepped = job.left.num_steps_done, job.left.stage.has_steps
            wanted = ROUTE[done // STEPS_EACH] if is_stepped else (3,)
            wanted = wanted[:1] if job.request.exact else wanted
            devices = wanted if free.issuperset(wanted) or _all_up(view, wanted) else tuple(sorted(free))[:1]
            if devices and free.issuperset(devices):
                free -= set(devices)
                steps = STEPS_EACH - done % STEPS_EACH if is_stepped else 1
                starts.append(
                    Start(
                        stage=job.left.stage, job_ids=(job.job_id,), devices=devices, num_steps=steps, why="the route"
                    )
                )
        return Plan(starts=tuple(starts))


def _all_up(view: ClusterView, devices: Group) -> bool:
    return {one.device_id for one in view.devices}.issuperset(devices)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """The policy of these tests, for these tests only."""
    registry._GIVEN["across"] = Across
    yield
    del registry._GIVEN["across"]


def spec(seed: int, exact: bool) -> Spec:
    prompt = f"a large {COLOURS[seed % len(COLOURS)]} circle"
    return Spec(prompt=prompt, height=64, width=64, steps=12, guidance_scale=4.0, seed=seed, exact=exact)


def engine_config() -> EngineConfig:
    return EngineConfig(controller=ControllerConfig(policy="across"), table=COSTS, encode_cache_bytes=1 << 26)


async def on_one_machine() -> Pictures:
    """The pictures that a server on one machine draws with the same numbers of devices."""
    engine = await EngineStart(engine_config(), LocalExecutor(replace(EACH, num_workers=4))).start()
    try:
        return {exact: await drawn(submit(engine, exact)) for exact in (False, True)}
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
def expected() -> Pictures:
    return asyncio.run(on_one_machine())


def submit(engine: Engine, exact: bool) -> list[Ticket]:
    tickets = []
    for seed in range(NUM_REQUESTS):
        answer = engine.submit({f"{next(NUMBERS)}": spec(seed, exact)})
        assert isinstance(answer, tuple)
        tickets += answer
    return tickets


async def drawn(tickets: list[Ticket]) -> list[bytes]:
    async with asyncio.timeout(90):
        return [pixels(await ticket.outcome) for ticket in tickets]


def pixels(outcome: Outcome) -> bytes:
    assert outcome.status is Status.DONE, outcome.reason
    assert outcome.image is not None
    return bytes(outcome.image.pixels)


@asynccontextmanager
async def serving(log: io.StringIO, **options: Any) -> AsyncIterator[tuple[Engine, NodesExecutor, Agents]]:
    """A server over two nodes."""
    executor = NodesExecutor(NodesConfig(num_nodes=2, each=EACH, token=TOKEN.encode(), **options))
    starting = EngineStart(engine_config(), executor, log)
    await executor.listen()
    async with agents(executor.port, 2) as running:
        engine = await starting.start()
        try:
            yield engine, executor, running
        finally:
            await engine.stop()


def crossed_twice(engine: Engine) -> bool:
    """Whether a request makes steps on the node on which it began, and has made some on the other one."""
    works = engine._controller.tracker.works.values()
    return any(one.first_step >= 2 * STEPS_EACH for work in works if work.stage.has_steps for one in work.members)


def of_nodes(log: io.StringIO) -> list[dict[str, Any]]:
    """The events that nodes left or were lost, of a log that replays."""
    lines = log.getvalue().splitlines(keepends=True)
    assert replay(lines) == (len(lines) - 1, None)
    events = [json.loads(line)["event"] for line in lines[1:]]
    return [event for event in events if event["is"] in ("NodeCordoned", "NodeLost")]


def test_requests_cross_nodes_and_survive_the_loss_of_one_and_the_leave_of_another(expected: Pictures) -> None:
    """All are done once, with the pictures of one machine, group and all."""

    async def run() -> None:
        log = io.StringIO()
        async with serving(log) as (engine, executor, running):
            await cross(engine, expected)
            await lose_a_node(engine, executor, running, expected)
            await tell_a_node_to_end(engine, running, expected)
        lost, leaving, left = of_nodes(log)
        assert lost["device_ids"] in ([0, 1], [2, 3])
        assert (leaving["is"], left["is"], left.get("positions")) == ("NodeCordoned", "NodeLost", None)

    asyncio.run(run())


async def cross(engine: Engine, expected: Pictures) -> None:
    """They go from node to node, and are on a group between."""
    tickets = submit(engine, exact=False)
    assert await drawn(tickets) == expected[False]
    parts = (await tickets[0].outcome).segments
    assert {part.devices for part in parts} >= set(ROUTE), "it crossed three times, and was on a group"
    assert all(first.end_ns <= second.start_ns for first, second in pairwise(parts))
    await until(lambda: engine.status.usage().resident_bytes.keys() >= {"0", "1", "2", "3"})
    assert min(engine.status.usage().resident_bytes.values()) > 1 << 20


async def lose_a_node(engine: Engine, executor: NodesExecutor, running: Agents, expected: Pictures) -> None:
    """Another agent takes the place of one that is killed under requests."""
    tickets = submit(engine, exact=True)
    await until(lambda: crossed_twice(engine))
    running.kill(running.processes[0])
    assert await drawn(tickets) == expected[True]
    running.start()
    await until(lambda: len(executor.devices_up) == 4)
    assert await drawn(submit(engine, exact=False)) == expected[False]


async def tell_a_node_to_end(engine: Engine, running: Agents, expected: Pictures) -> None:
    """Its agent gets SIGTERM while requests run on it. Each step is made once, and the agent ends by itself."""
    tickets, leaving = submit(engine, exact=True), running.processes[-1]
    await until(lambda: crossed_twice(engine))
    leaving.terminate()
    assert await drawn(tickets) == expected[True]
    await until(lambda: leaving.poll() is not None)
    assert leaving.returncode == 0
    parts = [part for ticket in tickets for part in (await ticket.outcome).segments]
    assert sum(part.num_steps for part in parts) == 12 * NUM_REQUESTS
