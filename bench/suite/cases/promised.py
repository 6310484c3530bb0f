"""What an answer to one more promise takes the controller, when many are promised."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median

from suite.case import Check, Finding, Note, Table
from suite.stats import bootstrap
from suite.workload import COSTS, SHAPES, request_of
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Accept
from tilework.core.events import Cancelled, DeviceJoined, Submitted
from tilework.core.request import OnMiss, Request
from tilework.core.time import NS_PER_S

_TENANT, _OTHER = "first", "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """One tenant has each of `counts` promised images on `devices`; then `samples` calls of each kind come.

    `each_s`: how long a device is promised for one image, about. Deadlines are drawn evenly from a time that is longer
    by `spare` than all promises take together.
    """

    counts: tuple[int, ...] = (100, 1_000, 12_000, 25_000)
    devices: tuple[int, ...] = (8, 64)
    samples: int = 40
    policy: str = "tilework"
    steps: int = 20
    each_s: float = 4.0
    spare: float = 0.3
    most_ms: float = 5.0
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Promised:
        return cls(counts=(100, 1_000), samples=10) if quick else cls()

    def measure(self, note: Note) -> Finding:
        checks: list[Check] = []
        rows: list[tuple[str, ...]] = []
        for num_devices in self.devices:
            made = _Promises(self, num_devices)
            first: dict[str, float] = {}
            for count in self.counts:
                note(f"{count} promised on {num_devices} devices")
                made.fill(count)
                for kind, call in made.kinds().items():
                    answers = [made.answer(call()) for _ in range(self.samples)]
                    times = [ms for ms, _ in answers]
                    share = sum(is_accepted for _, is_accepted in answers) / self.samples
                    ratio = median(times) / first.setdefault(kind, median(times))
                    shown = f"{share:.0%}", f"{median(times):.2f}", f"{max(times):.2f}", f"{ratio:.1f}"
                    rows.append((str(num_devices), f"{count}", kind, *shown))
                    if count == self.counts[-1]:
                        what = f"{num_devices} devices, {count} promised: {kind}"
                        checks.append(
                            Check(what=what, measured=bootstrap(times, self.seed), high=self.most_ms, unit="ms")
                        )
        return Finding(
            checks=tuple(checks),
            method=(
                f"CPU time of `Controller.handle(Submitted)` under `{self.policy}`, {self.samples} calls of each kind; "
                "the interval is a 95% bootstrap of the median. What was accepted is cancelled before the next call, "
                "which is not counted. Nothing ends: all promises stay.",
            ),
            tables=(
                Table(
                    title="One more call, CPU time in ms",
                    columns=(
                        "devices",
                        "promised",
                        "call",
                        "accepted",
                        "median",
                        "largest",
                        "times that of the fewest",
                    ),
                    rows=tuple(rows),
                ),
            ),
        )


@dataclass(slots=True)
class _Promises:
    """A controller whose devices are up, and the promises that it has given."""

    case: Promised
    num_devices: int
    rng: Random = field(init=False)
    controller: Controller = field(init=False)
    num_given: int = 0

    def __post_init__(self) -> None:
        self.rng = Random(self.case.seed)
        config = ControllerConfig(policy=self.case.policy, max_jobs=1 << 20, max_backlog_ns=1 << 62)
        self.controller = Controller(config, COSTS)
        for device_id in range(self.num_devices):
            self.controller.handle(DeviceJoined(device_id, device_id // 8), 0)

    @property
    def _span_s(self) -> float:
        """How far away the deadlines are."""
        return (1 + self.case.spare) * self.case.each_s * self.case.counts[-1] / self.num_devices + 60

    def fill(self, count: int) -> None:
        """Give promises until there is this number."""
        while self.num_given < count:
            asked = self._request(_TENANT, self.rng.uniform(30, self._span_s))
            self.num_given += isinstance(self.controller.handle(Submitted(asked), 0)[0], Accept)

    def _request(self, tenant: str, slo_s: float, on_miss: OnMiss = OnMiss.REJECT) -> Request:
        one = request_of(self.rng, 0.0, steps=self.case.steps, slo_s=slo_s, shape=self.rng.choice(SHAPES))
        return replace(one, on_miss=on_miss, tenant=tenant)

    def kinds(self) -> dict[str, Callable[[], Sequence[Request]]]:
        """The calls that are made."""
        rng, end_s = self.rng, self._span_s

        def call(tenant: str, slo_s: float, num: int = 1) -> Sequence[Request]:
            one = self._request(tenant, slo_s)
            return [replace(one, uid=f"{one.uid} {index}") for index in range(num)]

        return {
            "of the same tenant": lambda: call(_TENANT, rng.uniform(0.2, 0.9) * end_s),
            "of another tenant": lambda: call(_OTHER, rng.uniform(0.2, 0.9) * end_s),
            "after all others": lambda: call(_OTHER, 2 * end_s),
            "out of reach": lambda: call(_OTHER, rng.uniform(0.1, 1.0)),
            "ten images": lambda: call(_OTHER, rng.uniform(0.2, 0.9) * end_s, 10),
            "ten images, out of reach": lambda: call(_OTHER, rng.uniform(0.1, 1.0), 10),
            "without a promise": lambda: [self._request(_OTHER, rng.uniform(0.2, 0.9) * end_s, OnMiss.BEST_EFFORT)],
        }

    def answer(self, call: Sequence[Request]) -> tuple[float, bool]:
        """The CPU time of a call in ms, and whether it is accepted; then it is cancelled."""
        event = Submitted(call[0], tuple(call[1:]))
        start_ns = time.process_time_ns()
        actions = self.controller.handle(event, 0)
        ms = (time.process_time_ns() - start_ns) / (NS_PER_S / 1000)
        is_accepted = isinstance(actions[0], Accept)
        for one in call if is_accepted else ():
            self.controller.handle(Cancelled(one.uid, "measured"), 0)
        return ms, is_accepted
