"""A registry that is silent, wrong, wiped or slow, again and again: which nodes move, and which requests are lost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.etcd import Etcd, etcd
from suite.registry_proxy import RegistryProxy, registry_proxy
from suite.stats import exact, extremes
from tilework.cli.local_agents import session
from tilework.cli.options.nodes import TOKEN

FAULTS = ("silent", "wrong", "wiped", "slow")
_TABLE = "flux1dev_h100_eager"
_TOKEN = "for this bench"
_BODY = {"prompt": "x", "size": "512x512"}
_PATIENCE_S = 120.0
_LOOK_S = 0.25
_NOTICED_S = 10.0  # From then on a server must know that the registry does not answer.
Places = Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryFaults:
    """Two servers with three nodes between them, and one etcd behind a proxy.

    `faults` faults, one kind after the other, each for one of `lengths_s` in turn. Set a has two nodes, which work all
    the time, and places for no more; set b has one, which is idle, and places for three. So nothing is to move.
    """

    faults: int = 40
    lengths_s: tuple[float, ...] = (5.0, 12.0, 25.0, 40.0, 60.0)
    calm_s: float = 15.0
    window_s: int = 10
    late_s: tuple[float, float] = (0.5, 3.0)
    clients: int = 4
    seed: int = 0

    @classmethod
    def make(cls, quick: bool) -> RegistryFaults:
        return cls(faults=4, lengths_s=(5.0,)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        if shutil.which("etcd") is None:
            raise CaseFailed("there is no etcd; install the Debian package etcd-server")
        with TemporaryDirectory(prefix="tilework-etcd-") as folder, etcd(Path(folder), 1) as registry:
            found, late_s = asyncio.run(self._measure(registry, Path(folder), note))
        trials, traffic = found
        lost = sum(one.num_moved for one in trials)
        return Finding(
            checks=(
                Check(what="nodes that were not at their server for a moment", measured=exact(lost), high=0),
                Check(
                    what="servers that called their copy current in a fault of 10 s and more, slow ones but",
                    measured=exact(sum(one.num_unnoticed for one in trials)),
                    high=0,
                ),
                Check(
                    what="from the end of a fault until all is as before",
                    measured=extremes([one.back_s for one in trials]),
                    high=30,
                    unit="s",
                ),
                Check(what=f"requests lost, of {traffic.num_sent}", measured=exact(traffic.num_lost), high=0),
                Check(
                    what="from the start of a third server to its first node, after all faults",
                    measured=exact(late_s),
                    high=60,
                    unit="s",
                ),
            ),
            method=(
                f"Two servers, three agents, an etcd and {self.clients} clients on one machine; devices are simulated. "
                f"Before the next fault {self.calm_s:g} s pass; the node manager's window is {self.window_s} s. "
                "Silent: etcd is stopped. Wrong: a page answers in its place. Wiped: it begins again with nothing. "
                f"Slow: each answer takes {self.late_s[0]:g} to {self.late_s[1]:g} s.",
            ),
            tables=(_by_kind(trials),),
        )

    async def _measure(self, registry: Etcd, folder: Path, note: Note) -> tuple[tuple[list[_Trial], _Traffic], float]:
        traffic, trials = _Traffic(), list[_Trial]()
        async with registry_proxy(registry.ports[0], Random(self.seed)) as proxy:
            with _cluster(proxy.port, self.window_s, folder) as cluster:
                await cluster.start_two()
                before = await cluster.until(lambda places: len(places["a"]) == 2 and len(places["b"]) == 1)
                note(f"a has {', '.join(sorted(before['a']))}, b {', '.join(sorted(before['b']))}")
                async with traffic.beside(cluster.urls["a"], self.clients):
                    for number in range(self.faults):
                        kind = FAULTS[number % len(FAULTS)]
                        length_s = self.lengths_s[number % len(self.lengths_s)]
                        trial = await self._trial(kind, length_s, registry, proxy, cluster, before)
                        trials.append(trial)
                        note(
                            f"{number + 1}: {kind} for {length_s:g} s, {trial.num_moved} moved, "
                            f"back after {trial.back_s:.1f} s, {traffic.num_lost} of {traffic.num_sent} requests lost"
                        )
                start_s = time.monotonic()
                cluster.serve("c", 1)
                await cluster.until(lambda places: len(places.get("c", ())) == 1)
                late_s = time.monotonic() - start_s
        return (trials, traffic), late_s

    async def _trial(
        self, kind: str, length_s: float, registry: Etcd, proxy: RegistryProxy, cluster: _Cluster, before: Places
    ) -> _Trial:
        away, trial = set[str](), _Trial(kind=kind, length_s=length_s)
        async with _beside(cluster.watch(before, away)):
            await asyncio.to_thread(_begin, kind, registry, proxy, self.late_s)
            await asyncio.sleep(length_s)
            if length_s >= _NOTICED_S and kind != "slow":
                trial.num_unnoticed = sum([(await cluster.sets(name))["is_current"] for name in "ab"])
            await asyncio.to_thread(_end, kind, registry, proxy)
            start_s = time.monotonic()
            await cluster.until(lambda places: places == before, needs_routes=True)
            trial.back_s = time.monotonic() - start_s
            await asyncio.sleep(self.calm_s)
        trial.num_moved = len(away)
        return trial


@dataclass(slots=True, kw_only=True)
class _Trial:
    """What a fault has done: nodes that were away from their set, servers that did not notice it, when it was over."""

    kind: str
    length_s: float
    num_moved: int = 0
    num_unnoticed: int = 0
    back_s: float = 0.0


def _begin(kind: str, registry: Etcd, proxy: RegistryProxy, late_s: tuple[float, float]) -> None:
    match kind:
        case "silent":
            registry.suspend(0)
        case "wrong":
            proxy.is_foreign = True
            proxy.cut()
        case "wiped":
            registry.kill(0)
            registry.wipe(0)
        case "slow":
            proxy.late_s = late_s


def _end(kind: str, registry: Etcd, proxy: RegistryProxy) -> None:
    match kind:
        case "silent":
            registry.resume(0)
        case "wrong":
            proxy.is_foreign = False
        case "wiped":
            registry.start(0)
            registry.await_health()
        case "slow":
            proxy.late_s = None


@dataclass(slots=True)
class _Traffic:
    """Requests one after another, of several clients."""

    num_sent: int = 0
    num_lost: int = 0

    @asynccontextmanager
    async def beside(self, url: str, num_clients: int) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, trust_env=False) as http:
            ends = asyncio.Event()
            tasks = [asyncio.create_task(self._send(http, ends)) for _ in range(num_clients)]
            try:
                yield
            finally:
                ends.set()
                await asyncio.gather(*tasks)

    async def _send(self, http: httpx.AsyncClient, ends: asyncio.Event) -> None:
        while not ends.is_set():
            self.num_sent += 1
            try:
                answer = await http.post("/v1/images/generations", json=_BODY)
                self.num_lost += not answer.is_success
            except httpx.HTTPError:
                self.num_lost += 1


@dataclass(slots=True, kw_only=True)
class _Cluster:
    """Servers by the name of their set, and agents, which know the registry by the port of its proxy."""

    port: int
    window_s: int
    folder: Path
    servers: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    agents: list[subprocess.Popen[str]] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)

    async def start_two(self) -> None:
        self.serve("a", 2)
        self.serve("b", 3)
        self.agents += [self._start(f"agent{number}", "agent") for number in range(3)]
        for name in "ab":
            line = await asyncio.to_thread(_first_line, self.servers[name])
            if not line:
                raise CaseFailed(f"server {name} did not start")
            self.urls[name] = json.loads(line)["url"]

    def serve(self, name: str, num_nodes: int) -> None:
        words = ["serve", "--port", "0", "--json", "--set", name, "--backend", "modelled", "--workers", "1"]
        words += ["--cost", _TABLE, "--nodes", str(num_nodes), "--least-nodes", "1", "--agents", "127.0.0.1:0"]
        self.servers[name] = self._start(name, *words)

    def _start(self, name: str, *words: str) -> subprocess.Popen[str]:
        settings = {
            TOKEN: _TOKEN,
            "TILEWORK_REGISTRY": f"etcd://127.0.0.1:{self.port}",
            "TILEWORK_SET_WINDOW_S": str(self.window_s),
        }
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TILEWORK_")} | settings
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tilework", *words],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )

    async def sets(self, by: str) -> Any:
        async with httpx.AsyncClient(base_url=self.urls[by], timeout=_PATIENCE_S, trust_env=False) as http:
            return (await http.get("/v1/sets")).json()

    async def own_nodes(self, name: str) -> frozenset[str]:
        """Those that are connected to a server now."""
        (card,) = [one for one in (await self.sets(name))["data"] if one["name"] == name]
        return frozenset(one["name"] for one in card["nodes"] if one["utilisation"] is not None)

    async def watch(self, before: Places, away: set[str]) -> None:
        """Note which nodes are not at their server, for ever."""
        while True:
            for name in "ab":
                away |= before[name] - await self.own_nodes(name)
            await asyncio.sleep(_LOOK_S)

    async def until(self, holds: Any, *, needs_routes: bool = False) -> Places:
        """The nodes of each set, as soon as this holds of them, both servers agree, and know their routes."""
        end_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end_s:
            listed = [await self.sets(name) for name in "ab"]
            seen = [_places(one) for one in listed]
            routed = all(node["epoch"] for one in listed for card in one["data"] for node in card["nodes"])
            is_known = all(one["is_current"] for one in listed) and seen[0] == seen[1]
            if is_known and holds(seen[0]) and (routed or not needs_routes):
                return seen[0]
            await asyncio.sleep(_LOOK_S)
        raise CaseFailed(f"after {_PATIENCE_S:g} s the nodes are {seen}; the sets are {listed}")

    def close(self) -> None:
        for process in (*self.servers.values(), *self.agents):
            for pid in session(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            process.wait()


def _places(listed: Any) -> Places:
    return {
        card["name"]: frozenset(node["name"] for node in card["nodes"] if node["utilisation"] is not None)
        for card in listed["data"]
    }


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@contextmanager
def _cluster(port: int, window_s: int, folder: Path) -> Iterator[_Cluster]:
    cluster = _Cluster(port=port, window_s=window_s, folder=folder)
    try:
        yield cluster
    finally:
        cluster.close()


@asynccontextmanager
async def _beside(chore: Any) -> AsyncIterator[None]:
    task = asyncio.ensure_future(chore)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def _by_kind(trials: list[_Trial]) -> Table:
    rows = []
    for kind in FAULTS:
        of = [one for one in trials if one.kind == kind]
        if of:
            lengths = ", ".join(f"{one.length_s:g}" for one in of)
            back = max(one.back_s for one in of)
            rows.append((kind, lengths, str(sum(one.num_moved for one in of)), f"{back:.1f}"))
    return Table(
        title="By fault", columns=("the registry is", "for, s", "nodes away", "as before after, s"), rows=tuple(rows)
    )
