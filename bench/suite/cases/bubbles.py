"""How long a busy worker idles between two runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from suite.busy import Gap, Timeline, arrivals_in, pieces_of
from suite.case import Check, Finding, Note, Table
from suite.server import serving
from suite.stats import fmean, median, over_repeats, percentile
from tilework.client.drive import drive
from tilework.client.record import Record
from tilework.core.request import Shape
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
            arrivals_s = arrivals_in(log)
        timelines = {
            deadlines: [Timeline(pieces_of(records, arrivals_s)) for records in done]
            for deadlines, done in runs.items()
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
