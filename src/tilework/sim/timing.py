"""Durations of works on simulated devices, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from tilework.core.component import LoadSource
from tilework.core.request import Request
from tilework.core.work import Group, Work
from tilework.cost.table_costs import TableCosts
from tilework.cost.tabled import UnknownCost
from tilework.sim.faults import FaultInjector
from tilework.sim.runs import RunEnd

_SLICED_SHARE = 0.5  # Memory of a sliced work, as a share of that of a whole one.


class TimingModel(Protocol):
    """Decides how long works take and how they end."""

    def dispatch_ns(self, work: Work) -> int:
        """Return the time between the command to begin and the begin of the work's run."""

    def run(self, work: Work) -> tuple[int, int, RunEnd]:
        """Return duration, steps and end of a work that begins now."""

    def load_ns(self, num_bytes: int, source: LoadSource) -> int:
        """Return the duration of a load, or of a read from the disk by a host."""


class TableTimingModel:
    """Times of a cost table, with jitter and faults.

    `requests` returns the requests of jobs, `dispatch_ns` the dispatch time by degree. `switch_ns` is added before
    steps whose devices last ran another job, or this one on another group. `jitter` is the relative standard deviation
    of each duration.

    The cache of a request skips a share of its work that is drawn once, by its id and `seed`: normal, with the mean and
    the standard deviation of the table, cut at 0 and 1. What it saves of its steps is in proportion to that.
    """

    def __init__(
        self,
        costs: TableCosts,
        requests: Callable[[Sequence[int]], list[Request]],
        dispatch_ns: Callable[[int], int],
        switch_ns: int,
        injector: FaultInjector,
        jitter: float,
        seed: int,
    ) -> None:
        self._costs = costs
        self._requests = requests
        self._dispatch_ns = dispatch_ns
        self._switch_ns = switch_ns
        self._latest: dict[int, tuple[tuple[int, ...], Group]] = {}
        self._injector = injector
        self._jitter = jitter
        self._random = Random(seed)
        self._seed = seed
        self._largest_pixels = 0
        self._is_small = injector.injects("memory")

    def dispatch_ns(self, work: Work) -> int:
        total_ns = self._dispatch_ns(len(work.devices))
        if self._switch_ns and work.stage.has_steps:
            current = work.job_ids, work.devices
            if any(self._latest.get(device_id) != current for device_id in work.devices):
                total_ns += self._switch_ns
            self._latest.update(dict.fromkeys(work.devices, current))
        return total_ns

    def run(self, work: Work) -> tuple[int, int, RunEnd]:
        requests = self._requests(work.job_ids)
        try:
            duration_ns = self._costs.work_ns(work.stage, requests, len(work.devices), work.num_steps)
        except UnknownCost:  # Its model has gone, and another has its name: nothing waits for it.
            return 0, work.num_steps, RunEnd.DONE
        if work.stage.caches:
            duration_ns = round(duration_ns * self._drawn(work, requests))
        if self._jitter:
            duration_ns = round(duration_ns * max(0.2, self._random.gauss(1.0, self._jitter)))
        if not self._injector.faults:
            return duration_ns, work.num_steps, RunEnd.DONE
        if self._injector.injects("slow"):
            duration_ns = round(duration_ns * self._injector.magnitude("slow"))
        if not self.fits(work, requests):
            self._injector.counts["memory"] += 1
            return self._cut_short(work, duration_ns, 0.0, RunEnd.OUT_OF_MEMORY)
        for fault, end in (("error", RunEnd.FAILED), ("oom", RunEnd.OUT_OF_MEMORY)):
            if self._injector.injects(fault):
                return self._cut_short(work, duration_ns, self._injector.fraction(fault), end)
        return duration_ns, work.num_steps, RunEnd.DONE

    def _drawn(self, work: Work, requests: Sequence[Request]) -> float:
        """Return how much longer than in the mean steps with a cache take, by what is drawn for these requests."""
        stage = work.stage
        degree = len(work.devices)
        saving = self._costs.saving(stage, [one.shape for one in requests], degree)
        if saving is None or not saving.skipped_std:
            return 1.0
        skipped = 0.0
        for one in requests:
            own = self._costs.saving(stage, (one.shape,), degree)
            assert own is not None
            share = Random(f"skipped {one.uid} {self._seed}").gauss(own.skipped, own.skipped_std)
            skipped += min(max(share, 0.0), 1.0) * one.shape.pixels
        return saving.with_skipped(skipped / sum(one.shape.pixels for one in requests)) / saving.time

    def load_ns(self, num_bytes: int, source: LoadSource) -> int:
        duration_ns = self._costs.weights.load_ns(num_bytes, source)
        return round(duration_ns * max(0.2, self._random.gauss(1.0, self._jitter))) if self._jitter else duration_ns

    def _cut_short(self, work: Work, duration_ns: int, fraction: float, end: RunEnd) -> tuple[int, int, RunEnd]:
        """Return duration, steps and end of a work that ends early, after a fraction of its time. Whole steps count."""
        steps = int(fraction * work.num_steps) if work.stage.has_steps else 0
        return round(fraction * duration_ns), steps, end

    def fits(self, work: Work, requests: Sequence[Request]) -> bool:
        """Return whether the devices have enough memory for a work.

        Its need grows with its pixels, and its devices share it. The memory of a device is a share of what the largest
        request so far needs alone. Stages that have no steps and cannot be sliced always fit.
        """
        if not self._is_small or not (work.stage.has_steps or work.stage.spec.sliceable):
            return True
        pixels = sum(request.shape.pixels for request in requests)
        need = pixels * (_SLICED_SHARE if work.sliced else 1.0) / len(work.devices)
        return need <= self._injector.faults.size("memory") * self._largest_pixels

    def note_request(self, request: Request) -> None:
        """Take the size of a submitted request into account."""
        self._largest_pixels = max(self._largest_pixels, request.shape.pixels)
