"""Event logs of live servers with real workers: `python bench/decisions.py live OUT`.

The model is the one that ships, on CPUs. Times are those of this machine, so no two recordings are equal; what can be
compared is how a controller of another revision answers the events of a log.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from suite.children import worker_pids

_IMAGES, _REQUESTS = "/v1/images/generations", "/v1/requests"
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """Poisson arrivals at `rate_per_s` for `seconds`, each time `burst` calls at once.

    `kinds` are the shares of calls: without a deadline, with one (`slo_s`), with a promise (`on_miss: reject`),
    cancelled, or disconnected (`hung up`). A worker is killed every `kill_s` on average. With `restart` the server is
    killed at the end, and a second one continues what the first had accepted; the log is that of the second.
    """

    name: str
    policy: str | None = None
    workers: int = 2
    options: tuple[str, ...] = ()
    seconds: float = 50.0
    rate_per_s: float = 2.0
    burst: int = 1
    most_per_call: int = 1
    sides: tuple[int, ...] = (64, 96, 128)
    steps: tuple[int, ...] = (4, 8, 16)
    slo_s: tuple[float, float] = (1.0, 6.0)
    kinds: Mapping[str, float] = field(default_factory=lambda: {"plain": 1.0})
    kill_s: float | None = None
    restart: bool = False
    seed: int = 1


_ALL = {"plain": 3, "deadline": 4, "promise": 3, "cancelled": 2, "hung up": 1}

RUNS = (
    LiveRun(name="default-mixed", rate_per_s=2.5, most_per_call=3, kinds=_ALL, kill_s=12),
    LiveRun(
        name="default-elastic",
        workers=4,
        rate_per_s=0.8,
        sides=(128, 192, 256),
        steps=(8, 16, 24),
        slo_s=(1.0, 5.0),
        kinds=_ALL,
        kill_s=20,
    ),
    LiveRun(
        name="default-batches",
        options=("--max-batch", "12"),
        rate_per_s=0.4,
        burst=8,
        sides=(32, 64, 96),
        steps=(8, 16, 20),
        kinds=_ALL,
        kill_s=20,
    ),
    LiveRun(
        name="tetriserve-elastic",
        policy="tetriserve",
        workers=4,
        rate_per_s=0.8,
        sides=(96, 128, 192, 256),
        steps=(8, 16, 24),
        slo_s=(1.0, 8.0),
        kinds=_ALL,
        kill_s=20,
    ),
    LiveRun(name="edf-promises", policy="edf", rate_per_s=5.0, kinds={"deadline": 2, "promise": 4, "cancelled": 1}),
    LiveRun(
        name="default-overload",
        options=("--max-batch", "12"),
        seconds=30.0,
        rate_per_s=12.0,
        sides=(64, 96, 128),
        slo_s=(0.3, 3.0),
        kinds=_ALL,
        kill_s=15,
    ),
    LiveRun(
        name="patchedserve-batches",
        policy="patchedserve",
        options=("--max-batch", "8"),
        seconds=40.0,
        rate_per_s=0.5,
        burst=6,
        steps=(8, 16, 20),
        slo_s=(1.0, 8.0),
        kinds=_ALL,
        kill_s=15,
    ),
    LiveRun(name="default-restarted", seconds=15.0, rate_per_s=5.0, kinds=_ALL, restart=True),
)


class _Client:
    def __init__(self, http: httpx.AsyncClient, run: LiveRun) -> None:
        self._http, self._run, self._random = http, run, Random(run.seed)

    async def arrive(self, seconds: float) -> None:
        """Returns when all calls have their answers."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        end_s = due_s + seconds
        async with asyncio.TaskGroup() as calls:
            while due_s < end_s:
                await asyncio.sleep(due_s - loop.time())
                for _ in range(self._run.burst):
                    (kind,) = self._random.choices(list(self._run.kinds), list(self._run.kinds.values()))
                    calls.create_task(self._call(kind, self._body(kind)))
                due_s += self._random.expovariate(self._run.rate_per_s)

    def _body(self, kind: str) -> dict[str, Any]:
        draw, run = self._random, self._run
        height, width = draw.choice(run.sides), draw.choice(run.sides)
        body: dict[str, Any] = {"prompt": "a large red circle on a blue background", "size": f"{width}x{height}"}
        body |= {"num_inference_steps": draw.choice(run.steps), "seed": 1, "n": draw.randint(1, run.most_per_call)}
        body |= {"guidance_scale": draw.choice((1.0, 4.0, 4.0))}
        if kind in ("deadline", "promise") or draw.random() < 0.3:
            body["slo_s"] = round(draw.uniform(*run.slo_s), 3)
        if kind == "promise":
            body["on_miss"] = "reject"
        return body

    async def _call(self, kind: str, body: dict[str, Any]) -> None:
        """Whatever comes of it is in the log."""
        patience_s = self._random.uniform(0.05, 1.5)
        headers = {"Prefer": "respond-async"} if kind == "cancelled" else {}
        timeout = httpx.Timeout(patience_s if kind == "hung up" else 120.0)
        with suppress(httpx.HTTPError):
            answer = await self._http.post(_IMAGES, json=body, headers=headers, timeout=timeout)
            if kind == "cancelled" and answer.status_code == 202:
                await asyncio.sleep(patience_s)
                await self._http.delete(f"{_REQUESTS}/{answer.json()['uid']}")


def record_live(out: Path, runs: tuple[LiveRun, ...] = RUNS) -> None:
    """Write `NAME.jsonl` into `out` for each run."""
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        log = out / f"{run.name}.jsonl"
        with tempfile.TemporaryDirectory() as scratch:
            asyncio.run(_record(run, log, Path(scratch)))
        with log.open(encoding="utf-8") as lines:
            print(f"{log.name}: {sum(1 for _ in lines)} lines", flush=True)


async def _record(run: LiveRun, log: Path, scratch: Path) -> None:
    if not run.restart:
        await _serve(run, log, scratch)
        return
    await _serve(run, scratch / "first.jsonl", scratch, is_killed=True)
    await _serve(run, log, scratch, seconds=run.seconds / 3)


async def _serve(
    run: LiveRun, log: Path, scratch: Path, *, is_killed: bool = False, seconds: float | None = None
) -> None:
    options = [
        "--workers",
        str(run.workers),
        "--threads",
        "1",
        "--port",
        "0",
        "--json",
        "--log",
        str(log),
        *run.options,
    ]
    options += [] if run.policy is None else ["--policy", run.policy]
    options += ["--durable", str(scratch / "durable")] if run.restart else []
    environment = os.environ | {"TILEWORK_PROFILES": str(scratch / "costs.sqlite")}
    arguments = [sys.executable, "-m", "tilework", "serve", "shapes", *options]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        url = json.loads(line)["url"]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, trust_env=False, limits=limits, timeout=120.0) as http:
            killer = asyncio.create_task(_kill(process.pid, run))
            calls = asyncio.create_task(_Client(http, run).arrive(seconds or run.seconds))
            if is_killed:
                await asyncio.sleep(run.seconds)
                process.kill()
            await calls
            killer.cancel()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _kill(server_pid: int, run: LiveRun) -> None:
    random = Random(run.seed + 1)
    while run.kill_s is not None:
        await asyncio.sleep(random.uniform(0.5, 1.5) * run.kill_s)
        if workers := worker_pids(server_pid):
            with suppress(ProcessLookupError):
                os.kill(random.choice(workers), signal.SIGKILL)
