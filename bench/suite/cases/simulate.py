"""Whether a simulation on the costs of a live run gives that run's latencies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from suite.case import Check, Finding, Note, Table
from suite.server import tilework_json
from suite.stats import extremes


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate:
    """For each seed a live `tilework demo` of its own, then `tilework simulate --log` on its event log."""

    workers: int = 2
    requests: int = 24
    policy: str = "edf"
    seeds: tuple[int, ...] = (1, 2, 3)

    @classmethod
    def make(cls, quick: bool) -> Simulate:
        return cls(requests=8, seeds=(1,)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        answers = []
        for seed in self.seeds:
            answers.append(self._pair(seed))
            note(f"seed {seed}: simulated / live mean latency {answers[-1]['mean_latency_ratio']:.3f}")
        ratios = [answer["mean_latency_ratio"] for answer in answers]
        rows = tuple(_row(seed, answer) for seed, answer in zip(self.seeds, answers, strict=True))
        checks = tuple(
            Check(what=f"seed {seed}: simulated / live mean latency", measured=extremes([ratio]), low=0.9, high=1.1)
            for seed, ratio in zip(self.seeds, ratios, strict=True)
        )
        together = Check(what="median over seeds", measured=extremes(ratios), low=0.9, high=1.1)
        return Finding(
            checks=(together, *checks),
            method=(
                f"Live: `tilework demo`, {self.requests} requests of mixed sizes, most with deadlines, on "
                f"{self.workers} workers of one thread, and the two requests by which it measures the machine.",
                "Simulated: `tilework simulate --log`: the same requests at the times of the log, on the median "
                "costs that this very run measured, without jitter. It thus tests the model of what happens between "
                "works, and not how well costs can be predicted.",
                "Latency is from arrival at the server to the end of the last work, in both.",
            ),
            tables=(
                Table(
                    title="Both runs of each seed",
                    columns=("seed", "live mean, s", "simulated mean, s", "ratio", "live on time", "simulated on time"),
                    rows=rows,
                ),
            ),
        )

    def _pair(self, seed: int) -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            demo = ["--out", folder, "--workers", str(self.workers), "--requests", str(self.requests)]
            tilework_json(["demo", *demo, "--policy", self.policy, "--seed", str(seed)])
            return tilework_json(["simulate", "--log", str(Path(folder) / "events.jsonl")])


def _row(seed: int, answer: dict[str, Any]) -> tuple[str, ...]:
    live, simulated = answer["live"], answer["result"]
    return (
        str(seed),
        f"{live['latency_s']['mean']:.3f}",
        f"{simulated['latency_s']['mean']:.3f}",
        f"{answer['mean_latency_ratio']:.3f}",
        f"{live['on_time']}/{live['with_deadline']}",
        f"{simulated['on_time']}/{simulated['with_deadline']}",
    )
