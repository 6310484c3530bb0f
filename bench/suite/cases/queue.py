"""What a long queue costs: time of one more request, and memory of each that waits."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from suite.case import Check, Finding, Note, Table
from suite.stats import bootstrap, exact, p99
from suite.workload import COSTS, SHAPES, request_of
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.events import DeviceJoined, Event, Submitted, Woke
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, ns_from_s


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLength:
    """`length` requests wait behind `devices` busy devices; then `samples` more come, one at a time.

    `slo_s`: deadlines are drawn evenly from this range, far enough away that none passes during the measurement.
    `common_deadline_s`: the one that all share in the last table.
    """

    length: int = 20_000
    samples: int = 1_000
    devices: tuple[int, ...] = (8, 64)
    policies: tuple[str, ...] = ("edf", "fixed-sp4", "tetriserve")
    steps: int = 20
    slo_s: tuple[float, float] = (50_000.0, 100_000.0)
    common_deadline_s: float = 300.0
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> QueueLength:
        return cls(length=2_000, samples=200) if quick else cls()

    def measure(self, note: Note) -> Finding:
        times, memory, rows = [], [], []
        for policy in self.policies:
            for deadlines in (False, True):
                name = f"{policy}, {'with' if deadlines else 'no'} deadlines"
                note(name)
                bytes_each = self._bytes_each(policy, deadlines)
                memory.append(
                    Check(what=f"{name}: memory per request", measured=exact(bytes_each / 1000), high=20, unit="kB")
                )
                for num_devices in self.devices:
                    label = f"{name}, {num_devices} devices"
                    ms = self._submit_ms(policy, deadlines, num_devices)
                    middle = bootstrap(ms, self.seed)
                    times.append(Check(what=f"{label}: one more", measured=middle, high=2, unit="ms"))
                    rows.append((label, f"{middle.value:.3f}", f"{p99(ms):.3f}", f"{max(ms):.3f}"))
        note("deadlines pass")
        passing = [self._deadlines_pass(policy) for policy in self.policies]
        return Finding(
            checks=(*times, *memory),
            method=(
                f"Time: `Controller.handle(Submitted)` alone, {self.samples} times, with {self.length} requests "
                "waiting; the interval is a 95% bootstrap of the median.",
                "Memory: what tracemalloc sees before and after the requests come in, divided by their number, "
                "requests and their uids included.",
                "No goal stands for the last table: all requests are due at one time, and the first event after it "
                "has to deal with that.",
            ),
            tables=(
                Table(title="One more request, in ms", columns=("case", "median", "p99", "largest"), rows=tuple(rows)),
                Table(
                    title=f"{self.length} deadlines have passed at once, on {self.devices[0]} devices",
                    columns=("policy", "the first event, ms", "the next one, ms"),
                    rows=tuple(passing),
                ),
            ),
        )

    def _requests(self, count: int, deadlines: bool) -> Iterator[Request]:
        rng = Random(self.seed)
        for index in range(count):
            slo_s = rng.uniform(*self.slo_s) if deadlines else None
            yield request_of(rng, index * 1e-3, steps=self.steps, slo_s=slo_s, shape=rng.choice(SHAPES))

    def _submit_ms(self, policy: str, deadlines: bool, num_devices: int) -> list[float]:
        controller = _controller(policy)
        requests = list(self._requests(self.length + self.samples, deadlines))
        _fill(controller, requests[: self.length])
        _join(controller, num_devices)
        assert controller.tracker.num_waiting() >= self.length - 2 * num_devices, "the requests do not wait"
        return [_handle_ms(controller, Submitted(one), one.arrival_ns) for one in requests[self.length :]]

    def _bytes_each(self, policy: str, deadlines: bool) -> float:
        controller = _controller(policy)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        _fill(controller, self._requests(self.length, deadlines))
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return (after - before) / self.length

    def _deadlines_pass(self, policy: str) -> tuple[str, str, str]:
        """All requests are due at one time, long before a device is free for them; then that time has come."""
        controller, rng = _controller(policy), Random(self.seed)
        due_s = self.common_deadline_s
        _join(controller, self.devices[0])
        for index in range(self.length):
            at_s = index * 1e-3
            one = request_of(rng, at_s, steps=self.steps, slo_s=due_s - at_s, shape=rng.choice(SHAPES))
            controller.handle(Submitted(one), one.arrival_ns)
        first, second = (_handle_ms(controller, Woke(), ns_from_s(due_s + second)) for second in range(2))
        return policy, f"{first:.2f}", f"{second:.2f}"


def _controller(policy: str) -> Controller:
    """One whose queue has room for whatever is asked of it here."""
    return Controller(ControllerConfig(policy=policy, max_jobs=1 << 20, max_backlog_ns=1 << 62), COSTS)


def _fill(controller: Controller, requests: Iterable[Request]) -> None:
    for request in requests:
        controller.handle(Submitted(request), request.arrival_ns)


def _join(controller: Controller, num_devices: int) -> None:
    """Bring devices up. Nothing ever finishes, so they stay busy with their first works."""
    now_ns = len(controller.tracker.jobs) * NS_PER_MS
    for device_id in range(num_devices):
        controller.handle(DeviceJoined(device_id, device_id // 8), now_ns)


def _handle_ms(controller: Controller, event: Event, now_ns: int) -> float:
    start_ns = time.perf_counter_ns()
    controller.handle(event, now_ns)
    return (time.perf_counter_ns() - start_ns) / 1e6
