"""What hundreds of changes of a running server leave behind: in memory, in metrics, in logs, on disk, and in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from tilework.runtime.worker_process import resident_bytes

_ADMIN = {"Authorization": "Bearer bench"}
_BASE = "base"
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """What there is after so many changes: bytes by what they are of, and how long each change since the last mark
    took."""

    num_changes: int
    sizes: Mapping[str, float]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """`changes` of each kind, one after another, each an addition and a removal; looked at after every `every`."""

    kinds: tuple[str, ...] = (
        "a LoRA",
        "a model with the same weights",
        "a model with other weights",
        "a model of clips",
    )
    changes: int = 300
    every: int = 50
    workers: int = 1
    most: float = 1.02
    most_time: float = 1.2

    @classmethod
    def make(cls, quick: bool) -> Changes:
        return cls(changes=6, every=2) if quick else cls()

    def measure(self, note: Note) -> Finding:
        found: dict[str, list[_Mark]] = {}
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
            for index, kind in enumerate(self.kinds):
                with self._serving(place, index) as (server, sizes):
                    note(f"{kind}: {self.changes} changes")
                    found[kind] = self._changed(server, *bodies[kind], sizes)
                    note(f"{kind}: {median(found[kind][-1].seconds):.2f} s a change at the end")
        return Finding(
            checks=tuple(check for kind, marks in found.items() for check in self._checks(kind, marks)),
            tables=tuple(_table(kind, marks) for kind, marks in found.items()),
            method=(
                f"A durable server with {self.workers} CPU worker and --weights-memory; tiny models. Each change is a "
                "POST and a DELETE of the admin API, and the next begins when both have ended.",
                f"Sizes after {self.changes} changes over those after {self.every}: of processes (RSS), of what "
                "/metrics answers, of the cost cache, and of the durable directory without event logs. Of the "
                "event log, what the last changes have added over what the first have.",
            ),
        )

    @contextmanager
    def _serving(self, place: Path, index: int) -> Iterator[tuple[Server, Callable[[], dict[str, float]]]]:
        state, costs = place / f"state-{index}", place / f"costs-{index}.sqlite"
        settings = {"admin_key": "bench", "profiles": costs}
        options = ["--durable", str(state), "--weights-memory", "200MB"]
        with serving(self.workers, settings=settings, model=f"{_BASE}={place / _BASE}", options=options) as server:
            yield server, lambda: _sizes(server, state, costs)

    def _changed(
        self, server: Server, path: str, body: dict[str, object], sizes: Callable[[], dict[str, float]]
    ) -> list[_Mark]:
        marks, seconds = list[_Mark](), list[float]()
        with httpx.Client(base_url=server.url, headers=_ADMIN, timeout=_TIMEOUT_S) as http:
            if not path:
                _change(http, path, body | {"measure": True})  # Its costs are measured once.
            for number in range(1, self.changes + 1):
                start_s = time.perf_counter()
                _change(http, path, body)
                seconds.append(time.perf_counter() - start_s)
                if number % self.every == 0:
                    marks.append(_Mark(num_changes=number, sizes=sizes(), seconds=tuple(seconds)))
                    seconds.clear()
        return marks

    def _checks(self, kind: str, marks: list[_Mark]) -> Iterator[Check]:
        first, last = marks[0], marks[-1]
        for what, size in first.sizes.items():
            if what == _LOG:
                early, late = (after.sizes[what] - before.sizes[what] for before, after in (marks[:2], marks[-2:]))
                yield Check(what=f"{kind}: {what}, a change", measured=exact(late / early), high=self.most)
            else:
                yield Check(what=f"{kind}: {what}", measured=exact(last.sizes[what] / size), high=self.most)
        ratios = [seconds / median(first.seconds) for seconds in last.seconds]
        yield Check(what=f"{kind}: time of a change", measured=extremes(ratios), high=self.most_time)


_LOG = "event log"


def _change(http: httpx.Client, path: str, body: dict[str, object]) -> None:
    """Add something and remove it. Raises CaseFailed."""
    place = f"/v1/admin/models{path}"
    name = str(body["name"])
    for answer in (http.post(place, json=body), http.delete(f"{place}/{name}", params={"confirm": name})):
        if answer.is_error:
            raise CaseFailed(f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text}")


def _sizes(server: Server, state: Path, costs: Path) -> dict[str, float]:
    metrics = httpx.get(f"{server.url}/metrics", headers=_ADMIN, trust_env=False)
    files = [file for file in state.rglob("*") if file.is_file()]
    is_log = [file.name.startswith("events-") for file in files]
    sizes = [file.stat().st_size for file in files]
    return {
        "memory of the server": float(resident_bytes(server.pid) or 0),
        "memory of its processes": float(sum(resident_bytes(pid) or 0 for pid in _children(server.pid))),
        "/metrics": float(len(metrics.content)),
        "cost cache": float(costs.stat().st_size),
        "durable directory": float(sum(size for size, log in zip(sizes, is_log, strict=True) if not log)),
        _LOG: float(sum(size for size, log in zip(sizes, is_log, strict=True) if log)),
    }


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
