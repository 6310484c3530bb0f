"""Metrics of devices: works, their times against the prediction, and the time between them."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from tilework.core.request import Shape
from tilework.core.time import s_from_ns
from tilework.core.wire.reports import Ending
from tilework.runtime.bubbles import Bubbles
from tilework.runtime.observer import EndedWork
from tilework.server.metrics import families
from tilework.server.metrics.meters import Meters, Names

_SHARED = "shared"  # In place of a size, for works of several requests.


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkMeters:
    """The meters of works of one stage, size and degree: looking one up by its labels takes as long as moving it."""

    done: Counter
    ratio: Histogram
    seconds: Histogram
    correction: Gauge
    step_seconds: Histogram | None
    steps: Counter | None


class WorkMetrics:
    """Counts works when they end. Stages that run on one device have a degree, too: 1."""

    def __init__(self, meters: Meters, sizes: Names) -> None:
        self._sizes = sizes
        self._bubbles = Bubbles()
        self._meters: dict[tuple[str, Shape | None, int], _WorkMeters] = {}
        self._devices: dict[int, tuple[Counter, Counter]] = {}
        self._works = meters.counter(families.WORKS)
        self._steps = meters.counter(families.STEPS)
        self._seconds = meters.histogram(families.WORK_SECONDS)
        self._step_seconds = meters.histogram(families.STEP_SECONDS)
        self._ratio = meters.histogram(families.PREDICTION_RATIO)
        self._correction = meters.gauge(families.COST_CORRECTION_RATIO)
        self._busy = meters.counter(families.DEVICE_BUSY_SECONDS)
        self._bubble = meters.counter(families.BUBBLE_SECONDS)
        self._losses = meters.counter(families.DEVICE_LOSSES)

    def ended(self, ended: EndedWork) -> None:
        work = ended.work
        key = (work.stage.name, ended.requests[0].shape if len(ended.requests) == 1 else None, len(work.devices))
        meters = self._meters.get(key)
        if meters is None:
            meters = self._make_meters(*key, has_steps=work.stage.has_steps)
        if ended.ending is Ending.DONE:
            meters.done.inc()
            self._measure(meters, ended)
        else:
            self._works.labels(work.stage.name, str(len(work.devices)), ended.ending).inc()
        if meters.steps is not None and ended.steps_done:
            meters.steps.inc(ended.steps_done * len(ended.requests))
        self._pass_time(ended)

    def _make_meters(self, stage: str, shape: Shape | None, degree: int, *, has_steps: bool) -> _WorkMeters:
        """Make these meters; they are kept if their size has a label of its own."""
        size = _SHARED if shape is None else self._sizes.of(shape)
        many = str(degree)
        meters = _WorkMeters(
            done=self._works.labels(stage, many, Ending.DONE),
            seconds=self._seconds.labels(stage, size, many),
            ratio=self._ratio.labels(stage),
            correction=self._correction.labels(stage, size, many),
            step_seconds=self._step_seconds.labels(size, many) if has_steps else None,
            steps=self._steps.labels(many) if has_steps else None,
        )
        if shape is None or size == str(shape):
            self._meters[stage, shape, degree] = meters
        return meters

    def _measure(self, meters: _WorkMeters, ended: EndedWork) -> None:
        run_ns = ended.end_ns - ended.start_ns
        meters.seconds.observe(s_from_ns(run_ns))
        meters.correction.set(ended.correction)
        if meters.step_seconds is not None:
            meters.step_seconds.observe(s_from_ns(run_ns) / ended.steps_done)
        if run_ns > 0 and ended.predicted_ns > 0:
            meters.ratio.observe(ended.predicted_ns / run_ns)

    def _pass_time(self, ended: EndedWork) -> None:
        for device_id in ended.work.devices:
            if device_id in self._devices:  # Not if the device was lost meanwhile.
                bubble_ns = self._bubbles.ran(device_id, ended.start_ns, ended.end_ns)
                busy, bubble = self._devices[device_id]
                busy.inc(s_from_ns(ended.end_ns - ended.start_ns))
                if bubble_ns:
                    bubble.inc(s_from_ns(bubble_ns))

    def decided(self, now_ns: int, num_waiting: int) -> None:
        self._bubbles.set_waiting(num_waiting > 0, now_ns)

    def joined(self, device_id: int, now_ns: int) -> None:
        name = str(device_id)
        self._losses.labels(name)
        self._devices[device_id] = self._busy.labels(name), self._bubble.labels(name)
        self._bubbles.idle_from(device_id, now_ns)

    def lost(self, device_id: int) -> None:
        self._losses.labels(str(device_id)).inc()
        self._devices.pop(device_id, None)
