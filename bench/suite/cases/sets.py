"""Several servers behind one registry: how soon another leads, and how long a refusal with another address takes."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.etcd import Etcd, etcd
from suite.server import Server, serving_simulated
from suite.stats import extremes, median, p99
from tilework.cost.shipped import shipped_path
from tilework.policy.placement.utilisation import UtilisationRule
from tilework.sets.address import open_registry
from tilework.sets.directory import Directory
from tilework.sets.leader import NodeManager
from tilework.sets.member import KeyOwner
from tilework.sets.records import SETS, SetRecord, encoded

_TABLE = "flux1dev_h100_eager"
_BODY = {"prompt": "x", "size": "1024x1024"}
_ASYNC = {"Prefer": "respond-async"}
_OTHER = "http://127.0.0.1:9"
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetsOfServers:
    """An etcd of three members on this machine.

    `kills` times a process that is the node manager is killed, at any time between two renewals of its lease, while
    another one waits. Then `calls` calls are refused by a full server that knows of another set, and as many by a full
    one that is alone, in turn, `rounds` times.
    """

    kills: int = 10
    rounds: int = 10
    calls: int = 50
    devices: int = 1
    backlog_s: float = 60.0
    seed: int = 0

    @classmethod
    def make(cls, quick: bool) -> SetsOfServers:
        return cls(kills=2, rounds=2, calls=10) if quick else cls()

    def measure(self, note: Note) -> Finding:
        if shutil.which("etcd") is None:
            raise CaseFailed("there is no etcd; install the Debian package etcd-server")
        with TemporaryDirectory(prefix="tilework-etcd-") as directory, etcd(Path(directory)) as registry:
            note("an etcd of three members is up")
            failover_s = asyncio.run(self._failover(registry, note))
            with_ms, alone_ms = asyncio.run(self._refusals(registry, note))
        ratio = extremes([median(one) / median(other) for one, other in zip(with_ms, alone_ms, strict=True)])
        return Finding(
            checks=(
                Check(
                    what="from the kill of the node manager to the next",
                    measured=extremes(failover_s),
                    high=5,
                    unit="s",
                ),
                Check(
                    what="a refusal that names another set",
                    measured=extremes([median(one) for one in with_ms]),
                    high=10,
                    unit="ms",
                ),
                Check(what="the same, over a refusal of a server that is alone", measured=ratio, high=1.2),
            ),
            method=(
                f"{self.kills} kills; {self.rounds} rounds of {self.calls} calls on each of two servers, in turn, one "
                "call at a time over one connection. Servers, etcd and client share the machine; devices are "
                "simulated.",
            ),
            tables=(
                Table(
                    title="Time to the answer, ms",
                    columns=("server", "median", "p99"),
                    rows=(_row("names another set", with_ms), _row("is alone", alone_ms)),
                ),
            ),
        )

    async def _failover(self, registry: Etcd, note: Note) -> list[float]:
        """Seconds from each kill until the waiting one leads."""
        rng, found = Random(self.seed), list[float]()
        own = open_registry(registry.address)
        directory = Directory(own)
        async with _beside(directory.follow()):
            for number in range(self.kills):
                with _other_manager(registry) as process:
                    await _led_by(directory, "other")
                    async with _beside(NodeManager(own, directory, "own", UtilisationRule()).run()):
                        await asyncio.sleep(1.0 + rng.random())
                        process.kill()
                        start_s = time.monotonic()
                        await _led_by(directory, "own")
                        found.append(time.monotonic() - start_s)
                        note(f"kill {number + 1}: {found[-1]:.2f} s")
        await own.close()
        return found

    async def _refusals(self, registry: Etcd, note: Note) -> tuple[list[list[float]], list[list[float]]]:
        """Milliseconds of each refusal by round: of the server among others, and of the one that is alone."""
        own = open_registry(registry.address)
        record = encoded(SetRecord(url=_OTHER, models=("flux.1-dev",), is_open=True, devices_up=1))
        other = KeyOwner(own, f"{SETS}other", lambda _lease: record)
        found: tuple[list[list[float]], list[list[float]]] = ([], [])
        with ExitStack() as stack:
            registered = stack.enter_context(self._server({"set_name": "own", "registry": registry.address}))
            alone = stack.enter_context(self._server({}))
            async with _beside(other.run()), _client(registered) as with_others, _client(alone) as without:
                await _until(lambda: _knows_other(with_others))
                for number in range(self.rounds):
                    for http, times, named in ((with_others, found[0], True), (without, found[1], False)):
                        times.append([await _refusal_ms(http, named) for _ in range(self.calls)])
                    note(f"round {number + 1}: {median(found[0][-1]):.2f} and {median(found[1][-1]):.2f} ms")
        await own.close()
        return found

    @contextmanager
    def _server(self, settings: dict[str, object]) -> Iterator[Server]:
        table = shipped_path(_TABLE)
        assert table is not None
        limits: dict[str, object] = {"max_backlog_s": self.backlog_s, "drain_s": 0}
        with TemporaryDirectory() as directory:
            log = Path(directory) / "events.jsonl"
            with serving_simulated(self.devices, table, "edf", log, limits | settings) as server:
                yield server


async def _refusal_ms(http: httpx.AsyncClient, is_named: bool) -> float:
    """How long a refusal took; what is accepted fills the server again."""
    while True:
        start_s = time.perf_counter()
        answer = await http.post("/v1/images/generations", json=_BODY, headers=_ASYNC)
        took_s = time.perf_counter() - start_s
        if answer.status_code == 429:
            break
    if ("alternate" in answer.links) is not is_named:
        raise CaseFailed(f"a refusal names {'no' if is_named else 'an'} other set: {answer.text}")
    return 1e3 * took_s


async def _knows_other(http: httpx.AsyncClient) -> bool:
    listed = (await http.get("/v1/sets")).json()
    return any(one["name"] == "other" for one in listed["data"])


def _client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=_PATIENCE_S, trust_env=False)


def manage(address: str) -> None:
    """Try to be the node manager, for ever: what is killed."""

    async def main() -> None:
        registry = open_registry(address)
        await NodeManager(registry, Directory(registry), "other", UtilisationRule()).run()

    asyncio.run(main())


@contextmanager
def _other_manager(registry: Etcd) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, so that nothing of it is tidied up when it is killed."""
    program = f"from {__name__} import manage; manage({registry.address!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


async def _led_by(directory: Directory, name: str) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        await directory.until(lambda: (directory.leader is not None and directory.leader.set == name) or None)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.05)


@asynccontextmanager
async def _beside(chore: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do this while the block runs."""
    task = asyncio.get_running_loop().create_task(chore)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def _row(name: str, rounds: list[list[float]]) -> tuple[str, ...]:
    times = [one for some in rounds for one in some]
    return name, f"{median(times):.2f}", f"{p99(times):.2f}"
