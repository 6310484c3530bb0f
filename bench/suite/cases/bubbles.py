"""How long a busy worker idles between two runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.server import serving
from suite.stages import DIFFUSE
from suite.stats import fmean, median, over_repeats, percentile
from tilework.client.drive import drive
from tilework.client.record import Record
from tilework.control.history_recorder import read_history
from tilework.core.request import Shape
from tilework.core.time import s_from_ns
from tilework.formats.workload import WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubbles:
    """`repeats` times `requests` at once of the `sides` in turn, without and with deadlines (`slos_s`)."""

    workers: int = 2
    requests: int = 16
    repeats: int = 3
    sides: tuple[int, ...] = (128, 192)
    steps: int = 20
    slos_s: tuple[float, float] = (5.0, 30.0)
    seed: int = 1
    policy: str = "edf"  # One device per work and one request per device: a gap lies between two works of one worker.

    @classmethod
    def make(cls, quick: bool) -> Bubbles:
        return cls(requests=8, repeats=1, steps=10) if quick else cls()

    def measure(self, note: Note) -> Finding:
        rng = Random(self.seed)
        with TemporaryDirectory() as folder:
            log = Path(folder) / "events.jsonl"
            with serving(self.workers, log, policy=self.policy) as server:
                note(f"server ready in {server.ready_s:.1f} s")
                asyncio.run(drive(server.url, self._workload(rng, deadlines=False)[: 2 * self.workers]))
                runs: dict[bool, list[list[Record]]] = {False: [], True: []}
                for index in range(self.repeats):
                    for deadlines, done in runs.items():
                        note(f"repeat {index + 1}, {_name(deadlines)}")
                        done.append(asyncio.run(drive(server.url, self._workload(rng, deadlines))))
            arrivals_s = _arrivals_s(log)
        timelines = {
            deadlines: [Timeline(_pieces(records, arrivals_s)) for records in done] for deadlines, done in runs.items()
        }
        return self._finding(timelines)

    def _workload(self, rng: Random, deadlines: bool) -> list[WorkloadRequest]:
        return [
            WorkloadRequest(
                arrival_s=0.0,
                pipeline="shapes",
                height=self.sides[index % len(self.sides)],
                width=self.sides[index % len(self.sides)],
                steps=self.steps,
                slo_s=round(rng.uniform(*self.slos_s), 3) if deadlines else None,
                seed=rng.randrange(2**31),
                prompt="a small green cross on a white background",
            )
            for index in range(self.requests)
        ]

    def _finding(self, timelines: dict[bool, list[Timeline]]) -> Finding:
        checks: list[Check] = []
        rows: list[tuple[str, ...]] = []
        facts: dict[str, str] = {}
        for deadlines, repeats in timelines.items():
            name, step_s = _name(deadlines), _median_steps_s(repeats)
            gaps = [[gap.seconds / step_s[gap.shape] * 100 for gap in one.gaps] for one in repeats]
            measured = over_repeats(gaps, fmean)
            checks.append(Check(what=f"{name}: mean gap / median step", measured=measured, high=2.0, unit="%"))
            rows += _rows(name, [gap for one in repeats for gap in one.gaps], step_s)
            facts[f"{name}: idle share of busy workers, per repeat"] = ", ".join(
                f"{one.idle_share:.3%}" for one in repeats
            )
            facts[f"{name}: median step"] = ", ".join(f"{size} {s * 1e3:.2f} ms" for size, s in step_s.items())
        table = Table(
            title="Gaps by what came before and after, in ms",
            columns=("case", "gaps", "mean", "median", "p99", "mean of gap / step"),
            rows=tuple(rows),
        )
        method = (
            f"All {self.requests} requests are sent at once to {self.workers} workers of one thread; times of works "
            "are the workers' own, from the answers, put on one clock by the arrivals in the event log.",
            "A gap lies between the end of a work and the start of the next one on the same worker. It counts if a "
            "request was waiting all the while: in the system, and not running on another worker.",
            "Goal: mean of the gaps, each relative to the median step of the size that runs after it. The idle share "
            "is sum of gaps / (sum of gaps + works before them).",
            "Server and client run on the same cores as the workers, and count as what they cost.",
        )
        return Finding(checks=tuple(checks), method=method, tables=(table,), facts=facts)


def _name(deadlines: bool) -> str:
    return "with deadlines" if deadlines else "no deadlines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One executed work, on the engine's clock."""

    request: int
    shape: Shape
    stage: str
    device: int
    steps: int
    arrival_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Between two works of a device; `shape` is the second one's, `moved` says that it ran elsewhere before."""

    kind: str
    shape: Shape
    seconds: float
    before_s: float
    moved: bool


class Timeline:
    """What each device did in one saturated run. `step_s` holds the seconds of every denoising step, by size."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece.start_s)
        self._last_s = {piece.request: piece.end_s for piece in self._pieces}
        self.gaps = tuple(self._gaps())
        self.step_s: dict[Shape, list[float]] = {}
        for piece in pieces:
            if piece.stage == DIFFUSE:
                seconds = (piece.end_s - piece.start_s) / piece.steps
                self.step_s.setdefault(piece.shape, []).extend([seconds] * piece.steps)

    @property
    def idle_share(self) -> float:
        idle_s = sum(gap.seconds for gap in self.gaps)
        return idle_s / (idle_s + sum(gap.before_s for gap in self.gaps))

    def _gaps(self) -> Iterator[Gap]:
        for device in sorted({piece.device for piece in self._pieces}):
            for before, after in pairwise(piece for piece in self._pieces if piece.device == device):
                if self._work_waited(before, after):
                    yield Gap(
                        kind=_kind(before, after),
                        shape=after.shape,
                        seconds=after.start_s - before.end_s,
                        before_s=before.end_s - before.start_s,
                        moved=self._device_before(after) not in (None, device),
                    )

    def _work_waited(self, before: Piece, after: Piece) -> bool:
        """Whether some request could have run here from the one work's end to the other's start."""
        elsewhere = {
            piece.request
            for piece in self._pieces
            if piece.device != before.device and piece.start_s < after.start_s and piece.end_s > before.end_s
        }
        here = {piece.request for piece in self._pieces if piece.arrival_s <= before.end_s} - elsewhere
        return any(self._last_s[request] > after.start_s for request in here)

    def _device_before(self, piece: Piece) -> int | None:
        former = [p.device for p in self._pieces if p.request == piece.request and p.end_s <= piece.start_s]
        return former[-1] if former else None


def _kind(before: Piece, after: Piece) -> str:
    return "same request" if before.request == after.request else "another request"


def _pieces(records: list[Record], arrivals_s: dict[str, float]) -> list[Piece]:
    """Raises CaseFailed if a request got no picture."""
    pieces = []
    for record in records:
        if record.timeline is None:
            raise CaseFailed(f"request {record.index} got no picture: {record.detail}")
        arrival_s = arrivals_s[record.timeline["uid"]]
        for segment in record.timeline["segments"]:
            (device,) = segment["devices"]
            pieces.append(
                Piece(
                    request=record.index,
                    shape=record.shape,
                    stage=segment["stage"],
                    device=device,
                    steps=segment["steps"],
                    arrival_s=arrival_s,
                    start_s=arrival_s + segment["start_s"],
                    end_s=arrival_s + segment["end_s"],
                )
            )
    return pieces


def _arrivals_s(log: Path) -> dict[str, float]:
    with log.open(encoding="utf-8") as lines:
        history = read_history(lines)
    return {past.request.uid: s_from_ns(past.request.arrival_ns) for past in history.requests}


def _rows(case: str, gaps: list[Gap], step_s: dict[Shape, float]) -> list[tuple[str, ...]]:
    """Also by whether the state came from the other worker, which is what a gap would be blamed on."""
    parts = {
        "all": gaps,
        "same request": [gap for gap in gaps if gap.kind == "same request"],
        "another request": [gap for gap in gaps if gap.kind == "another request" and not gap.moved],
        "state moved here": [gap for gap in gaps if gap.moved],
    }
    return [_row(f"{case}: {part}", some, step_s) for part, some in parts.items() if some]


def _row(label: str, gaps: list[Gap], step_s: dict[Shape, float]) -> tuple[str, ...]:
    seconds = [gap.seconds for gap in gaps]
    figures = (fmean(seconds), percentile(seconds, 50), percentile(seconds, 99))
    share = fmean(gap.seconds / step_s[gap.shape] for gap in gaps)
    return label, str(len(gaps)), *(f"{figure * 1e3:.3f}" for figure in figures), f"{share:.2%}"


def _median_steps_s(repeats: list[Timeline]) -> dict[Shape, float]:
    shapes = sorted({shape for one in repeats for shape in one.step_s})
    return {shape: median([s for one in repeats for s in one.step_s.get(shape, [])]) for shape in shapes}
