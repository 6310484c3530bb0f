"""A client at a server's door. It is aiohttp's: httpx takes as much CPU as the server, on the same cores."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp

from suite.case import CaseFailed


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    answer_ms: float


class Door:
    """A client that sends requests and takes them back. A share `reachable` of the promises it asks for can be met."""

    def __init__(self, http: aiohttp.ClientSession, rng: Random, reachable: float = 0.0) -> None:
        self._http, self._rng, self._reachable = http, rng, reachable

    async def fill(self, count: int, promises: float) -> None:
        """Bring in requests that wait long."""
        for first in range(0, count, 20):
            await asyncio.gather(*(self._submit(self._patient(promises)) for _ in range(first, min(first + 20, count))))

    async def arrivals(self, rate: float, seconds: float, promises: float) -> list[Answer]:
        start_s, due_s, tasks = time.perf_counter(), 0.0, []
        while due_s < seconds:
            await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self._visit(promises)))
            due_s += self._rng.expovariate(rate)
        return await asyncio.gather(*tasks)

    async def as_many_as_can(self, clients: int, seconds: float) -> int:
        """Visits of so many clients, each of which comes again at once; how many there were."""
        end_s, num_visits = time.perf_counter() + seconds, 0

        async def visits() -> None:
            nonlocal num_visits
            while time.perf_counter() < end_s:
                await self._visit(0.0)
                num_visits += 1

        await asyncio.gather(*(visits() for _ in range(clients)))
        return num_visits

    async def one_by_one(self, number: int) -> None:
        """So many visits, each after the one before, none of which asks for a promise. Raises CaseFailed."""
        for _ in range(number):
            if (answer := await self._visit(0.0)).status != 202:
                raise CaseFailed(f"a call was answered with {answer.status}")

    async def num_waiting(self) -> int:
        async with self._http.get("/metrics") as response:
            lines = [line for line in (await response.text()).splitlines() if line.startswith("tilework_jobs")]
        return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines))

    async def _visit(self, promises: float) -> Answer:
        body = self._patient(0.0)
        if self._rng.random() < promises:
            far = self._rng.random() < self._reachable
            body |= {"slo_s": self._rng.uniform(3000, 9000) if far else 1.0, "on_miss": "reject"}
        start_s = time.perf_counter()
        status, uid = await self._submit(body)
        taken_ms = (time.perf_counter() - start_s) * 1e3
        if status == 202:
            async with self._http.delete(f"/v1/requests/{uid}") as response:
                await response.read()
        return Answer(status, taken_ms)

    async def _submit(self, body: dict[str, Any]) -> tuple[int, str | None]:
        headers = {"Prefer": "respond-async"}
        async with self._http.post("/v1/images/generations", json=body, headers=headers) as response:
            return response.status, (await response.json()).get("uid")

    def _patient(self, promises: float) -> dict[str, Any]:
        side = self._rng.choice([256, 512, 1024])
        body: dict[str, Any] = {"prompt": "a picture", "size": f"{side}x{side}", "num_inference_steps": 20}
        if self._rng.random() < promises:
            body |= {"slo_s": self._rng.uniform(2000, 9000), "on_miss": "reject"}
        return body
