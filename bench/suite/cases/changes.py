"""What hundreds of changes of a running server leave behind: in memory, in metrics, in logs, on disk, and in time."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.cases.loras import Loras
from suite.cases.weights import save_model
from suite.server import Server, serving
from suite.stats import exact, extremes
from tilework.cli.local_agents import free_port, local_agents
from tilework.runtime.worker_process import resident_bytes

_ADMIN = {"Authorization": "Bearer bench"}
_BASE = "base"
_TOKEN = "that of the bench"
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """What there is after so many changes: bytes by what they are of, and how long each change took since the last."""

    num_changes: int
    sizes: Mapping[str, float]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """`ratios` are how long changes take after all others, over those that a new server makes in turn with them."""

    marks: list[_Mark]
    ratios: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """`changes` of each kind, one after another, each an addition and a removal; looked at after every `every`.

    Half of the kinds are done again on `nodes` nodes with as many front ends. Then `pairs` more are made in turn with
    those of a new server.
    """

    kinds: tuple[str, ...] = (
        "a LoRA",
        "a model with the same weights",
        "a model with other weights",
        "a model of clips",
    )
    changes: int = 300
    every: int = 50
    pairs: int = 20
    workers: int = 1
    nodes: int = 2
    most: float = 1.02
    most_time: float = 1.2

    @classmethod
    def make(cls, quick: bool) -> Changes:
        return cls(changes=6, every=2, pairs=2) if quick else cls()

    def measure(self, note: Note) -> Finding:
        found: dict[str, _Found] = {}
        with TemporaryDirectory(prefix="tilework-bench-") as room:
            place = Path(room)
            for seed, name in enumerate((_BASE, "other")):
                save_model(place / name, 1, seed)
            (lora,) = Loras(resident=1).save_loras(place / _BASE, place)
            bodies: dict[str, tuple[str, dict[str, object]]] = {
                "a LoRA": (f"/{_BASE}/loras", {"name": "ink", "path": str(lora)}),
                "a model with the same weights": ("", {"name": "added", "path": str(place / _BASE)}),
                "a model with other weights": ("", {"name": "added", "path": str(place / "other")}),
                "a model of clips": ("", {"name": "added", "path": "shapes-motion"}),
            }
            for index, (kind, nodes) in enumerate([*((kind, 0) for kind in self.kinds), *self._over_nodes()]):
                name = f"{kind}, {nodes} nodes" if nodes else kind
                with self._serving(place, f"{index}", nodes) as (server, sizes):
                    note(f"{name}: {self.changes} changes")
                    marks = self._changed(server, *bodies[kind], sizes)
                    note(f"{name}: {median(marks[-1].seconds):.2f} s a change at the end; now beside a new server")
                    with self._serving(place, f"{index}-new", nodes) as (new, _):
                        found[name] = _Found(marks=marks, ratios=self._in_turn(server, new, *bodies[kind]))
        return Finding(
            checks=tuple(check for kind, one in found.items() for check in self._checks(kind, one)),
            tables=tuple(_table(kind, one.marks) for kind, one in found.items()),
            method=(
                f"A durable server with {self.workers} CPU worker and --weights-memory; tiny models. Each change is a "
                "POST and a DELETE of the admin API, and the next begins when both have ended.",
                f"Sizes after {self.changes} changes over those after {self.every}: of processes (RSS), of what "
                "/metrics answers, of the cost cache, and of the durable directory without event logs. Of the "
                "event log, what the last changes have added over what the first have.",
                f"The time of a change after {self.changes}, over that of a server that was started then: {self.pairs} "
                "of each in turn, as other work makes the machine slower and faster.",
            ),
        )

    def _over_nodes(self) -> list[tuple[str, int]]:
        return [(kind, self.nodes) for kind in self.kinds[::2]]

    @contextmanager
    def _serving(self, place: Path, index: str, nodes: int) -> Iterator[tuple[Server, Callable[[], dict[str, float]]]]:
        state, costs = place / f"state-{index}", place / f"costs-{index}.sqlite"
        settings: dict[str, object] = {"admin_key": "bench", "profiles": costs, "cluster_token": _TOKEN}
        options = ["--durable", str(state), "--weights-memory", "200MB"]
        with ExitStack() as stack:
            if nodes:
                port = free_port()
                stack.enter_context(local_agents(nodes, port=port, token=_TOKEN, log=place / f"agents-{index}.log"))
                options += ["--nodes", str(nodes), "--agents", f"127.0.0.1:{port}", "--frontends", str(nodes)]
            model = f"{_BASE}={place / _BASE}"
            server = stack.enter_context(serving(self.workers, settings=settings, model=model, options=options))
            yield server, lambda: _sizes(server, state, costs)

    def _changed(
        self, server: Server, path: str, body: dict[str, object], sizes: Callable[[], dict[str, float]]
    ) -> list[_Mark]:
        marks, seconds = list[_Mark](), list[float]()
        with _client(server, path, body) as http:
            for number in range(1, self.changes + 1):
                seconds.append(_change(http, path, body))
                if number % self.every == 0:
                    marks.append(_Mark(num_changes=number, sizes=sizes(), seconds=tuple(seconds)))
                    seconds.clear()
        return marks

    def _in_turn(self, server: Server, new: Server, path: str, body: dict[str, object]) -> list[float]:
        with _client(server, path, body) as late, _client(new, path, body) as early:
            return [_change(late, path, body) / _change(early, path, body) for _ in range(self.pairs)]

    def _checks(self, kind: str, found: _Found) -> Iterator[Check]:
        marks = found.marks
        first, last = marks[0], marks[-1]
        for what, size in first.sizes.items():
            if what == _LOG:
                early, late = (after.sizes[what] - before.sizes[what] for before, after in (marks[:2], marks[-2:]))
                yield Check(what=f"{kind}: {what}, a change", measured=exact(late / early), high=self.most)
            else:
                yield Check(what=f"{kind}: {what}", measured=exact(last.sizes[what] / size), high=self.most)
        yield Check(what=f"{kind}: time of a change", measured=extremes(found.ratios), high=self.most_time)


_LOG = "event log"


@contextmanager
def _client(server: Server, path: str, body: dict[str, object]) -> Iterator[httpx.Client]:
    """What a change costs has been measured, if anything has to be."""
    with httpx.Client(base_url=server.url, headers=_ADMIN, timeout=_TIMEOUT_S) as http:
        _change(http, path, body if path else body | {"measure": True})
        yield http


def _change(http: httpx.Client, path: str, body: dict[str, object]) -> float:
    """Add something and remove it; returns how many seconds that took. Raises CaseFailed."""
    place = f"/v1/admin/models{path}"
    name = str(body["name"])
    start_s = time.perf_counter()
    for answer in (http.post(place, json=body), http.delete(f"{place}/{name}", params={"confirm": name})):
        if answer.is_error:
            raise CaseFailed(f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text}")
    return time.perf_counter() - start_s


def _sizes(server: Server, state: Path, costs: Path) -> dict[str, float]:
    metrics = httpx.get(f"{server.url}/metrics", headers=_ADMIN, trust_env=False)
    logs = {file for file in state.rglob("events-*") if file.is_file()}
    others = [file for file in state.rglob("*") if file.is_file() and file not in logs]
    return {
        **_memory(server.pid),
        "/metrics": float(len(metrics.content)),
        "cost cache": float(_database_bytes(costs)),
        "durable directory": float(sum(_database_bytes(file) for file in others)),
        _LOG: float(sum(file.stat().st_size for file in logs)),
    }


def _database_bytes(file: Path) -> int:
    """The size of a file, of a database what it holds: its pages are in the write-ahead log until that is full."""
    if file.name.endswith(("-wal", "-shm")):
        return 0
    if file.suffix != ".sqlite":
        return file.stat().st_size
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        (num_pages,), (page_bytes,) = (
            database.execute(f"PRAGMA {what}").fetchone() for what in ("page_count", "page_size")
        )
    return int(num_pages) * int(page_bytes)


def _memory(server: int) -> dict[str, float]:
    """Of the server, and of all other processes together that have the same title but for a number."""
    found = dict[str, float]()
    for pid in _children(os.getpid()):
        with suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").rstrip("\0 ")
            kind = "server" if pid == server else re.sub(r" \d+.*", "s", title.removeprefix("tilework: "))
            what = f"memory: {kind if title.startswith('tilework: ') else 'others'}"
            found[what] = found.get(what, 0.0) + (resident_bytes(pid) or 0)
    return found


def _children(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text("ascii").split()):
            found += [child, *_children(child)]
    return found


def _table(kind: str, marks: list[_Mark]) -> Table:
    return Table(
        title=f"After changes of {kind}",
        columns=("changes", *(f"{what}, kB" for what in marks[0].sizes), "s a change"),
        rows=tuple(
            (
                str(mark.num_changes),
                *(f"{size / 1000:.0f}" for size in mark.sizes.values()),
                f"{median(mark.seconds):.2f}",
            )
            for mark in marks
        ),
    )
