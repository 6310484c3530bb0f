"""What calls leave behind in the memory of a server, whatever they ask for: many calls, of many sizes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from suite.case import Check, Finding, Note, Table
from suite.server import serving_simulated
from suite.simulated_devices import write_table
from suite.stages import DECODE, DIFFUSE, ENCODE
from suite.stats import exact
from tilework.core.cost_row import CostRow
from tilework.cost.table import CostTable
from tilework.runtime.worker_process import resident_bytes
from tilework.server.garbage import rare_collections

_URL = "/v1/images/generations"
_KINDS = {"plain": 4, "deadline": 2, "promise": 2, "out of reach": 1, "cancelled": 1}
_SIDES = (65, 129)  # Odd ones, so that simulated devices make pictures of any side.
_QUICKEST_S = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """`calls` of `shapes` sizes, one after another on each of `connections`; memory is looked at after every `every`,
    when no call is open, and has to be at most `most` times that after `first`.

    `max_records`, `result_bytes`: what the server keeps on purpose, so little that it is full before `first`.
    """

    calls: int = 100_000
    shapes: int = 5_000
    first: int = 10_000
    every: int = 10_000
    connections: int = 12
    devices: int = 2
    policy: str = "tilework"
    max_records: int = 1_000
    result_bytes: int = 100_000
    steps: tuple[int, ...] = (1, 2, 3, 4)
    most: float = 1.02
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Growth:
        return cls(calls=2_000, shapes=100, first=1_000, every=500, max_records=100) if quick else cls()

    def measure(self, note: Note) -> Finding:
        settings = {"max_records": self.max_records, "result_bytes": self.result_bytes, "drain_s": 0.2}
        with TemporaryDirectory(prefix="tilework-bench-") as folder, rare_collections():
            table, log = Path(folder) / "costs.json", Path(folder) / "events.jsonl"
            write_table(table, _costs())
            with serving_simulated(self.devices, table, self.policy, log, settings) as server:
                client = _Client(self, server.url)
                sizes = asyncio.run(client.all(lambda: resident_bytes(server.pid) or 0, note))
        base = sizes[self.first]
        return Finding(
            checks=(
                Check(
                    what=f"memory of the server after {self.calls} calls over that after {self.first}",
                    measured=exact(sizes[self.calls] / base),
                    high=self.most,
                ),
                Check(what="calls without the answer that they should have", measured=exact(len(client.wrong)), high=0),
            ),
            method=self._method(),
            tables=(
                Table(
                    title="Memory of the server, when no call was open",
                    columns=("calls", "MB", "over the first"),
                    rows=tuple((str(num), f"{size / 1e6:.1f}", f"{size / base:.3f}") for num, size in sizes.items()),
                ),
            ),
            facts={f"answered: {kind}": count for kind, count in sorted(client.answers.items())}
            | ({"wrong": "; ".join(client.wrong[:5])} if client.wrong else {}),
        )

    def _method(self) -> tuple[str, ...]:
        return (
            f"`tilework serve --backend modelled --devices {self.devices} --policy {self.policy} --log FILE`, over "
            f"HTTP on {self.connections} connections that stay open: all is real but the devices, whose steps take "
            "next to no time.",
            f"Sizes in a new random order in every round of all {self.shapes}, steps at random; each call has a prompt "
            "and a seed of its own. Ten calls are four plain ones, two with deadlines, two with promises, one with a "
            "promise out of reach, and one that is cancelled at once. One in ten has an idempotency key.",
            f"Memory: the resident bytes of the server's process. What it keeps on purpose is bounded so that it is "
            f"full before the first look: {self.max_records} records of calls, {self.result_bytes} bytes of pictures.",
        )

    def sizes(self) -> Iterator[str]:
        """Sizes without an end: all, in a new order each time."""
        rng, sides = Random(self.seed), range(_SIDES[0] - 16, 1 << 20)
        width = next(num for num in range(1, self.shapes + 1) if num * num >= self.shapes)
        every = [f"{a}x{b}" for a in sides[:width] for b in sides[:width]][: self.shapes]
        while True:
            rng.shuffle(every)
            yield from every


def _costs() -> CostTable:
    rows = tuple(
        CostRow(pipeline="made-up", stage=stage, height=side, width=side, degree=degree, seconds=seconds)
        for stage, degrees in ((ENCODE, (1,)), (DIFFUSE, (1, 2)), (DECODE, (1,)))
        for side in _SIDES
        for degree in degrees
        for seconds in (_QUICKEST_S * side / _SIDES[0] / degree,)
    )
    return CostTable(hardware="made up", rows=rows, steps=4)


class _Client:
    """Makes the calls of a case, and counts the answers by kind and status."""

    def __init__(self, case: Growth, url: str) -> None:
        self._case, self._url = case, url
        self._sizes, self._rng = case.sizes(), Random(case.seed)
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def all(self, memory: Callable[[], int], note: Note) -> dict[int, int]:
        """What `memory` says after so many calls."""
        case, found = self._case, dict[int, int]()
        timeout, connector = aiohttp.ClientTimeout(120), aiohttp.TCPConnector(limit=case.connections)
        async with aiohttp.ClientSession(self._url, timeout=timeout, connector=connector) as http:
            numbers = iter(range(case.calls))
            for last in range(case.every, case.calls + 1, case.every):
                part = islice(numbers, case.every)
                await asyncio.gather(*(self._calls(http, part) for _ in range(case.connections)))
                found[last] = memory()
                note(f"{last} calls: {found[last] / 1e6:.1f} MB, {len(self.wrong)} wrong")
        return found

    async def _calls(self, http: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
        for number in numbers:
            (kind,) = self._rng.choices(list(_KINDS), list(_KINDS.values()))
            await self._call(http, number, kind)

    async def _call(self, http: aiohttp.ClientSession, number: int, kind: str) -> None:
        headers = {"Prefer": "respond-async"} if kind == "cancelled" else {}
        if number % 10 == 0:
            headers["Idempotency-Key"] = f"call {number}"
        async with http.post(_URL, json=self._body(number, kind), headers=headers) as answer:
            text = await answer.text()
        wanted = {"out of reach": (429,), "promise": (200, 429), "cancelled": (202,)}.get(kind, (200,))
        self.answers[f"{kind}, {answer.status}"] += 1
        if answer.status not in wanted:
            self.wrong.append(f"{kind}: HTTP {answer.status}: {text[:200]}")
        elif kind == "cancelled":
            async with http.delete(f"/v1/requests/{json.loads(text)['uid']}") as gone:
                await gone.read()

    def _body(self, number: int, kind: str) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {"prompt": f"picture {number}", "size": next(self._sizes), "seed": number}
        body["num_inference_steps"] = rng.choice(self._case.steps)
        match kind:
            case "deadline":
                body["slo_s"] = rng.uniform(1, 60)
            case "promise":
                body |= {"slo_s": rng.uniform(1, 60), "on_miss": "reject"}
            case "out of reach":
                body |= {"slo_s": _QUICKEST_S, "on_miss": "reject"}
        return body
