"""The rule of admission: when would this request be finished, and is that good enough?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from tilework.core.interfaces import Admitted, Backlog, Demand, Refused
from tilework.core.request import OnMiss, Request
from tilework.core.time import s_from_ns

# Beyond this many jobs ahead, the first ones are poured over the devices like a fluid; the rest are placed one by one.
_PLACED_ONE_BY_ONE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EtaAdmission:
    """Accept everything but a request with `on_miss: reject` whose predicted finish lies after its deadline.

    The prediction lets all jobs that are served before it take, in order, as many devices as the policy would give
    them, those that are free first.
    """

    def admit(
        self, request: Request, urgency_ns: int, demand: Demand, backlog: Backlog, now_ns: int
    ) -> Admitted | Refused:
        free_ns = backlog.device_free_ns(now_ns)
        must_be_on_time = request.on_miss is OnMiss.REJECT and request.deadline_ns is not None
        if not free_ns:
            if must_be_on_time:
                return Refused("no device is up", None)
            return Admitted(now_ns + demand.run_ns)
        eta_ns = finish_ns(free_ns, backlog.ahead(urgency_ns), demand)
        if must_be_on_time and request.deadline_ns is not None and eta_ns > request.deadline_ns:
            late_s = s_from_ns(eta_ns - request.deadline_ns)
            return Refused(f"it would be {late_s:.2f} s late behind {backlog.num_jobs()} other requests", eta_ns)
        return Admitted(eta_ns)


def finish_ns(free_ns: Sequence[int], ahead: Sequence[Demand], last: Demand) -> int:
    """When `last` is done, after the jobs ahead have each taken, in order, the devices that are free first.

    A block begins when enough devices are free, and holds all of them to its end. One that is wider than there are
    devices takes them all.
    """
    poured = len(ahead) - _PLACED_ONE_BY_ONE
    levels = sorted(free_ns)
    if poured > 0:
        levels = _pour(levels, sum(block.width * block.run_ns for block in ahead[:poured]))
    for block in ahead[max(0, poured) :]:
        _place(levels, block)
    return _place(levels, last)


def _place(heap: list[int], block: Demand) -> int:
    """Let a block take the devices that are free first; returns its end. `heap` holds when each device is free."""
    width = min(block.width, len(heap))
    start_ns = max(heappop(heap) for _ in range(width))
    for _ in range(width):
        heappush(heap, start_ns + block.run_ns)
    return start_ns + block.run_ns


def _pour(free_ns: list[int], volume_ns: int) -> list[int]:
    """Level the devices' free times from below with `volume_ns` of work; `free_ns` is sorted, and so is the answer."""
    for count in range(1, len(free_ns) + 1):
        level_ns = (sum(free_ns[:count]) + volume_ns) // count
        if count == len(free_ns) or level_ns <= free_ns[count]:
            return [level_ns] * count + free_ns[count:]
    raise AssertionError("no device to pour work on")
