"""Detects works and loads that make no progress."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.control.cluster.tracker import Tracker
from tilework.core.policy import CostModel
from tilework.core.time import NS_PER_S
from tilework.core.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogConfig:
    """A driver checks every `tick_ns`. A step may take `factor` times as long as predicted, and at least `least_ns`.

    `least_ns` is more than a first step takes that allocates or compiles.
    """

    tick_ns: int = NS_PER_S
    least_ns: int = 20 * NS_PER_S
    factor: int = 10


@dataclass(slots=True, kw_only=True, eq=False)
class _Quiet:
    """The ticks since a work began or finished a step, or since a load began; -1 until the first tick after that."""

    limit_ns: int
    ticks: int = -1


class Watchdog:
    """Finds works that should run and have finished no step for too long.

    A work should run when it is the first on every device that still has it, and the earlier works of its jobs have
    ended. Time is counted in ticks, never by a clock: while a machine is suspended, or the driver is blocked, no work
    becomes suspicious. An alarm may be false where steps take far longer than predicted; it costs a chunk of steps.

    A measurement is no work: it has its own limits.

    A load before a work is a part of that work. A load ahead of need delays no work, but a stuck one would never free
    its device. It makes no progress while the device has works.
    """

    def __init__(self, tracker: Tracker, costs: CostModel, config: WatchdogConfig) -> None:
        self._tracker = tracker
        self._costs = costs
        self._config = config
        self._quiet: dict[int, _Quiet] = {}
        self._quiet_loads: dict[tuple[int, int], _Quiet] = {}  # Loads ahead of need, by device and its first load.

    def on_progress(self, work_id: int) -> None:
        """Record that a step of this work has ended."""
        if quiet := self._quiet.get(work_id):
            quiet.ticks = -1

    def check(self) -> list[Work]:
        """Return the works without progress for longer than their limit, each again after every further limit.

        To be called once per tick.
        """
        running = self._running()
        self._quiet = {
            work.work_id: self._quiet.get(work.work_id) or _Quiet(limit_ns=self.limit_ns(work)) for work in running
        }
        return [work for work in running if self._is_stuck(self._quiet[work.work_id])]

    def check_loads(self) -> list[tuple[int, int]]:
        """Return the devices without works whose next load takes longer than its limit, each with the limit in ns.

        To be called once per tick.
        """
        known, self._quiet_loads = self._quiet_loads, {}
        for device in self._tracker.up.values():
            if device.is_loading and not device.works:
                key = device.device_id, next(load_id for load_id in device.loads)
                limit_ns = max(self._config.least_ns, self._config.factor * device.ahead_ns())
                self._quiet_loads[key] = known.get(key) or _Quiet(limit_ns=limit_ns)
        return [(key[0], quiet.limit_ns) for key, quiet in self._quiet_loads.items() if self._is_stuck(quiet)]

    def limit_ns(self, work: Work) -> int:
        """Return how long a work may make no progress, which includes loads before it.

        `least_ns` if all its jobs have ended, so that nothing is predicted.
        """
        requests = [job.request for job in self._tracker.members(work)]
        step_ns = self._costs.work_ns(work.stage, requests, len(work.devices)) if requests else 0
        devices = [device for one in work.devices if (device := self._tracker.up.get(one)) is not None]
        load_ns = max([device.load_ns(work.work_id) for device in devices], default=0)
        return max(self._config.least_ns, self._config.factor * max(step_ns, load_ns))

    def _running(self) -> list[Work]:
        """Return the works that should run."""
        heads = {device.works[0].work_id: device.works[0] for device in self._tracker.up.values() if device.works}
        return [work for work in heads.values() if self._should_run(work)]

    def _should_run(self, work: Work) -> bool:
        devices = [self._tracker.up.get(device_id) for device_id in work.devices]
        queues = [device.works for device in devices if device is not None and work in device.works]
        is_first = work.work_id in self._tracker.works and all(works[0] is work for works in queues)
        return is_first and self._tracker.awaited(work) is None

    def _is_stuck(self, quiet: _Quiet) -> bool:
        quiet.ticks += 1
        is_stuck = quiet.ticks * self._config.tick_ns > quiet.limit_ns
        if is_stuck:
            quiet.ticks = 0
        return is_stuck
