"""A job inside a rollout: its remaining work and its claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from tilework.cost.demand import Speed


class Claim(IntEnum):
    """The class of a job's claim on devices, in order of service."""

    PINNED = 0
    """The job keeps its devices to its end."""
    OVERDUE = 1
    """The job has waited longer than any request should."""
    FEASIBLE = 2
    """The job has a deadline that can be met."""
    DEFERRED = 3
    """The job has a deadline that it could meet only at the cost of other deadlines."""
    BEST_EFFORT = 4
    """The job has no deadline."""
    LATE = 5
    """The job cannot meet its deadline."""
    HELD = 6
    """The job is late, and gets no device now (`NodeJobs.hold_late`)."""
    AWAITING = 7
    """The job has a deadline, and gets no device now: it waits for one that has its components (`await_devices`)."""


@dataclass(slots=True, eq=False, kw_only=True)
class JobForecast:
    """The remaining work of a job for a rollout, works in flight included.

    `num_steps` need not be whole, since a step may be running. `head_ns` passes before the steps at any degree,
    `tail_ns` after them on one device; at the degree of `speeds[i]`, a share `tail_factors[i]` of it, or all if there
    are none. `speeds` are ascending in degree, each faster than those before it, and never empty: a job without steps
    has those of its tail.

    `job_id` is `NO_JOB` for a device whose works belong to no job that can be planned. `order_key` orders jobs of the
    same claim: the smallest is served first. `due_ns` is the deadline that the job is to meet; inf if there is none.
    `arrival_ns` is when its request came. Steps that are longer than `least_slack_ns` leave one device to others.
    `head_ns` includes `load_ns`, for components that the idle devices lack, or all devices where none is idle; a device
    that is busy would load `spared_ns` less.

    `usual` is the index in `speeds` of the degree at which the job runs when no deadline says otherwise. `level` is the
    index of the degree at which it runs now, -1 if it does not run. Its devices cannot be taken from it before
    `hold_ns` have passed, when its step ends. `shares`: a step on one device may be cheaper in a batch (see `Batch`).
    One that `is_rationed` stays deferred (`Rationing`); one that `is_promised` is never deferred: if it would be
    late even so, it goes first.
    """

    job_id: int
    claim: Claim
    order_key: float
    speeds: tuple[Speed, ...]
    usual: int
    num_steps: float
    head_ns: float
    tail_ns: float
    due_ns: float = inf
    weight: float = 1.0
    level: int = -1
    hold_ns: float = 0.0
    shares: bool = False
    arrival_ns: int = 0
    least_slack_ns: float = inf
    load_ns: float = 0.0
    spared_ns: float = 0.0
    tail_factors: Sequence[float] = ()
    is_rationed: bool = False
    is_promised: bool = False

    def serve_first(self) -> None:
        """Serve a promised job as soon and as wide as possible: it would be late although all others were deferred."""
        self.claim = Claim.OVERDUE
        self.usual = len(self.speeds) - 1

    def tail_at(self, level: int) -> float:
        """Return the time after the steps at the degree of `speeds[level]`."""
        return self.tail_ns * self.tail_factors[level] if self.tail_factors else self.tail_ns

    def ns_at(self, level: int) -> float:
        """Return the time that the remaining work takes at the degree of `speeds[level]`."""
        return self.head_ns + self.num_steps * self.speeds[level].step_ns + self.tail_at(level)

    @property
    def run_ns(self) -> float:
        """The time that the remaining work of a running job takes at its degree, or of another on its narrowest one."""
        return self.ns_at(max(self.level, 0))

    @property
    def least_device_ns(self) -> float:
        """The least device time that the remaining work takes, over all degrees."""
        return min([self.ns_at(level) * speed.degree for level, speed in enumerate(self.speeds)])

    @property
    def usual_ns(self) -> float:
        """The time that the remaining work takes at its usual degree."""
        return self.ns_at(self.usual)

    @property
    def least_ns(self) -> float:
        """The time that the remaining work takes at the widest degree."""
        return self.ns_at(-1)

    def cost(self, now_ns: int) -> float:
        """Return the cost to others of having the job on time: the device time that it needs now, per weight.

        The longer it has waited, the wider it must be, and the more device time its remaining work takes.
        """
        level = self._needed(now_ns)
        return self.ns_at(level) * self.speeds[level].degree / self.weight

    def place(self) -> tuple[int, float, int]:
        """Return the sort key of the order of service."""
        return self.claim, self.order_key, self.job_id

    def needed_degree(self, now_ns: int) -> int:
        """Return the fewest devices with which it is on time from now on; 0 if it need not be served.

        A feasible job that is late at every degree needs the widest one; pinned and overdue jobs need the usual one.
        """
        if self.claim is Claim.FEASIBLE:
            return self.speeds[self._needed(now_ns)].degree
        return self.speeds[self.usual].degree if self.claim < Claim.FEASIBLE else 0

    def _needed(self, now_ns: int) -> int:
        """Return the index in `speeds` of the fewest devices with which it is on time from now on; else of the most."""
        budget_ns = self.due_ns - now_ns
        num_levels = len(self.speeds)
        return next((level for level in range(num_levels) if self.ns_at(level) <= budget_ns), num_levels - 1)
