"""Plans in its own process, at the lowest priority: one plan at a time, and each answer is kept for a while."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tilework.core.time import NS_PER_S
from tilework.cost.table_file import table_json
from tilework.runtime.engine import Engine
from tilework.server.planning.recent import RecentTraffic, TrafficLines

KEPT_NS = 300 * NS_PER_S
"""Time for which an answer is given again; after that the traffic has changed."""
LEAST_DUE = 20
"""Least number of requests with a deadline that a plan needs."""
LIMIT_S = 600.0
REQUESTS = "requests.jsonl"
COSTS = "costs.json"
_SAMPLES = 6
_LONGEST_LINE = 1 << 20
_NICENESS = 19


class TooLittleTraffic(Exception):
    """Fewer requests with a deadline have come than a plan needs. `num_due` is their number."""

    def __init__(self, num_due: int) -> None:
        super().__init__(num_due)
        self.num_due = num_due


class PlannerBusy(Exception):
    """Another plan is being made."""


@dataclass(slots=True, kw_only=True)
class PlanJob:
    """A plan under way, or one that has ended: with the `document` of `tilework plan --json`, or an `error`."""

    target: float
    traffic: TrafficLines
    num_devices: int
    num_simulations: int = 0
    document: dict[str, Any] | None = None
    error: str = ""
    ended_ns: int | None = None


def command_of(folder: Path, job: PlanJob, policy: str) -> list[str]:
    """Return the command of the process that makes a plan of the files in `folder`."""
    return [
        *(sys.executable, "-m", "tilework", "plan", "--json", "--progress", "--processes", "1"),
        *("--workload", str(folder / REQUESTS), "--hardware", str(folder / COSTS)),
        *("--target", str(job.target), "--policy", policy, "--samples", str(_SAMPLES), "--step", "1"),
        *("--served", f"{job.num_devices},{job.traffic.num_met}"),
    ]


@dataclass(slots=True, eq=False)
class CapacityPlanner:
    """Makes plans. Runs on the event loop of the server."""

    engine: Engine
    recent: RecentTraffic
    _job: PlanJob | None = None
    _task: asyncio.Task[None] | None = None

    def plan(self, target: float) -> PlanJob:
        """Return the plan for a target: the one that was made lately, the one under way, or one that begins now.

        Raises:
            TooLittleTraffic, PlannerBusy.
        """
        job = self._job
        now_ns = self.engine.now_ns()
        if job is not None and job.target == target and (job.ended_ns is None or now_ns - job.ended_ns < KEPT_NS):
            return job
        if job is not None and job.ended_ns is None:
            raise PlannerBusy
        traffic = self.recent.traffic()
        if traffic.num_due < LEAST_DUE:
            raise TooLittleTraffic(traffic.num_due)
        num_devices = max(1, self.engine.status.health().num_devices)
        self._job = PlanJob(target=target, traffic=traffic, num_devices=num_devices)
        self._task = asyncio.get_running_loop().create_task(self._run(self._job))
        return self._job

    async def close(self) -> None:
        """End the process, if there is one."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, job: PlanJob) -> None:
        try:
            await asyncio.wait_for(self._make(job), LIMIT_S)
        except TimeoutError:
            job.error = f"it took more than {LIMIT_S:g} s; run tilework plan on another machine"
        except OSError as error:
            job.error = f"its process could not be started: {error}"
        finally:
            job.ended_ns = self.engine.now_ns()

    async def _make(self, job: PlanJob) -> None:
        with TemporaryDirectory(prefix="tilework-plan-") as name:
            folder = Path(name)
            (folder / REQUESTS).write_text(job.traffic.lines, encoding="utf-8")
            (folder / COSTS).write_text(json.dumps(table_json(self.engine.status.cost_table())), encoding="utf-8")
            process = await asyncio.create_subprocess_exec(
                *command_of(folder, job, self.engine.policy), stdout=PIPE, stderr=PIPE, limit=_LONGEST_LINE
            )
            try:
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
                assert process.stdout is not None
                assert process.stderr is not None
                printed, said = await asyncio.gather(process.stdout.read(), _followed(process.stderr, job))
                if await process.wait():
                    told = said.removeprefix("error: ").removeprefix(f"--workload {folder / REQUESTS}: ")
                    job.error = told or f"its process ended with status {process.returncode}"
                else:
                    job.document = json.loads(printed)
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _followed(lines: asyncio.StreamReader, job: PlanJob) -> str:
    """Keep the progress of a job up to date; return the last line that is no progress."""
    said = ""
    async for line in lines:
        text = line.decode(errors="replace").strip()
        if text.startswith("{"):
            job.num_simulations = json.loads(text)["simulations"]
        else:
            said = text or said
    return said
