"""How long the controller takes for an event."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random

from suite.case import Check, Finding, Note, Table
from suite.stats import Interval, median, over_repeats, p99
from suite.workload import COSTS, mixed_requests, service_s
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action
from tilework.core.events import Event
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerTime:
    """Every policy on every number of devices, `len(seeds)` times, with `requests_per_device` at `load`."""

    policies: tuple[str, ...] = ("edf", "fixed-sp1", "tetriserve")
    devices: tuple[int, ...] = (2, 8, 64)
    load: float = 0.9
    least_requests: int = 400
    requests_per_device: int = 25
    steps: int = 20
    slack: float = 3.0
    best_effort: float = 0.2
    jitter: float = 0.05
    seeds: tuple[int, ...] = (1, 2, 3)

    @classmethod
    def make(cls, quick: bool) -> ControllerTime:
        return cls(least_requests=100, requests_per_device=5, seeds=(1, 2)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        checks, rows = [], []
        for num_devices in self.devices:
            for policy in self.policies:
                note(f"{policy} on {num_devices} devices")
                repeats = [self._times(policy, num_devices, seed) for seed in self.seeds]
                middle, tail = over_repeats(repeats, median), over_repeats(repeats, p99)
                what = f"{policy}, {num_devices} devices: median per event"
                checks.append(Check(what=what, measured=middle, high=0.2, unit="ms"))
                count = sum(map(len, repeats))
                largest = max(max(times) for times in repeats)
                rows.append((f"{policy}, {num_devices}", str(count), _shown(middle), _shown(tail), f"{largest:.3f}"))
        table = Table(
            title="All events, in ms",
            columns=("policy, devices", "events", "median", "p99", "largest"),
            rows=tuple(rows),
        )
        return Finding(checks=tuple(checks), method=self._method(), tables=(table,))

    def _times(self, policy: str, num_devices: int, seed: int) -> list[float]:
        """Milliseconds of each event of one simulation."""
        rng = Random(seed)
        rate_per_s = self.load * num_devices / service_s(self.steps)
        requests = mixed_requests(
            max(self.least_requests, self.requests_per_device * num_devices),
            rate_per_s,
            rng,
            steps=self.steps,
            slack=self.slack,
            best_effort=self.best_effort,
        )
        config = SimConfig(num_devices=num_devices, seed=seed, jitter=self.jitter)
        timed = _Timed(ControllerConfig(policy=policy))
        simulation = Simulation(timed.config, COSTS, config, make_controller=lambda *_: timed)
        simulation.run(requests)
        return [nanoseconds / 1e6 for nanoseconds in timed.times_ns]

    def _method(self) -> tuple[str, ...]:
        return (
            "Measured around `Controller.handle` alone, for each event of a simulation with Poisson arrivals of mixed "
            "sizes; garbage collection is on, as in a server.",
            "The costs are fixed (bench/suite/workload.py), so all machines handle the same events.",
            "Intervals: extremes over the seeds.",
        )


class _Timed(Controller):
    def __init__(self, config: ControllerConfig) -> None:
        super().__init__(config, COSTS)
        self.times_ns: list[int] = []

    def handle(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        start_ns = time.perf_counter_ns()
        actions = super().handle(event, now_ns)
        self.times_ns.append(time.perf_counter_ns() - start_ns)
        return actions


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"
