"""One measurement, on all workers that serve a model or on some, and the time that its groups may take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from tilework.core.cost_row import CostRow
from tilework.core.wire.commands import GroupRef
from tilework.core.wire.reports import Calibrated
from tilework.core.work import Group
from tilework.runtime.executor import CannotRun, WorkerStartFailed

_log = logging.getLogger(__name__)
LEAST_S, FACTOR = 40.0, 10.0
"""A group may take `FACTOR` times as long as its workers alone, and at least `LEAST_S`."""
COMPILING_S = 600.0
_END_S = 10.0  # Time for a worker whose group was broken off to report that.


class Calibration:
    """The answers of workers, alone or in groups.
    A group ends when one of its workers could not go on, or after `limit_s`. A worker that measures alone ends when it
    takes far longer than half of the others did.

    In a collective the other workers would wait for that worker forever. `break_off` ends a group for all of them;
    `kill` ends a worker that does not answer even then.
    """

    def __init__(
        self,
        groups: Mapping[Group, GroupRef | None],
        limit_s: float,
        break_off: Callable[[GroupRef], None],
        kill: Callable[[int, str], None],
    ) -> None:
        self._groups = groups
        self._break_off = break_off
        self._kill = kill
        self._limit_s = limit_s
        self._broken: set[Group] = set()
        self._errors: dict[Group, str] = {}  # The first of each group, in the order of the answers.
        loop = asyncio.get_running_loop()
        self._answers = {one: loop.create_future() for group in groups for one in group}
        self._is_alone = not any(groups.values())
        self._begin_s = loop.time()
        self._timer = loop.call_later(limit_s, self._time_out)

    async def rows(self) -> tuple[CostRow, ...]:
        """Return the rows that all of them have measured; a warning names those that could not.

        Raises:
            CannotRun: none of them could.
            WorkerStartFailed: one is lost.
        """
        try:
            found: list[Calibrated] = await asyncio.gather(*self._answers.values())
        except WorkerStartFailed:
            self._warn()
            raise
        finally:
            self._timer.cancel()
        rows = tuple(row for one in found for row in one.rows)
        if self._errors and not rows and self._errors.keys() == self._groups.keys():
            raise CannotRun(next(iter(self._errors.values())))
        self._warn()
        return rows

    def _warn(self) -> None:
        alone: dict[str, list[int]] = {}
        for group, error in self._errors.items():
            if self._groups[group] is None:
                alone.setdefault(error, []).extend(group)
            else:
                _log.warning("devices %s are not measured together: %s", ", ".join(map(str, group)), error)
        for error, devices in alone.items():
            _log.warning("%s; it is left out on device %s", error, ", ".join(map(str, devices)))

    def answered(self, device_id: int, report: Calibrated) -> None:
        answer = self._answers.get(device_id)
        if answer is None or answer.done():  # It is done if the caller was cancelled.
            return
        answer.set_result(report)
        if self._is_alone and 2 * sum(one.done() for one in self._answers.values()) >= len(self._answers):
            took_s = asyncio.get_running_loop().time() - self._begin_s  # The time that half of the workers needed.
            self._limit_s = min(self._limit_s, max(LEAST_S, FACTOR * took_s))
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._limit_s - took_s, self._time_out)
        if report.error:
            group = next(group for group in self._groups if device_id in group)
            self._errors.setdefault(group, report.error)
            self._end(group)

    def awaits(self, device_id: int) -> bool:
        """Return whether this worker has not answered yet."""
        answer = self._answers.get(device_id)
        return answer is not None and not answer.done()

    def fail(self, error: WorkerStartFailed) -> bool:
        """End the measurement; returns whether an answer was waited for."""
        waiting = [one for one in self._answers.values() if not one.done()]
        for one in waiting:
            one.set_exception(error)
        return bool(waiting)

    def _end(self, group: Group) -> None:
        ref = self._groups[group]
        if ref is not None and group not in self._broken:
            self._broken.add(group)
            self._break_off(ref)

    def _time_out(self) -> None:
        for group, ref in self._groups.items():
            late = [one for one in group if not self._answers[one].done()]
            if ref is not None and late:
                workers = f"worker{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
                self._errors.setdefault(group, f"{workers} did not answer within {self._limit_s:g} s")
                self._end(group)
        self._timer = asyncio.get_running_loop().call_later(_END_S, self._kill_late)

    def _kill_late(self) -> None:
        for one, answer in self._answers.items():
            if not answer.done():
                self._kill(one, f"it did not end a measurement within {self._limit_s:g} s")
