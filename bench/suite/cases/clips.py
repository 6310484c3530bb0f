"""Clips as video files: one at a time against the stock pipeline, and what a file costs the device."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from suite.busy import Timeline, arrivals_in, pieces_of
from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.server import serving
from suite.stats import bootstrap, median, over_repeats
from suite.stock_process import StockProcess, stock_process
from tilework.client.drive import drive
from tilework.client.record import CallEnd, Record
from tilework.formats.workload import WorkloadRequest

MODEL = "shapes-motion"
EXPORT = "export"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clips:
    """`rounds` times a block of `block` clips to either side, which takes turns to go first; then `repeats` times
    `queued` clips at once.
    """

    rounds: int = 8
    block: int = 3
    warm_up: int = 2
    queued: int = 8
    repeats: int = 3
    side: int = 64
    frames: int = 17
    steps: int = 16
    guidance_scale: float = 4.0
    threads: int = 1
    seed: int = 1
    prompt: str = "a red circle moves left"

    @classmethod
    def make(cls, quick: bool) -> Clips:
        return cls(rounds=2, block=1, warm_up=1, queued=3, repeats=1) if quick else cls()

    def measure(self, note: Note) -> Finding:
        with TemporaryDirectory() as folder:
            log = Path(folder) / "events.jsonl"
            with serving(1, log, policy="edf", model=MODEL) as server, stock_process(self.threads, MODEL) as stock:
                note(f"server ready in {server.ready_s:.1f} s; the stock pipeline is loaded")
                rounds = []
                for index in range(-1, self.rounds):
                    note("warm-up" if index < 0 else f"round {index + 1} of {self.rounds}")
                    rounds.append(self._round(index, server.url, stock))
                queues = []
                for index in range(self.repeats):
                    note(f"{self.queued} clips at once, {index + 1} of {self.repeats}")
                    queues.append(self._ask(server.url, [self.seed + i for i in range(self.queued)]))
            arrivals_s = arrivals_in(log)
        timelines = []
        for records in queues:
            pieces = [piece for piece in pieces_of(records, arrivals_s) if piece.stage != EXPORT]
            timelines.append(Timeline(pieces))
        return self._finding(rounds[1:], timelines)

    def _round(self, index: int, url: str, stock: StockProcess) -> _Round:
        count = self.warm_up if index < 0 else self.block
        seeds = [self.seed + (index + 1) * self.block + i for i in range(count)]
        if index % 2:
            return _Round(stock=[self._stock(stock, seed) for seed in seeds], ours=self._one_by_one(url, seeds))
        return _Round(ours=self._one_by_one(url, seeds), stock=[self._stock(stock, seed) for seed in seeds])

    def _one_by_one(self, url: str, seeds: Sequence[int]) -> list[Record]:
        return [record for seed in seeds for record in self._ask(url, [seed])]

    def _ask(self, url: str, seeds: Sequence[int]) -> list[Record]:
        """All at once."""
        records = asyncio.run(drive(url, [self._request(seed) for seed in seeds]))
        for record in records:
            if record.status is not CallEnd.DONE:
                raise CaseFailed(f"the server made no clip: {record.detail}")
        return records

    def _request(self, seed: int) -> WorkloadRequest:
        return WorkloadRequest(
            arrival_s=0.0,
            pipeline=MODEL,
            height=self.side,
            width=self.side,
            frames=self.frames,
            steps=self.steps,
            seed=seed,
            prompt=self.prompt,
        )

    def _stock(self, stock: StockProcess, seed: int) -> dict[str, float]:
        ask = {
            "prompt": self.prompt,
            "height": self.side,
            "width": self.side,
            "num_frames": self.frames,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance_scale,
            "seed": seed,
        }
        answer = stock.draw(ask)
        return {"call_s": answer["call_s"], "file_s": answer["file_s"]}

    def _finding(self, rounds: list[_Round], timelines: list[Timeline]) -> Finding:
        ratios = [one.ratio for one in rounds]
        busy = over_repeats([[100 * (1 - one.idle_share)] for one in timelines], median)
        ours, stock = ([x for one in rounds for x in getattr(one, side)] for side in ("ours", "stock"))
        rows = (
            ("stock: pipeline call", f"{median(one['call_s'] for one in stock):.3f}"),
            ("stock: MP4", f"{median(one['file_s'] for one in stock):.3f}"),
            ("tilework: all, as the client sees it", f"{median(one.latency_s for one in ours):.3f}"),
            *((f"tilework: {stage}", f"{median(times):.3f}") for stage, times in _stages(ours).items()),
        )
        return Finding(
            checks=(
                Check(what="tilework / stock, latency of a clip", measured=bootstrap(ratios, self.seed), high=1.05),
                Check(what="device busy while clips wait, files written", measured=busy, low=97.0, unit="%"),
            ),
            method=(
                "Tilework: from before the request to `/v1/videos/sync` is sent until the file is there and its "
                "timeline was asked for, one clip at a time; server with one worker and one CPU slot.",
                "Stock: `WanPipeline.__call__`, and libx264 by PyAV with the server's settings, in a loop in one "
                "process, timed inside it. Both: the same seeds, prompt, size, frames, steps, guidance and number of "
                "threads, float32, warmed up.",
                "Blocks alternate in one run, the side that goes first too. The ratio is the median over rounds of "
                "(median of our block / median of the stock block).",
                f"Busy: {self.queued} clips at once. Time between two works of the worker counts as idle if some clip "
                "waited all the while; files are written on the CPU slot meanwhile.",
            ),
            tables=(Table(title="Seconds, medians over all clips", columns=("part", "s"), rows=rows),),
            facts={"ratio per round": ", ".join(f"{ratio:.3f}" for ratio in ratios)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    ours: list[Record]
    stock: list[dict[str, float]]

    @property
    def ratio(self) -> float:
        return median(one.latency_s for one in self.ours) / median(one["call_s"] + one["file_s"] for one in self.stock)


def _stages(records: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds of each stage, for every clip."""
    stages: dict[str, list[float]] = {}
    for record in records:
        assert record.timeline is not None
        times: dict[str, float] = {}
        for segment in record.timeline["segments"]:
            times[segment["stage"]] = times.get(segment["stage"], 0.0) + segment["end_s"] - segment["start_s"]
        for stage, seconds in times.items():
            stages.setdefault(stage, []).append(seconds)
    return stages
