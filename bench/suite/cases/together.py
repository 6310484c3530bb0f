"""Mixed traffic on a live server that batches, against one that does not."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from suite.case import CaseFailed, Check, Finding, Note, Picture, Table
from suite.server import serving, tilework_json
from suite.stats import extremes
from tilework.client.demo_workload import demo_prompt
from tilework.client.drive import drive
from tilework.client.mix import mixed_workload, parse_sizes
from tilework.client.record import Record
from tilework.formats.workload import WorkloadRequest

_SIDES = ("together", "one by one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """`requests` of these `sizes`, half of them due after `slo_s`, in Poisson arrivals, to either server in turn."""

    seeds: tuple[int, ...] = (1, 2, 3)
    requests: int = 60
    rate_per_s: float = 9.0
    sizes: str = "64:2,96,128x96,96x128,128,192"
    steps: tuple[int, ...] = (8, 12, 20)
    slo_s: float = 4.0

    @classmethod
    def make(cls, quick: bool) -> Together:
        return cls(seeds=(1,), requests=20) if quick else cls()

    def measure(self, note: Note) -> Finding:
        runs: dict[str, list[list[Record]]] = {side: [] for side in _SIDES}
        with TemporaryDirectory() as folder:
            log = Path(folder) / "events.jsonl"
            with serving(1, log, {"max_batch": 12}) as batching, serving(1, settings={"max_batch": 1}) as plain:
                for turn, seed in enumerate(self.seeds):
                    pairs = list(zip(_SIDES, (batching, plain), strict=True))
                    for side, server in pairs if turn % 2 == 0 else pairs[::-1]:
                        note(f"seed {seed}, {side}")
                        runs[side].append(_drive(server.url, self.workload(seed)))
            timeline = _timeline(log, Path(folder) / "timeline.png")
        return self._finding(runs, timeline)

    def workload(self, seed: int) -> list[WorkloadRequest]:
        """With steps, guidance and deadlines of their own."""
        rng = Random(f"together {seed}")
        arrivals, now_s = [], 0.0
        for _ in range(self.requests):
            now_s += rng.expovariate(self.rate_per_s)
            arrivals.append(now_s)
        prompts = [demo_prompt(rng) for _ in range(self.requests)]
        mixed = mixed_workload(
            arrivals, parse_sizes(self.sizes), pipeline="shapes", steps=self.steps[0], prompts=prompts, seed=seed
        )
        return [
            replace(one, steps=rng.choice(self.steps), slo_s=self.slo_s if index % 2 else None)
            for index, one in enumerate(mixed)
        ]

    def _finding(self, runs: dict[str, list[list[Record]]], timeline: Picture) -> Finding:
        together, alone = (runs[side] for side in _SIDES)
        leads = [100 * (_on_time(a) - _on_time(b)) for a, b in zip(together, alone, strict=True)]
        spans = [_span_s(b) / _span_s(a) for a, b in zip(together, alone, strict=True)]
        shared = [_shared(records) for records in together]
        differences = [
            _difference(a, b)
            for records, others in zip(together, alone, strict=True)
            for a, b in zip(records, others, strict=True)
        ]
        return Finding(
            checks=(
                Check(what="points on time above one by one", measured=extremes(leads, fmean), low=0.0, unit="points"),
                Check(what="largest difference of a pixel, of 255", measured=extremes(differences, max), high=1.0),
                Check(what="steps that were shared", measured=extremes(shared, min), low=1.0, unit="%"),
            ),
            method=(
                "Two servers with the shipped model, one worker each, `--max-batch 12` and `--max-batch 1`; the same "
                "requests to either, one server after the other, open loop; the order changes from seed to seed.",
                "Half of the requests have a deadline, so one of them is 3.3 points of a seed: the mean of the seeds "
                "counts, and the interval is of all of them. Time is from the first arrival to the last picture.",
            ),
            tables=(
                Table(
                    title="Live",
                    columns=("", "on time, %", "mean latency, s", "time of all, s", "steps by size of the batch"),
                    rows=tuple(_row(side, runs[side]) for side in _SIDES),
                ),
                Table(
                    title="One by one / together, time of all",
                    columns=("seed", "ratio"),
                    rows=tuple((str(seed), f"{span:.2f}") for seed, span in zip(self.seeds, spans, strict=True)),
                ),
            ),
            pictures=(timeline,),
        )


def _drive(url: str, workload: Sequence[WorkloadRequest]) -> list[Record]:
    records = asyncio.run(drive(url, workload))
    failed = next((record for record in records if record.file is None), None)
    if failed is not None:
        raise CaseFailed(f"request {failed.index} has no picture: {failed.detail}")
    return records


def _timeline(log: Path, path: Path) -> Picture:
    tilework_json(["timeline", str(log), "--out", str(path)])
    return Picture(name="timeline", png=path.read_bytes())


def _on_time(records: Sequence[Record]) -> float:
    return fmean(record.on_time for record in records if record.on_time is not None)


def _span_s(records: Sequence[Record]) -> float:
    return max(record.arrival_s + record.latency_s for record in records)


def _steps(records: Sequence[Record]) -> Counter[int]:
    """How many steps were made in batches of each size."""
    counts: Counter[int] = Counter()
    for record in records:
        for segment in (record.timeline or {}).get("segments", ()):
            if segment["stage"] == "diffuse":
                counts[segment["batch"]] += segment["steps"]
    return counts


def _shared(records: Sequence[Record]) -> float:
    counts = _steps(records)
    return 100 * (1 - counts[1] / counts.total())


def _row(side: str, runs: Sequence[Sequence[Record]]) -> tuple[str, ...]:
    records = [record for run in runs for record in run]
    counts = ", ".join(f"{size}: {number}" for size, number in sorted(_steps(records).items()))
    on_time = fmean(_on_time(run) for run in runs)
    latency_s = fmean(record.latency_s for record in records)
    return side, f"{100 * on_time:.1f}", f"{latency_s:.2f}", f"{fmean(map(_span_s, runs)):.1f}", counts


def _difference(one: Record, other: Record) -> float:
    assert one.file is not None
    assert other.file is not None
    pixels = [np.asarray(Image.open(io.BytesIO(png))).astype(int) for png in (one.file, other.file)]
    return float(np.abs(pixels[0] - pixels[1]).max())
