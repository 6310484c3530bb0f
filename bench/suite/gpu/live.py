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


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePolicies:
    """`requests` of these `sizes` at `rate_per_s`, due after `times` as long as one takes alone, to one worker."""

    device: str
    model: str
    sizes: str
    steps: int
    rate_per_s: float
    times: float = 3.0
    requests: int = 40
    policies: tuple[str, ...] = ("tilework", "edf", "patchedserve")
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> LivePolicies:
        if not on_gpu():
            return cls(device="cpu", model=TOY.model, sizes="64,96,128", steps=4, rate_per_s=6.0, requests=8)
        sizes = "512:3,768:2,1024"
        return cls(device="cuda", model="SDXL", sizes=sizes, steps=30, rate_per_s=1.6, requests=12 if quick else 40)

    def measure(self, note: Note) -> Finding:
        folder = folder_of(self.model, note)
        rows, live, simulated = [], dict[str, float](), dict[str, dict[str, Any]]()
        slo = f"auto:{self.times:g}"
        with TemporaryDirectory() as temporary:
            for policy in self.policies:
                log = Path(temporary) / f"{policy}.jsonl"
                with serving(1, log, policy=policy, model=folder, device=self.device) as server:
                    note(f"{policy}: ready after {server.ready_s:.1f} s")
                    run = tilework_json(["bench", server.url, *self._traffic(), "--slo", slo])
                result, slo = run["result"], self._slo(run["unloaded_s"]) if slo.startswith("auto") else slo
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
                "deadline of a size is a multiple of its latency on the first of the servers while it was idle.",
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
        )

    def _traffic(self) -> list[str]:
        traffic = ["--rate", str(self.rate_per_s), "--num-requests", str(self.requests), "--seed", str(self.seed)]
        return [*traffic, "--sizes", self.sizes, "--steps", str(self.steps)]

    def _slo(self, unloaded_s: dict[str, float]) -> str:
        """The deadline of each size, by what the first server took for one alone."""
        return ",".join(f"{size}={self.times * seconds:.3f}" for size, seconds in unloaded_s.items())


def _row(policy: str, result: dict[str, Any], again: dict[str, Any]) -> tuple[str, ...]:
    return (
        policy,
        f"{100 * result['attainment']:.1f}",
        f"{result['latency_s']['mean']:.2f}",
        f"{result['latency_s']['p99']:.2f}",
        f"{again['mean_latency_ratio']:.3f}",
    )
