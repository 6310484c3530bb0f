"""What is done about works that have stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tilework.control.watchdog import Watchdog
from tilework.core.time import NS_PER_S, s_from_ns
from tilework.core.work import Work
from tilework.runtime.executor import Executor
from tilework.runtime.in_flight import InFlightWorks

_log = logging.getLogger(__name__)


class StuckWorkMonitor:
    """Asks a watchdog every `tick_ns` on the running loop, from when it is made until `stop`.

    The group of a work that has stopped is broken off first: its members say how far they came, which frees those that
    only waited for another. Who has said nothing by the next alarm is killed, as is at once who runs a work alone.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        tick_ns: int,
        in_flight: InFlightWorks,
        executor: Executor,
        on_stuck: Callable[[Work], None],
    ) -> None:
        self._watchdog = watchdog
        self._tick_s = tick_ns / NS_PER_S
        self._in_flight = in_flight
        self._executor = executor
        self._on_stuck = on_stuck
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(self._tick_s, self._look)

    def stop(self) -> None:
        self._next.cancel()

    def _look(self) -> None:
        self._next = self._loop.call_later(self._tick_s, self._look)
        for work in self._watchdog.look():
            self._free(work)

    def _free(self, work: Work) -> None:
        limit_s = s_from_ns(self._watchdog.limit_ns(work))
        self._on_stuck(work)
        _log.warning(
            "work %d (%s of job %s) made no progress for %g s on %s; if steps may take that long, raise --stuck-after",
            *(work.work_id, work.stage, ", ".join(map(str, work.job_ids)), limit_s, work.devices),
        )
        in_flight_work = self._in_flight.get(work.work_id)
        if in_flight_work is not None and in_flight_work.group is not None and not in_flight_work.is_broken_off:
            in_flight_work.is_broken_off = True
            self._executor.break_off(in_flight_work.group)
            return
        for device_id in work.devices if in_flight_work is None else sorted(in_flight_work.awaited):
            self._executor.kill(device_id, f"it made no progress for {limit_s:g} s")
