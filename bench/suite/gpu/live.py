"""Deadlines kept on one GPU under Poisson arrivals, by policy, and the same runs simulated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from suite.case import Check, Finding, Note, Table
from suite.gpu.models import TOY, folder_of, on_gpu
from suite.server import serving, tilework_json
from suite.stats import exact

_POLICIES = ("tilework", "edf", "patchedserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePolicies:
    """`requests` of square `sizes`, by their weights, to one worker, due after `times` as long as one takes alone.

    As many come as the device can draw one by one, times `load`: hosts differ by much in how fast they launch kernels.
    """

    device: str
    model: str
    sizes: tuple[tuple[int, int], ...]
    steps: int
    load: float = 1.0
    times: float = 3.0
    requests: int = 40
    policies: tuple[str, ...] = _POLICIES
    seed: int = 1

    @classmethod
    def make(cls, quick: bool, policies: tuple[str, ...] = _POLICIES) -> LivePolicies:
        if not on_gpu():
            sizes = (64, 1), (96, 1), (128, 1)
            return cls(device="cpu", model=TOY.model, sizes=sizes, steps=4, requests=8, policies=policies)
        sizes, requests = ((512, 3), (768, 2), (1024, 1)), 12 if quick else 40
        return cls(device="cuda", model="SDXL", sizes=sizes, steps=30, requests=requests, policies=policies)

    def measure(self, note: Note) -> Finding:
        folder = folder_of(self.model, note)
        rows, live, simulated = [], dict[str, float](), dict[str, dict[str, Any]]()
        alone_s = dict[str, float]()
        with TemporaryDirectory() as temporary:
            for policy in self.policies:
                log = Path(temporary) / f"{policy}.jsonl"
                with serving(1, log, policy=policy, model=folder, device=self.device) as server:
                    note(f"{policy}: ready after {server.ready_s:.1f} s")
                    alone_s = alone_s or self._alone_s(server.url)
                    traffic = ["--rate", f"{self._rate_per_s(alone_s):.4f}", "--num-requests", str(self.requests)]
                    run = tilework_json(["bench", server.url, *self._asked(), *traffic, "--slo", self._slo(alone_s)])
                result = run["result"]
                again = tilework_json(["simulate", "--log", str(log)])
                live[policy], simulated[policy] = 100 * result["attainment"], again
                rows.append(_row(policy, result, again))
                note(", ".join(rows[-1]))
        first, *others = self.policies
        checks = [
            Check(
                what=f"points on time, {first} above {other}",
                measured=exact(live[first] - live[other]),
                low=0.0,
                unit="points",
            )
            for other in others
        ]
        checks += [
            Check(
                what=f"{policy}: simulated / live mean latency",
                measured=exact(again["mean_latency_ratio"]),
                low=0.95,
                high=1.05,
            )
            for policy, again in simulated.items()
        ]
        return Finding(
            checks=tuple(checks),
            method=(
                "Live: `tilework bench`, open loop, the same requests for each policy, one server after another. The "
                "deadline of a size is a multiple of its latency on the first of the servers while it was idle; the "
                "rate is a multiple of what these latencies allow one by one.",
                "Simulated: `tilework simulate --log` of that run, on the costs that it measured; with it the "
                "requests that warm the server up.",
                "Random weights of real size (`tilework fake`). One run each: differences of a few points are noise.",
            ),
            tables=(
                Table(
                    title="By policy",
                    columns=("policy", "on time, %", "mean latency, s", "p99, s", "simulated / live mean"),
                    rows=tuple(rows),
                ),
            ),
            facts={
                "alone": ", ".join(f"{size} {seconds:.3f} s" for size, seconds in alone_s.items()),
                "rate": f"{self._rate_per_s(alone_s):.2f} requests per second",
            },
        )

    def _asked(self) -> list[str]:
        sizes = ",".join(f"{side}:{weight}" for side, weight in self.sizes)
        return ["--sizes", sizes, "--steps", str(self.steps), "--seed", str(self.seed)]

    def _alone_s(self, url: str) -> dict[str, float]:
        """What each size takes on the idle server, by its name."""
        few = ["--rate", "1", "--num-requests", str(len(self.sizes))]
        found: dict[str, float] = tilework_json(["bench", url, *self._asked(), *few, "--slo", "auto"])["unloaded_s"]
        return found

    def _rate_per_s(self, alone_s: dict[str, float]) -> float:
        taken_s = sum(weight * alone_s[f"{side}x{side}"] for side, weight in self.sizes)
        return self.load * sum(weight for _, weight in self.sizes) / taken_s

    def _slo(self, alone_s: dict[str, float]) -> str:
        return ",".join(f"{size}={self.times * seconds:.3f}" for size, seconds in alone_s.items())


def _row(policy: str, result: dict[str, Any], again: dict[str, Any]) -> tuple[str, ...]:
    return (
        policy,
        f"{100 * result['attainment']:.1f}",
        f"{result['latency_s']['mean']:.2f}",
        f"{result['latency_s']['p99']:.2f}",
        f"{again['mean_latency_ratio']:.3f}",
    )
