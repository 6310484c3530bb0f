"""How many events per second a simulation handles."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from suite.case import Check, Finding, Note, Table
from suite.stats import median, over_repeats
from tilework.control.controller import ControllerConfig
from tilework.cost.table_file import read_table
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.workloads.registry import make_workload
from tilework.sim.workloads.requests import to_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`goal`: events per second; 0: none is set."""

    policy: str
    devices: int
    requests: int
    goal: float = 0.0

    def __str__(self) -> str:
        return f"{self.policy}, {self.devices} devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSpeed:
    """Every size once per seed, in turns; `rpm_per_device` requests per minute arrive for each device."""

    sizes: tuple[Size, ...] = (
        Size(policy="fixed-sp8", devices=8, requests=600, goal=20_000),
        Size(policy="edf", devices=8, requests=600),
        Size(policy="tilework", devices=8, requests=600, goal=6_000),
        Size(policy="fixed-sp8", devices=128, requests=600),
        Size(policy="edf", devices=128, requests=600),
        Size(policy="tilework", devices=128, requests=600),
    )
    table: str = "flux1dev_h100_eager"
    scale: float = 1.2
    rpm_per_device: float = 1.5
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)

    @classmethod
    def make(cls, quick: bool) -> SimSpeed:
        whole = cls()
        if not quick:
            return whole
        return replace(whole, sizes=tuple(replace(size, requests=40) for size in whole.sizes[:3]), seeds=(1, 2))

    def measure(self, note: Note) -> Finding:
        speeds: dict[Size, list[list[float]]] = {size: [] for size in self.sizes}
        counts = dict.fromkeys(self.sizes, 0)
        for seed in self.seeds:
            for size in self.sizes:
                note(f"{size}, seed {seed}")
                num_events, seconds = self._run(size, seed)
                speeds[size].append([num_events / seconds])
                counts[size] += num_events
        measured = {size: over_repeats(repeats, median) for size, repeats in speeds.items()}
        checks = [
            Check(what=f"{size}: events per second", measured=measured[size], low=size.goal)
            for size in self.sizes
            if size.goal
        ]
        rows = [
            (str(size), str(counts[size]), f"{one.value:,.0f} ({one.low:,.0f} to {one.high:,.0f})")
            for size, one in measured.items()
        ]
        columns = ("policy, devices", "events", "per second")
        table = Table(title="Simulated events", columns=columns, rows=tuple(rows))
        return Finding(checks=tuple(checks), method=self._method(), tables=(table,))

    def _run(self, size: Size, seed: int) -> tuple[int, float]:
        parameters = {
            "mix": "uniform",
            "scale": self.scale,
            "rate_per_s": self.rpm_per_device * size.devices / 60,
            "num_requests": size.requests,
        }
        requests = to_requests(make_workload("tetriserve", parameters).requests(seed))
        config = SimConfig(num_devices=size.devices, seed=seed)
        simulation = Simulation(ControllerConfig(policy=size.policy), read_table(self.table), config)
        start_s = time.process_time()
        trace = simulation.run(requests)
        return trace.num_events, time.process_time() - start_s

    def _method(self) -> tuple[str, ...]:
        return (
            "Events that the controller handles (arrivals, ends of works, wake-ups, devices that join) over the CPU "
            "time of the whole simulation: controller, policy and simulated devices, on one core.",
            f"The workload `tetriserve` (uniform sizes, deadlines x {self.scale}) by the table {self.table}; no "
            "jitter, no faults; garbage collection is on.",
            "Of a size the median over the seeds; intervals: their extremes.",
        )
