"""Mixed traffic against a server whose workers are killed now and then, and what its clients saw."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any

import aiohttp

from suite.case import CaseFailed
from suite.children import worker_pids

URL = "/v1/images/generations"
KINDS: Mapping[str, float] = {"plain": 4, "deadline": 3, "promise": 2, "cancelled": 1, "streamed": 1}
_SIDES, _STEPS, _SEEDS = (64, 96, 128), (4, 8, 16), (1, 2)


@dataclass(slots=True)
class Seen:
    """What came of the traffic; times are seconds since it began.

    `deadlines` are the accepted requests with one: when they were sent, and whether it was kept. `memory` are samples
    of what the server has in use, and its workers on average, in MB.
    """

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    deadlines: list[tuple[float, bool]] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    memory: list[tuple[float, float, float]] = field(default_factory=list)


class Traffic:
    """Sends, kills and samples for a time. Every picture has to be as the first one of the same request."""

    def __init__(self, http: aiohttp.ClientSession, server_pid: int, seed: int) -> None:
        self._http, self._server_pid = http, server_pid
        self._rng, self._kill_rng = Random(seed), Random(seed + 1)
        self._pictures: dict[str, str] = {}
        self._start_s = time.monotonic()
        self.seen = Seen()

    def now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def arrive(self, rate_per_s: float, seconds: float) -> None:
        """Poisson arrivals; returns when all have been answered."""
        async with asyncio.TaskGroup() as tasks:
            due_s = self.now_s()
            end_s = due_s + seconds
            while due_s < end_s:
                await asyncio.sleep(due_s - self.now_s())
                (kind,) = self._rng.choices(list(KINDS), list(KINDS.values()))
                tasks.create_task(self._visit(kind, self._body(kind)))
                due_s += self._rng.expovariate(rate_per_s)

    async def kill(self, every_s: float) -> None:
        """One of the workers that there are, at random times; for ever."""
        while True:
            await asyncio.sleep(self._kill_rng.expovariate(1 / every_s))
            if workers := worker_pids(self._server_pid):
                os.kill(self._kill_rng.choice(workers), signal.SIGKILL)
                self.seen.kills.append(self.now_s())

    async def sample(self, every_s: float) -> None:
        """Memory as the server's metrics tell it; for ever."""
        while True:
            values = await self.metrics()
            name = "tilework_resident_bytes{process="
            server = values[f'{name}"server"}}']
            if workers := [value for key, value in values.items() if key.startswith(f'{name}"worker')]:
                self.seen.memory.append((self.now_s(), server / 1e6, fmean(workers) / 1e6))
            await asyncio.sleep(every_s)

    async def metrics(self) -> dict[str, float]:
        async with self._http.get("/metrics") as answer:
            lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def _body(self, kind: str) -> dict[str, Any]:
        rng, side = self._rng, self._rng.choice(_SIDES)
        body: dict[str, Any] = {"prompt": "a large red circle on a blue background", "size": f"{side}x{side}"}
        body |= {"num_inference_steps": rng.choice(_STEPS), "seed": rng.choice(_SEEDS)}
        match kind:
            case "deadline":
                body["slo_s"] = rng.uniform(1.5, 6)
            case "promise":
                body |= {"slo_s": rng.uniform(1.5, 6), "on_miss": "reject"}
            case "streamed":
                body["stream"] = True
        return body

    async def _visit(self, kind: str, body: dict[str, Any]) -> None:
        """One call; what should not be is remembered, whatever it is."""
        sent_s = self.now_s()
        headers = {"Prefer": "respond-async"} if kind == "cancelled" else {}
        try:
            async with self._http.post(URL, json=body, headers=headers) as answer:
                text = await answer.text()
            if answer.status == 429 and kind == "promise":
                self.seen.answers["promise, refused"] += 1
                return
            if answer.status == 503 and json.loads(text)["error"].get("status") == "no_devices":
                self.seen.answers["refused: no worker was up"] += 1
                return
            if answer.status not in (200, 202):
                raise CaseFailed(f"HTTP {answer.status}: {text[:200]}")
            if kind == "cancelled":
                await asyncio.sleep(self._rng.uniform(0, 0.5))
                await self._cancel(json.loads(text)["uid"])
            else:
                self._check(body, _last_event(text) if kind == "streamed" else json.loads(text)["data"][0], sent_s)
            self.seen.answers[kind] += 1
        except (aiohttp.ClientError, TimeoutError, CaseFailed, LookupError, ValueError) as error:
            self.seen.wrong.append(f"{kind}: {type(error).__name__}: {error}")

    async def _cancel(self, uid: str) -> None:
        async with self._http.delete(f"/v1/requests/{uid}") as answer:
            if answer.status not in (200, 204):
                raise CaseFailed(f"DELETE: HTTP {answer.status}")

    def _check(self, body: dict[str, Any], picture: dict[str, Any], sent_s: float) -> None:
        """Raises CaseFailed for another picture than the request had before."""
        key = f"{body['size']} {body['num_inference_steps']} {body['seed']}"
        digest = hashlib.sha256(base64.b64decode(picture["b64_json"])).hexdigest()
        if self._pictures.setdefault(key, digest) != digest:
            raise CaseFailed(f"another picture for {key}")
        if "slo_s" in body:
            self.seen.deadlines.append((sent_s, bool(picture["tilework"]["on_time"])))


def _last_event(text: str) -> dict[str, Any]:
    """The data of `image_generation.completed`. Raises ValueError."""
    data = text.rpartition("event: image_generation.completed")[2].partition("data: ")[2]
    event: dict[str, Any] = json.loads(data.partition("\n")[0])
    return event
