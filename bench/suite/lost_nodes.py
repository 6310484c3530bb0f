"""A server over two nodes on this machine, one of which is lost again and again while it runs a request."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from suite.case import CaseFailed, Note
from suite.waiting import until
from tilework.cli.local_agents import LocalAgents, local_agents
from tilework.control.controller import ControllerConfig
from tilework.core.actions import RunWork
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.core.work import Group
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.ticket import Ticket

_TOKEN = "for this bench"
_PATIENCE_S = 300.0
_LATEST_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """One loss: seconds from the kill until another node had made a step of the request, and until it was done.

    `steps_again` of the steps that had been made were made again.
    """

    goes_on_s: float
    done_s: float
    steps_again: int


async def lose_nodes(kills: int, spec: Spec, each: LocalConfig, seed: int, note: Note) -> list[LostNode]:
    """Kill the agent and the workers of the node that runs a request, up to half a second after its first step.

    Another agent has joined before the next kill. Raises CaseFailed if a request is lost or nothing happens.
    """
    executor = NodesExecutor(NodesConfig(num_nodes=2, each=each, token=_TOKEN.encode()))
    await executor.listen()
    rng, found = Random(seed), list[LostNode]()
    with (
        TemporaryDirectory() as folder,
        local_agents(2, port=executor.port, token=_TOKEN, log=Path(folder) / "agents.log") as agents,
    ):
        engine = await EngineStart(EngineConfig(controller=ControllerConfig(policy="edf")), executor).start()
        try:
            for number in range(kills):
                await until(lambda: len(executor.devices_up) == 2, _PATIENCE_S)
                found.append(await _lose_one(engine, executor, agents, spec, f"{number}", rng.random() * _LATEST_S))
                note(f"node {number + 1} was lost: its request went on after {found[-1].goes_on_s:.2f} s")
                agents.start()
        finally:
            await engine.stop()
    return found


async def _lose_one(
    engine: Engine, executor: NodesExecutor, agents: LocalAgents, spec: Spec, uid: str, after_s: float
) -> LostNode:
    answer = engine.submit({uid: spec})
    if not isinstance(answer, tuple):
        raise CaseFailed(f"a request was refused: {answer}")
    (ticket,) = answer
    await until(lambda: ticket.steps_done > 0, _PATIENCE_S)
    await asyncio.sleep(after_s)
    lost = _devices(ticket)
    (name,) = [name for name, devices in executor.node_names.items() if set(lost) <= set(devices)]
    (agent,) = [one for one in agents.processes if name.endswith(f"-{one.pid}")]
    agents.kill(agent)
    killed_s = time.monotonic()
    await until(lambda: _devices(ticket) != lost, _PATIENCE_S)
    made = ticket.steps_done
    await until(lambda: ticket.steps_done != made, _PATIENCE_S)
    goes_on_s, first = time.monotonic() - killed_s, ticket.steps_done
    outcome = await ticket.outcome
    if outcome.status is not Status.DONE:
        raise CaseFailed(f"a request was lost: {outcome.reason}")
    return LostNode(goes_on_s=goes_on_s, done_s=time.monotonic() - killed_s, steps_again=max(0, made - first + 1))


def _devices(ticket: Ticket) -> Group:
    """Where its latest work is."""
    return [action.work.devices for _, action in ticket.history if isinstance(action, RunWork)][-1]
