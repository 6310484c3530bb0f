"""The rule of admission: when would this request be finished, and is that good enough?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from tilework.core.interfaces import Admitted, Backlog, CostModel, Refused
from tilework.core.progress import Cursor
from tilework.core.request import OnMiss, Request
from tilework.core.time import s_from_ns

# Beyond this many jobs ahead, the first ones are poured over the devices like a fluid; the rest are placed one by one.
_PLACED_ONE_BY_ONE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EtaAdmission:
    """Accept everything but a request with `on_miss: reject` whose predicted finish lies after its deadline.

    The prediction lets all jobs that are served before it take, in order, the device that is free first.
    """

    def admit(
        self, request: Request, urgency_ns: int, backlog: Backlog, costs: CostModel, now_ns: int
    ) -> Admitted | Refused:
        """Raises UnknownCost if nothing is known of the request's pipeline."""
        service_ns = service_time_ns(request, costs)
        free_ns = backlog.device_free_ns(now_ns)
        must_be_on_time = request.on_miss is OnMiss.REJECT and request.deadline_ns is not None
        if not free_ns:
            if must_be_on_time:
                return Refused("no device is up", None)
            return Admitted(now_ns + service_ns)
        eta_ns = start_ns(free_ns, backlog.ahead_ns(urgency_ns)) + service_ns
        if must_be_on_time and request.deadline_ns is not None and eta_ns > request.deadline_ns:
            late_s = s_from_ns(eta_ns - request.deadline_ns)
            return Refused(f"it would be {late_s:.2f} s late behind {backlog.num_jobs()} other requests", eta_ns)
        return Admitted(eta_ns)


def service_time_ns(request: Request, costs: CostModel) -> int:
    """Predicted device time of the whole request at degree 1."""
    return sum(
        costs.run_ns(stage, (request.shape,), 1, num_steps) for stage, num_steps in Cursor.start(request).pieces()
    )


def start_ns(free_ns: Sequence[int], ahead_ns: Sequence[int]) -> int:
    """When a device takes up a new job, after the jobs ahead have each taken the first free device in order."""
    heap = list(free_ns)
    poured = len(ahead_ns) - _PLACED_ONE_BY_ONE
    if poured > 0:
        heap = _pour(sorted(heap), sum(ahead_ns[:poured]))
    heapify(heap)
    for job_ns in ahead_ns[max(0, poured) :]:
        heapreplace(heap, heap[0] + job_ns)
    return heap[0]


def _pour(free_ns: list[int], volume_ns: int) -> list[int]:
    """Level the devices' free times from below with `volume_ns` of work; `free_ns` is sorted."""
    for count in range(1, len(free_ns) + 1):
        level_ns = (sum(free_ns[:count]) + volume_ns) // count
        if count == len(free_ns) or level_ns <= free_ns[count]:
            return [level_ns] * count + free_ns[count:]
    raise AssertionError("no device to pour work on")
