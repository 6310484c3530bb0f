"""What the whole stack costs: HTTP, server, controller, pipes and worker, against the bare pipeline."""

from __future__ import annotations

import base64
import io
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from PIL import Image

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.server import Server, serving
from suite.stats import Interval, bootstrap, extremes, median, percentile
from suite.stock_process import StockProcess, stock_process


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """`rounds` times a block of `block` requests to either side, which takes turns to go first."""

    rounds: int = 10
    block: int = 4
    warm_up: int = 3
    side: int = 128
    steps: int = 20
    guidance_scale: float = 4.0
    max_sequence_length: int = 0
    threads: int = 1
    seed: int = 1
    prompt: str = "a large red circle on a blue background"

    @classmethod
    def make(cls, quick: bool) -> Stack:
        return cls(rounds=3, block=2, warm_up=1) if quick else cls()

    def measure(self, note: Note) -> Finding:
        with serving(workers=1) as server, stock_process(self.threads) as stock, _client(server) as http:
            note(f"server ready in {server.ready_s:.1f} s; the stock pipeline is loaded")
            sides = (_OurSide(http, self), _StockSide(stock, self))
            for index in range(self.warm_up):
                for side in sides:
                    side.draw(self.seed + index)
            rounds = []
            for index in range(self.rounds):
                note(f"round {index + 1} of {self.rounds}")
                rounds.append(self._round(index, *sides))
        return self._finding(rounds)

    def _round(self, index: int, ours: _OurSide, stock: _StockSide) -> _Round:
        seeds = [self.seed + index * self.block + i for i in range(self.block)]
        done = _Round()
        order = (ours, stock) if index % 2 == 0 else (stock, ours)
        for side in order:
            for seed in seeds:
                picture = side.draw(seed)
                (done.ours if side is ours else done.stock).append(picture)
        return done

    def _finding(self, rounds: list[_Round]) -> Finding:
        ratios = [_median(r.ours, "total_s") / _median(r.stock, "total_s") for r in rounds]
        works = [_median(r.ours, "works_s") / _median(r.stock, "call_s") for r in rounds]
        ours = [picture for r in rounds for picture in r.ours]
        stock = [picture for r in rounds for picture in r.stock]
        differences = [_largest_difference(a.png, b.png) for r in rounds for a, b in zip(r.ours, r.stock, strict=True)]
        return Finding(
            checks=(Check(what="tilework / stock, latency", measured=bootstrap(ratios, self.seed), high=1.05),),
            method=(
                "Tilework: from before the HTTP request is sent until its PNG is decoded from base64, one request at a "
                "time over one kept connection; server with one worker, each a process of its own.",
                "Stock: `StableDiffusion3Pipeline.__call__` and Pillow's PNG encoding in a loop in one separate "
                "process, timed inside it: no transport at all.",
                "Both: the same seeds, prompt, size, steps, guidance, number of torch threads and PNG level, float32; "
                "text encoding, denoising and decoding included, loading excluded, warmed up.",
                "Blocks alternate in one run, the side that goes first too. The ratio is the median over rounds of "
                "(median of our block / median of the stock block).",
            ),
            tables=(_breakdown(ours, stock),),
            facts={
                "ratio per round": ", ".join(f"{ratio:.3f}" for ratio in ratios),
                "works alone / stock pipeline call": _shown(extremes(works)),
                "pictures equal to stock": f"{sum(d == 0 for d in differences)} of {len(differences)}"
                f"; largest difference {max(differences)} of 255",
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """One request: its PNG and its times in seconds by name."""

    png: bytes
    times: dict[str, float]


@dataclass(slots=True)
class _Round:
    ours: list[_Picture] = field(default_factory=list)
    stock: list[_Picture] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _OurSide:
    http: httpx.Client
    case: Stack

    def draw(self, seed: int) -> _Picture:
        body = {
            "prompt": self.case.prompt,
            "size": f"{self.case.side}x{self.case.side}",
            "num_inference_steps": self.case.steps,
            "guidance_scale": self.case.guidance_scale,
            "seed": seed,
        }
        start_s = time.perf_counter()
        answer = self.http.post("/v1/images/generations", json=body)
        if answer.status_code != 200:
            raise CaseFailed(f"the server answered HTTP {answer.status_code}: {answer.text[:200]}")
        image = answer.json()["data"][0]
        png = base64.b64decode(image["b64_json"])
        total_s = time.perf_counter() - start_s
        times = _our_times(total_s, image["tilework"])
        start_s = time.perf_counter()
        self.http.get("/health").raise_for_status()
        return _Picture(png=png, times=times | {"health_s": time.perf_counter() - start_s})


def _our_times(total_s: float, timeline: dict[str, Any]) -> dict[str, float]:
    stages = {"encode": 0.0, "diffuse": 0.0, "decode": 0.0}
    for segment in timeline["segments"]:
        stages[segment["stage"]] += segment["end_s"] - segment["start_s"]
    segments, works_s = timeline["segments"], sum(stages.values())
    return {
        "total_s": total_s,
        "works_s": works_s,
        **{f"{stage}_s": seconds for stage, seconds in stages.items()},
        "first_s": segments[0]["start_s"],
        "between_s": segments[-1]["end_s"] - segments[0]["start_s"] - works_s,
        "last_s": timeline["latency_s"] - segments[-1]["end_s"],
        "outside_works_s": timeline["latency_s"] - works_s,
        "edge_s": total_s - timeline["latency_s"],
        "num_works": float(len(segments)),
    }


@dataclass(frozen=True, slots=True)
class _StockSide:
    process: StockProcess
    case: Stack

    def draw(self, seed: int) -> _Picture:
        ask = {
            "prompt": self.case.prompt,
            "height": self.case.side,
            "width": self.case.side,
            "num_inference_steps": self.case.steps,
            "guidance_scale": self.case.guidance_scale,
            "max_sequence_length": self.case.max_sequence_length,
            "seed": seed,
        }
        answer = self.process.draw(ask)
        times = {"call_s": answer["call_s"], "png_s": answer["file_s"], "total_s": answer["call_s"] + answer["file_s"]}
        return _Picture(png=base64.b64decode(answer["file"]), times=times)


def _client(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60.0, trust_env=False)


def _median(pictures: list[_Picture], name: str) -> float:
    return median(picture.times[name] for picture in pictures)


def _breakdown(ours: list[_Picture], stock: list[_Picture]) -> Table:
    total_s = _median(ours, "total_s")
    num_works = _median(ours, "num_works")
    rows = [
        ("stock: all", "total_s", stock),
        ("  pipeline call", "call_s", stock),
        ("  PNG", "png_s", stock),
        ("tilework: all, as the client sees it", "total_s", ours),
        (f"  works ({num_works:.0f}), inside the worker", "works_s", ours),
        ("    encode", "encode_s", ours),
        ("    diffuse", "diffuse_s", ours),
        ("    decode", "decode_s", ours),
        ("  server outside works", "outside_works_s", ours),
        ("    arrival to first work", "first_s", ours),
        ("    between works", "between_s", ours),
        ("    last work to outcome", "last_s", ours),
        ("  HTTP, JSON, PNG, base64", "edge_s", ours),
        ("for comparison: GET /health", "health_s", ours),
    ]
    return Table(
        title="Where the time goes (medians over all requests)",
        columns=("part", "ms", "5% to 95%", "of our total"),
        rows=tuple(_row(label, [p.times[name] for p in pictures], total_s) for label, name, pictures in rows),
    )


def _row(label: str, seconds: list[float], total_s: float) -> tuple[str, ...]:
    middle, low, high = (percentile(seconds, percent) * 1e3 for percent in (50, 5, 95))
    return label, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", f"{middle / total_s / 10:.1f}%"


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f}, {interval.kind} over rounds)"


def _largest_difference(left: bytes, right: bytes) -> int:
    """Of two pictures, over all pixels and channels."""
    pictures = [bytes(Image.open(io.BytesIO(png)).convert("RGB").tobytes()) for png in (left, right)]
    left_pixels, right_pixels = pictures
    return max(abs(a - b) for a, b in zip(left_pixels, right_pixels, strict=True))
