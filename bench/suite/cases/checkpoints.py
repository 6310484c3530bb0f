"""Many checkpoints on one device, live, beside the simulation of the very run: how many requests are on time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.cases.weights import save_model
from suite.server import tilework_json
from suite.stats import extremes
from tilework.core.model import ModelSource
from tilework.core.time import ns_from_s, s_from_ns
from tilework.core.wire.spec import Spec
from tilework.formats.workload import WorkloadRequest
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.ticket import Ticket
from tilework_lab.workloads.gentd26.family import GenTD26
from tilework_lab.workloads.gentd26.table import ON_DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """`gentd26` for one device, `scale` times as fast, on `checkpoints` models.

    A request for the checkpoint of rank r goes to model r modulo their number. It makes as many steps as take the
    scaled time of its inference; all have one size, since a step's time is what the device gives. The device has room
    for as many models as one of the simulated workload.
    """

    checkpoints: int = 12
    scale: float = 150.0
    load: float = 0.5
    slo: float = 2.5
    side: int = 64
    seeds: tuple[int, ...] = (1, 2, 3)
    most: float = 0.05

    @classmethod
    def make(cls, quick: bool) -> Checkpoints:
        return cls(checkpoints=3, scale=600.0, seeds=(1,)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        with TemporaryDirectory(prefix="tilework-bench-") as room:
            sizes = [save_model(Path(room) / str(index), 1, index) for index in range(self.checkpoints)]
            runs = [self._run(Path(room), max(sizes), seed, note) for seed in self.seeds]
        gaps = [run["simulated"] - run["live"] for run in runs]
        rows = tuple(
            (
                str(seed),
                str(run["requests"]),
                f"{run['live']:.3f}",
                f"{run['simulated']:.3f}",
                str(run["loads"]),
                f"{run['ratio']:.3f}",
            )
            for seed, run in zip(self.seeds, runs, strict=True)
        )
        return Finding(
            checks=(
                Check(
                    what="requests on time, simulated less live",
                    measured=extremes(gaps),
                    low=-self.most,
                    high=self.most,
                ),
            ),
            tables=(
                Table(
                    title="Each run",
                    columns=("seed", "requests", "live", "simulated", "loads, live", "mean latency, simulated / live"),
                    rows=rows,
                ),
            ),
            method=(
                f"{self.checkpoints} models that differ in their denoisers, of {max(sizes) / 1e6:.0f} MB each, one CPU "
                f"worker with room for {ON_DEVICE} of them, policy tilework; requests of the workload gentd26 for one "
                f"device at load {self.load}, {self.scale:g} times as fast, deadlines at {self.slo} x the inference.",
                "Simulated: `tilework simulate --log` on the event log of the run: the same requests at the same "
                "times, on the costs that the run measured. So it tests the model of what happens between works.",
            ),
        )

    def _run(self, room: Path, size: int, seed: int, note: Note) -> Mapping[str, Any]:
        log = room / f"events-{seed}.jsonl"
        asyncio.run(self._live(room, size, seed, log))
        answer = tilework_json(["simulate", "--log", str(log)])
        live, simulated = (answer[name] for name in ("live", "result"))
        found = {
            "requests": live["with_deadline"],
            "live": live["on_time"] / live["with_deadline"],
            "simulated": simulated["on_time"] / simulated["with_deadline"],
            "loads": log.read_text("utf-8").count('"is":"LoadComponents"'),
            "ratio": answer["mean_latency_ratio"],
        }
        note(f"seed {seed}: {found}")
        return found

    async def _live(self, room: Path, size: int, seed: int, log: Path) -> None:
        sources = tuple(ModelSource(path=str(room / str(index)), name=str(index)) for index in range(self.checkpoints))
        executor = LocalExecutor(
            LocalConfig(num_workers=1, sources=sources, weights_bytes=int(ON_DEVICE * size * 1.05))
        )
        with log.open("w", encoding="utf-8") as lines:
            engine = await EngineStart(EngineConfig(exact=True), executor, lines).start()
            try:
                await self._serve(engine, self._requests(seed))
            finally:
                await engine.stop()

    def _requests(self, seed: int) -> Sequence[WorkloadRequest]:
        return GenTD26(load=self.load, slo=self.slo, devices=1).requests(seed)

    async def _serve(self, engine: Engine, requests: Sequence[WorkloadRequest]) -> None:
        """Send the requests at their scaled times, and wait for all."""
        costs, begin_ns = engine._controller.costs, engine.now_ns()
        graph = costs.graph("0")
        spec = Spec(
            prompt="a red circle",
            height=self.side,
            width=self.side,
            steps=1,
            guidance_scale=4.0,
            seed=0,
            exact=True,
        )
        times_ns = {stage.has_steps: 0 for stage in graph.stages}
        for stage in graph.stages:
            times_ns[stage.has_steps] += costs.run_ns(stage, (spec.shape,), 1)
        tickets: list[Ticket] = []
        for index, one in enumerate(requests):
            assert one.slo_s is not None
            service_ns = ns_from_s(one.slo_s / self.slo / self.scale)
            steps = max(1, round((service_ns - times_ns[False]) / times_ns[True]))
            arrival_ns = begin_ns + ns_from_s(one.arrival_s / self.scale)
            await asyncio.sleep(max(0.0, s_from_ns(arrival_ns - engine.now_ns())))
            rank = int(one.pipeline.rpartition("-")[2])
            answer = engine.submit(
                {str(index): replace(spec, steps=steps, seed=index)},
                model=str(rank % self.checkpoints),
                deadline_ns=engine.now_ns() + ns_from_s(self.slo * s_from_ns(steps * times_ns[True] + times_ns[False])),
            )
            if not isinstance(answer, tuple):
                raise CaseFailed(answer.reason)
            tickets += answer
        for ticket in tickets:
            await ticket.outcome
