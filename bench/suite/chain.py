"""Real workers, told directly what to run when: the engine's part without server, controller and policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from suite.case import CaseFailed
from suite.stages import DIFFUSE, ENCODE, STAGES
from tilework.core.model import Source
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.commands import Command, Execute, Forget, ImportState, StopWork
from tilework.core.wire.reports import Ended, Failed, Progress, Report
from tilework.core.wire.spec import Spec
from tilework.core.work import Group
from tilework.runtime.executor import Executor, NodesListener
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Awaited:
    """A work in flight: `moves` are what other workers' queues wait for, to be the state that it leaves.

    `position` is where its job is then.
    """

    job_id: int
    spec: Spec
    leader: int
    position: int
    end: asyncio.Future[Ended]
    moves: list[asyncio.Future[Command | None]]


class Chains(NodesListener):
    """An executor's listener that runs requests one at a time, all works of a request queued at once."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.model = ""
        self.encoded: Ended | None = None  # How the encode of the latest request ended.
        self._job_ids, self._work_ids = count(1), count(1)
        self._works: dict[int, _Awaited] = {}
        self._on_step: Callable[[int], None] = lambda num_steps: None

    async def run(self, spec: Spec, route: Sequence[Group], steps_each: int) -> list[Ended]:
        """Denoise `steps_each` steps on each group of the route; returns the leaders' reports in its order.

        Every worker has the conditioning before the first step. Where the route comes to a worker that was not in the
        group before, that one's queue waits for the state as for a future, like the engine's. Raises CaseFailed.
        """
        job_id, encoded = await self._begin_request(spec)
        works: list[_Awaited] = []
        for index, group in enumerate(route):
            if works:
                self._bring(works[-1], set(group).difference(route[index - 1]))
            works.append(self._denoise(job_id, spec, group, index * steps_each, steps_each))
        reports: list[Ended] = []
        for work in works:
            reports.append(await work.end)
            self._discard(reports[-2:-1])  # The job that needed it has begun, and ended, its next work.
        self._end_request(job_id, [encoded, reports[-1]])
        return reports

    async def stop(self, spec: Spec, group: Group, steps: int, after: int, onto: Group) -> tuple[int, Ended, Ended]:
        """Stop a work of `steps` steps on a group when it has reported `after` of them, and make one more step `onto`
        another, with which it has no device in common.

        Returns when it was told to stop, in ns, and the leaders' reports. Raises CaseFailed.
        """
        job_id, encoded = await self._begin_request(spec)
        work = self._denoise(job_id, spec, group, 0, steps)
        work_id, reached = max(self._works), asyncio.get_running_loop().create_future()
        self._on_step = lambda num_steps: None if num_steps < after or reached.done() else reached.set_result(None)
        await reached
        stopped_ns = time.monotonic_ns()
        for device_id in group:
            self._executor.send(device_id, StopWork(work_id))
        stopped = await work.end
        for device_id in onto:
            saved = stopped.blobs[job_id]
            position = 1 + stopped.steps_done
            self._executor.send(device_id, _move(job_id, self.model, spec, DIFFUSE, position, saved))
        resumed = await self._denoise(job_id, spec, onto, stopped.steps_done, 1).end
        self._end_request(job_id, [encoded, stopped, resumed])
        return stopped_ns, stopped, resumed

    # For the executor.

    def on_report(self, device_id: int, report: Report) -> None:
        work = self._works.get(getattr(report, "work_id", 0))
        if isinstance(report, Progress) and work is not None:
            self._on_step(report.steps_done)
        if isinstance(report, Failed) and work is not None and not work.end.done():
            work.end.set_exception(CaseFailed(f"a work failed: {report.reason}"))
        if isinstance(report, Ended) and work is not None and device_id == work.leader:
            for move in work.moves:
                move.set_result(
                    _move(work.job_id, self.model, work.spec, DIFFUSE, work.position, report.blobs[work.job_id])
                )
            work.end.set_result(report)

    def on_lost(self, device_id: int, reason: str) -> None:
        for work in self._works.values():
            if not work.end.done():
                work.end.set_exception(CaseFailed(f"worker {device_id} was lost: {reason}"))

    def on_node_lost(self, node: int, device_ids: Group, blobs: Collection[StateBlob], reason: str) -> None:
        for device_id in device_ids:
            self.on_lost(device_id, reason)

    # Works.

    async def _begin_request(self, spec: Spec) -> tuple[int, Ended]:
        """Encode a request, and give what was encoded to every worker."""
        job_id = next(self._job_ids)
        encoded = self.encoded = await self._encode(job_id, spec)
        for device_id in range(1, self._executor.num_devices):
            self._executor.send(device_id, _move(job_id, self.model, spec, ENCODE, 1, encoded.blobs[job_id]))
        return job_id, encoded

    def _end_request(self, job_id: int, reports: Iterable[Ended]) -> None:
        self._discard(reports)
        self._works.clear()
        for device_id in range(self._executor.num_devices):
            self._executor.send(device_id, Forget(job_id))

    async def _encode(self, job_id: int, spec: Spec) -> Ended:
        work_id, work = self._begin(job_id, spec, 0, 1)
        self._executor.send(work.leader, Execute(work_id, self.model, ENCODE, ((job_id, 0),), specs={job_id: spec}))
        return await work.end

    def _bring(self, latest: _Awaited, newcomers: Iterable[int]) -> None:
        for device_id in sorted(newcomers):
            move: asyncio.Future[Command | None] = asyncio.get_running_loop().create_future()
            latest.moves.append(move)
            self._executor.send(device_id, move)

    def _denoise(self, job_id: int, spec: Spec, group: Group, first_step: int, num_steps: int) -> _Awaited:
        position = 1 + first_step
        work_id, work = self._begin(job_id, spec, group[0], position + num_steps)
        ref = self._executor.group(group) if len(group) > 1 else None
        for device_id in group:
            self._executor.send(
                device_id, Execute(work_id, self.model, DIFFUSE, ((job_id, position),), num_steps, group=ref)
            )
        return work

    def _begin(self, job_id: int, spec: Spec, leader: int, position: int) -> tuple[int, _Awaited]:
        end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        work = _Awaited(job_id=job_id, spec=spec, leader=leader, position=position, end=end, moves=[])
        work_id = next(self._work_ids)
        self._works[work_id] = work
        return work_id, work

    def _discard(self, reports: Iterable[Ended]) -> None:
        for report in reports:
            for blob in report.blobs.values():
                self._executor.discard(blob)


def _move(job_id: int, model: str, spec: Spec, stage: str, position: int, blob: StateBlob) -> ImportState:
    """What this stage has written, to a worker that has what those before it wrote."""
    index = STAGES.index(stage)
    return ImportState(job_id, model, spec, position, (SavedState(index, position, blob),), known=index > 0)


@asynccontextmanager
async def chains(num_workers: int, source: Source) -> AsyncIterator[Chains]:
    """That many workers, up. Raises WorkerStartFailed."""
    async with chains_over(LocalExecutor(LocalConfig(num_workers=num_workers, sources=(source,)))) as driver:
        yield driver


@asynccontextmanager
async def chains_over(executor: Executor) -> AsyncIterator[Chains]:
    """The workers of an executor, up. Raises WorkerStartFailed."""
    driver = Chains(executor)
    driver.model = (await executor.start(driver))[0].info.name
    try:
        yield driver
    finally:
        await executor.stop()
