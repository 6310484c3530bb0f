"""What floods by one tenant, or without a key, cost another tenant; and what they leave behind."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

from suite.attacker import KINDS
from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.server import Server, serving_simulated
from suite.stats import extremes, median, percentile
from tilework.cost.shipped import shipped_path

_KEYS = '[tenants.one]\nkeys = ["key-one"]\n[tenants.other]\nkeys = ["key-other"]\n'
_BODY = {"prompt": "x", "size": "512x512", "num_inference_steps": 4}
_TIMES, _MEMORY = 2.0, 1.05
_DONE_S = 120.0
_TTL_S = 45  # Records live twice as long: there are as many at the end as after the warm-up, and each is seen once.


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Calls of the other tenant: how long each took until it was accepted, and their uids."""

    answers_ms: list[float]
    uids: list[str]
    num_refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Siege:
    """Each kind of flood for `seconds`, in turns with as long a quiet time; another tenant makes `rate` calls a second.

    The server may have `files` open.
    """

    kinds: tuple[str, ...] = KINDS
    seconds: float = 60.0
    rate: float = 4.0
    repeats: int = 1
    files: int = 1024
    devices: int = 8
    policy: str = "tilework"
    table: str = "flux1dev_h100_eager"

    @classmethod
    def make(cls, quick: bool) -> Siege:
        return cls(seconds=5.0) if quick else cls()

    def measure(self, note: Note) -> Finding:
        checks: list[Check] = []
        rows: list[tuple[str, ...]] = []
        for kind in self.kinds:
            with self._serving() as server:
                checks += asyncio.run(self._besiege(server, kind, rows, note))
        return Finding(
            checks=tuple(checks),
            method=(
                f"`tilework serve --backend modelled` with {self.devices} devices, which take as long as the cost "
                f"table says, `--durable`, two tenants with keys, {self.files} open files, and records of ended calls "
                f"for {2 * _TTL_S} s. For each kind a server of its own, a flood as warm-up, then turns: quiet, flood. "
                "The attacker is one process (`suite.attacker`: 1,000 connections a second, or 8 clients that come "
                "again at once), on the same cores as the server, so that what it takes is partly the cores.",
            ),
            tables=(
                Table(
                    title="Until a call of the other tenant is accepted, in ms",
                    columns=("turn", "median", "p95", "largest", "calls", "refused", "the flood"),
                    rows=tuple(rows),
                ),
            ),
        )

    @contextmanager
    def _serving(self) -> Iterator[Server]:
        table = shipped_path(self.table)
        assert table is not None
        with TemporaryDirectory() as folder:
            place = Path(folder)
            tenants = place / "tenants.toml"
            tenants.write_text(_KEYS)
            settings = {"tenants": tenants, "durable": place / "state", "drain_s": 0.2, "result_ttl_s": _TTL_S}
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.files, before[1]))
            try:
                with serving_simulated(self.devices, table, self.policy, place / "log", settings) as server:
                    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (self.files, self.files))
                    resource.setrlimit(resource.RLIMIT_NOFILE, before)
                    yield server
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)

    async def _besiege(self, server: Server, kind: str, rows: list[tuple[str, ...]], note: Note) -> list[Check]:
        headers = {"Authorization": "Bearer key-other", "Prefer": "respond-async"}
        turns: dict[bool, list[Turn]] = {False: [], True: []}
        async with aiohttp.ClientSession(server.url, headers=headers, timeout=aiohttp.ClientTimeout(60)) as http:
            await self._turn(http, server, kind, self.seconds)
            before_bytes = _resident_bytes(server)
            for repeat in range(self.repeats):
                for is_flood in (False, True):
                    turn, sent = await self._turn(http, server, kind if is_flood else None, self.seconds)
                    turns[is_flood].append(turn)
                    await _all_done(http, turn.uids)
                    rows.append(_row(f"{kind if is_flood else 'quiet'} {repeat + 1}", turn, sent))
                    note(" | ".join(rows[-1]))
        after_bytes, num_done = _resident_bytes(server), sum(len(turn.uids) for each in turns.values() for turn in each)
        note(f"{kind}: memory {before_bytes >> 20} to {after_bytes >> 20} MiB, {num_done} calls done")
        ratios = [
            median(flood.answers_ms) / median(quiet.answers_ms)
            for quiet, flood in zip(turns[False], turns[True], strict=True)
        ]
        return [
            Check(what=f"{kind}: median until accepted, flood / quiet", measured=extremes(ratios), high=_TIMES),
            Check(what=f"{kind}: memory after / before", measured=extremes([after_bytes / before_bytes]), high=_MEMORY),
        ]

    async def _turn(
        self, http: aiohttp.ClientSession, server: Server, kind: str | None, seconds: float
    ) -> tuple[Turn, str]:
        """Calls of the other tenant; beside them a flood, and what that says it has sent."""
        flood = None
        if kind is not None:
            command = (sys.executable, "-m", "suite.attacker", server.url, "key-one", kind, f"{seconds + 2:g}")
            path = os.pathsep.join(sys.path)
            flood = await asyncio.create_subprocess_exec(
                *command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
            )
            await asyncio.sleep(2)  # Until it has begun.
        turn = await self._calls(http, seconds)
        if flood is None:
            return turn, ""
        told, _ = await flood.communicate()
        await _cancel_all(server)
        return turn, told.decode().strip()

    async def _calls(self, http: aiohttp.ClientSession, seconds: float) -> Turn:
        answers_ms, uids, num_refused = list[float](), list[str](), 0
        end_s = time.monotonic() + seconds
        while (begin_s := time.monotonic()) < end_s:
            async with http.post("/v1/images/generations", json=_BODY) as answer:
                await answer.read()
            answers_ms.append(1e3 * (time.monotonic() - begin_s))
            if answer.status == 202:
                uids.append(answer.headers["x-request-id"])
            else:
                num_refused += 1
            await asyncio.sleep(max(0.0, begin_s + 1 / self.rate - time.monotonic()))
        return Turn(answers_ms=answers_ms, uids=uids, num_refused=num_refused)


async def _all_done(http: aiohttp.ClientSession, uids: list[str]) -> None:
    """Raises CaseFailed if a call does not end as it would have."""
    end_s = time.monotonic() + _DONE_S
    for uid in uids:
        while True:
            async with http.get(f"/v1/requests/{uid}") as answer:
                status = (await answer.json()).get("status", "unknown")
            if status == "done":
                break
            if status not in ("queued", "running") or time.monotonic() > end_s:
                raise CaseFailed(f"the accepted call {uid} is {status}")
            await asyncio.sleep(0.05)


async def _cancel_all(server: Server) -> None:
    """End what the attacker has left: the devices are for the others."""
    headers = {"Authorization": "Bearer key-one"}
    async with aiohttp.ClientSession(server.url, headers=headers, timeout=aiohttp.ClientTimeout(60)) as http:
        async with http.get("/v1/batches?limit=100") as answer:
            batches = (await answer.json())["data"]
        for one in batches:
            if one["status"] in ("validating", "in_progress"):
                async with http.post(f"/v1/batches/{one['id']}/cancel") as answer:
                    await answer.read()
        found, after = list[str](), ""
        while True:
            async with http.get(f"/v1/requests?limit=100{after}") as answer:
                page = await answer.json()
            found += [one["uid"] for one in page["data"] if one["status"] in ("queued", "running")]
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        for uid in found:
            async with http.delete(f"/v1/requests/{uid}") as answer:
                await answer.read()


def _row(name: str, turn: Turn, sent: str) -> tuple[str, ...]:
    times = turn.answers_ms
    shown = (f"{one:.1f}" for one in (median(times), percentile(times, 95), max(times)))
    return (name, *shown, f"{len(turn.uids)}", f"{turn.num_refused}", sent)


def _resident_bytes(server: Server) -> int:
    return int(Path(f"/proc/{server.pid}/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
