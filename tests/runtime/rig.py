"""An engine over real worker processes, on an event loop of its own, and a policy that moves each job at every step."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from builders import Idle
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Reject
from tilework.core.model import Source
from tilework.core.policy import ClusterView, CostModel
from tilework.core.wire.commands import STATES_BYTES
from tilework.core.wire.spec import Spec
from tilework.core.work import Plan, Start
from tilework.cost.table import CostTable
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.models.costs import CostCache
from tilework.runtime.ticket import Outcome, Ticket
from waiting import PATIENCE_S, until

T = TypeVar("T")


@dataclass(frozen=True)
class PingPong(Idle):
    """Runs every job one step at a time, on the other device each time: as many moves as there can be."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        starts: list[Start] = []
        idle = {device.device_id for device in view.devices if not device.works}
        for job in view.waiting():
            choices = sorted(idle - set(job.last_devices)) or sorted(idle if len(view.devices) == 1 else ())
            if choices and job.left.stage is not None:
                idle.discard(choices[0])
                starts.append(
                    Start(stage=job.left.stage, job_ids=(job.job_id,), devices=(choices[0],), num_steps=1, why="moves")
                )
        return Plan(starts=tuple(starts))


class Rig:
    """An engine on a loop of its own, which runs only while a test waits for something.

    With `costs` the devices are not measured.
    """

    def __init__(
        self,
        source: Source | tuple[Source, ...],
        policy: str,
        num_workers: int = 2,
        costs: CostTable | None = None,
        weights_bytes: int | None = None,
        states_bytes: int = STATES_BYTES,
        encode_cache_bytes: int = 0,
        cell_size: int = 1,
        cache: CostCache | None = None,
    ) -> None:
        self.runner = asyncio.Runner()
        self.log = io.StringIO()
        self.executor = LocalExecutor(
            LocalConfig(
                num_workers=num_workers,
                sources=source if isinstance(source, tuple) else (source,),
                weights_bytes=weights_bytes,
                states_bytes=states_bytes,
                cell_size=cell_size,
                restart_delay_s=0.05,
                max_restarts=1,
                stop_grace_s=1.0,
            )
        )
        self.config = EngineConfig(
            controller=ControllerConfig(policy=policy),
            table=costs,
            cache=cache,
            encode_cache_bytes=encode_cache_bytes,
        )

    def start(self) -> None:
        self.engine = self.run(EngineStart(self.config, self.executor, self.log).start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, PATIENCE_S))

    def submit(self, spec: Spec, uid: str, **options: Any) -> Ticket | Reject:
        answer = self.engine.submit({uid: spec}, **options)
        return answer if isinstance(answer, Reject) else answer[0]

    async def outcome(self, spec: Spec, uid: str) -> Outcome:
        ticket = self.submit(spec, uid)
        assert isinstance(ticket, Ticket), ticket
        return await ticket.outcome

    def outcomes(self, specs: dict[str, Spec]) -> list[Outcome]:
        async def all_of_them() -> list[Outcome]:
            return await asyncio.gather(*(self.outcome(spec, uid) for uid, spec in specs.items()))

        return self.run(all_of_them())

    def wait_until_idle(self) -> None:
        """A request that has failed may leave a queued work behind, which ends a moment later."""
        self.run(until(lambda: self.engine._dispatcher.is_idle))

    def close(self) -> None:
        self.run(self.engine.stop())
        self.runner.close()


def kill(rig: Rig, device_id: int) -> None:
    pid = rig.executor.pids.get(str(device_id))
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def assert_nothing_is_left(engine: Engine) -> None:
    """An engine without requests holds nothing: a leak would show here first."""
    attributes = (item for item in vars(engine).items() if item[0] != "models")
    left = {name: value for name, value in attributes if isinstance(value, dict) and value}
    assert not left
    assert not engine._control._incoming
    assert engine._dispatcher.is_idle
    assert not left_behind(engine._executor), "blobs of requests that have ended"


def left_behind(executor: Any) -> list[Path]:
    """The blobs that have not been removed."""
    files = [path for path in executor._blobs.path.iterdir() if path.is_file()]
    return [path for path in files if path.name != "lock"]
