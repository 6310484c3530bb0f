"""Times at which devices are free after the jobs ahead of a new one, in a time independent of the number of devices.

Theory of operation. Running jobs are placed first, in order of service, then waiting jobs (`list_schedule.place`).
Of a long queue all but the last jobs count as a volume that is poured over the devices like a fluid. The free times
after the running jobs are the same for all requests until a device or a running job changes, so they are kept, with the
sums from which the level of any volume follows by bisection. After that, a block needs only as many devices as it and
the blocks before it are wide together, those that are free first: each block takes the last of the devices that are
free when it begins, and leaves those before them as they are. If all these devices are free at the same time, as after
a volume that covers them, no block waits for another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from itertools import accumulate
from operator import itemgetter

from tilework.admission.contract import Ahead, Running
from tilework.admission.list_schedule import FreeTimes, end_of_next, place
from tilework.core.block import Demand

_width = itemgetter(Demand._fields.index("width"))  # Three times as fast as by name, for a hundred jobs ahead.
_USUAL_WIDTH = 8  # Groups are rarely wider.
_STRIDE = 32  # Running jobs between two states that are kept.


class FreeAfterRunning:
    """Times at which devices are free after the running jobs before a place in the order of service.

    `free_ns` are the times without these jobs, ascending; `running` are in order of service. Nodes are ignored.
    """

    def __init__(self, free_ns: FreeTimes, running: Sequence[Running]) -> None:
        self._running = running
        self._marks = [FreeDevices(free_ns)]  # Before each `_STRIDE`-th running job.
        self._latest = 0, self._marks[0]

    def before(self, key: tuple[int, int]) -> FreeDevices:
        """Return when devices are free after the running jobs before a place (urgency, job id)."""
        index = bisect_left(self._running, key, key=_place)
        if self._latest[0] != index:
            self._latest = index, self._at(index)
        return self._latest[1]

    def _at(self, index: int) -> FreeDevices:
        number, num_more = divmod(index, _STRIDE)
        while len(self._marks) <= number:
            first = (len(self._marks) - 1) * _STRIDE
            self._marks.append(self._marks[-1].after(self._running[first : first + _STRIDE]))
        mark = self._marks[number]
        return mark.after(self._running[index - num_more : index]) if num_more else mark


class FreeDevices:
    """Times at which devices are free, ascending. `free_ns` is read-only."""

    def __init__(self, free_ns: FreeTimes) -> None:
        self.free_ns = free_ns
        self._sums_ns: list[int] = []

    def after(self, running: Sequence[Running]) -> FreeDevices:
        """Return the devices after these jobs have been placed on them, in order."""
        free_ns = self.free_ns.copy()
        for _, ready_ns, demand in running:
            place(free_ns, demand, ready_ns)
        return FreeDevices(free_ns)

    def poured(self, volume_ns: int, most: int) -> FreeTimes:
        """Return when the first `most` devices, or all, are free after this volume of work was poured on all of them.

        The volume raises the free times from below to a level.
        """
        if not volume_ns:
            return self.free_ns[:most]
        self._sums_ns = self._sums_ns or [0, *accumulate(self.free_ns)]
        count = len(self.free_ns)
        if count > 1 and volume_ns < self._room_ns(count - 1):
            count = 1 + bisect_left(range(1, count - 1), 1, key=lambda first: volume_ns < self._room_ns(first))
        level_ns = (volume_ns + self._sums_ns[count]) // count
        return [level_ns] * min(count, most) + self.free_ns[count:most]

    def _room_ns(self, count: int) -> int:
        """Return the least volume that raises the first `count` devices above the next one. It grows with `count`."""
        return count * (self.free_ns[count] + 1) - self._sums_ns[count]


@dataclass(slots=True)
class FreeAfterAhead:
    """Times at which the devices of a part are free after the jobs ahead: first the running, then the waiting jobs.

    They are computed for a block of the usual width, or wider, and kept: a narrower block needs no others.
    """

    devices: FreeDevices
    waiting: Ahead
    _width: int = field(default=0, init=False)
    _free_ns: FreeTimes = field(default_factory=list, init=False)

    def end_ns(self, block: Demand, ready_ns: int = 0) -> int:
        """Return the end of a block that comes next, not before `ready_ns`."""
        if block.width > self._width:
            self._width = max(block.width, _USUAL_WIDTH)
            self._free_ns = self._after_waiting(self._width)
        return end_of_next(self._free_ns, block, ready_ns)

    def _after_waiting(self, width: int) -> FreeTimes:
        """Return when as many devices are free as a block of this width and the blocks before it need."""
        most = width + sum(map(_width, self.waiting.demands))
        free_ns = self.devices.poured(self.waiting.volume_ns, most)
        if len(free_ns) == most and free_ns[0] == free_ns[-1]:
            return free_ns
        if most == width + len(self.waiting.demands):  # Each takes one device: `place`, ten times as fast.
            for demand in self.waiting.demands:
                heapreplace(free_ns, free_ns[0] + demand.run_ns)
            return sorted(free_ns)
        for demand in self.waiting.demands:
            place(free_ns, demand)
        return free_ns


def _place(running: Running) -> tuple[int, int]:
    return running.place
