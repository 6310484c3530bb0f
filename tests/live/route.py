"""Four real workers, and a policy that takes every request over the same groups of them."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from builders import Idle, table
from stages import DECODE, DIFFUSE, ENCODE
from tilework.control.controller import ControllerConfig
from tilework.core.model import ModelSource
from tilework.core.policy import ClusterView, CostModel
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.spec import Spec
from tilework.core.work import Group, Plan, Start
from tilework.pipelines import serialization
from tilework.policy import registry
from tilework.policy.toolkit.order import jobs_at_hand
from tilework.runtime.engine import EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.ticket import Outcome, Ticket
from tilework.worker.state_blobs import StateBlobs
from waiting import PATIENCE_S

T = TypeVar("T")
NUM_WORKERS = 4
ROUTE: tuple[Group, ...] = ((2,), (1, 3), (0, 1, 2, 3), (0, 2, 3), (1,), (3,))
STEPS_EACH = 2
STEPS = STEPS_EACH * len(ROUTE)


@dataclass(frozen=True)
class Route(Idle):
    """Runs the steps of every job on the groups of ROUTE, two on each; encodes on device 0, decodes on 1.

    Two works of a job are under way at a time, so that each state is awaited where the job goes next. A job goes on
    with what devices are left of a group, and are connected with each other.
    """

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        room = {device.device_id: 4 - len(device.works) for device in view.devices}
        starts: list[Start] = []
        for job in jobs_at_hand(view, 100):
            left = job.left
            for _ in range(2 - len(job.works)):
                if left.stage is None:
                    break
                done = left.num_steps_done
                wanted = {ENCODE: (0,), DECODE: (1,)}.get(left.stage.name) or ROUTE[done // STEPS_EACH]
                devices = _connected(wanted, view) or (min(room, default=0),)
                if not all(room.get(device_id) for device_id in devices):
                    break
                steps = STEPS_EACH - done % STEPS_EACH if left.stage.name == DIFFUSE else 1
                starts.append(
                    Start(stage=left.stage, job_ids=(job.job_id,), devices=devices, num_steps=steps, why="the route")
                )
                left = left.advanced(steps)
                room |= {device_id: room[device_id] - 1 for device_id in devices}
        return Plan(starts=tuple(starts))


def _connected(wanted: Group, view: ClusterView) -> Group:
    """Those of the wanted devices that are up and can form a group with the first of them."""
    up = [device for device_id in wanted if (device := view.device(device_id)) is not None]
    return tuple(device.device_id for device in up if device.pool == up[0].pool)


@contextmanager
def registered() -> Iterator[None]:
    """The policy is known by its name while this is entered."""
    registry._GIVEN["route"] = Route
    yield
    del registry._GIVEN["route"]


class KeepingExecutor(LocalExecutor):
    """Keeps the latents of every state that was put down."""

    def __init__(self, config: LocalConfig) -> None:
        super().__init__(config)
        self.latents: list[torch.Tensor] = []
        self.keep = True

    def discard(self, blob: StateBlob) -> None:
        if not self.keep:
            super().discard(blob)
            return
        contents = serialization.deserialize(StateBlobs(self._blobs.path, 0).read(blob), torch.device("cpu"))
        if "latents" in contents:
            self.latents.append(contents["latents"])
        super().discard(blob)


class Rig:
    """An engine with four workers on a loop of its own, which runs only while a test waits for something."""

    def __init__(self, directory: Path, pipeline: str, collectives: str | None = None) -> None:
        self.runner = asyncio.Runner()
        self.log = io.StringIO()
        source = ModelSource(path=str(directory))
        self.executor = KeepingExecutor(
            LocalConfig(num_workers=NUM_WORKERS, sources=(source,), restart_delay_s=0.05, collectives=collectives)
        )
        # The route does not ask what a step costs, and measuring four workers on few cores takes seconds.
        costs = table(degrees=(1, 2, 4), pipeline=pipeline)
        config = EngineConfig(controller=ControllerConfig(policy="route"), table=costs)
        self.engine = self.run(EngineStart(config, self.executor, self.log).start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, PATIENCE_S))

    def submit(self, spec: Spec, uid: str) -> Ticket:
        answer = self.engine.submit({uid: spec})
        assert isinstance(answer, tuple)
        return answer[0]

    def outcomes(self, **specs: Spec) -> list[Outcome]:
        async def all_of_them() -> list[Outcome]:
            return await asyncio.gather(*(self.submit(spec, uid).outcome for uid, spec in specs.items()))

        self.executor.latents.clear()
        return self.run(all_of_them())

    @property
    def is_whole(self) -> bool:
        """Whether all workers are up and connected with each other."""
        return self.engine.status.health().num_devices_up == NUM_WORKERS and not self.executor.alone

    def kill(self, device_id: int) -> None:
        pid = self.executor.pids.get(str(device_id))
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.run(self.engine.stop())
        self.runner.close()


def left_behind(executor: LocalExecutor) -> list[Path]:
    """StateBlobs that were not removed."""
    files = [path for path in executor._blobs.path.iterdir() if path.is_file()]
    return [path for path in files if path.name != "lock"]
