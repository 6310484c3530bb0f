"""Rolling a node forward: who would be on time if nobody else came, and at which degrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from tilework.policy.demand import Speed

_NEARLY_NS = 1000.0  # Rounding.
_WORTH = 1.3  # How much quicker a wider group must be for a job to be given devices that others could use.


class Claim(IntEnum):
    """What a job may ask for, in order of service.

    FIXED: it keeps its devices to its end. OVERDUE: it has waited longer than anybody has to. DUE: it has a deadline
    that can be met. SPARED: it has one that would cost others theirs. PATIENT: it has none, or cannot meet it.
    """

    FIXED = 0
    OVERDUE = 1
    DUE = 2
    SPARED = 3
    PATIENT = 4


@dataclass(slots=True, eq=False)
class Ride:
    """What is left of a job, with what is under way: `num_steps`, which need not be whole, between two stages.

    `speeds` are ascending in degree, each quicker than those before it, and never empty: for a job without steps that
    of one device. `head_ns` passes before the steps at any degree, `tail_ns` after them. `usual` is the index of the
    degree at which it runs when no deadline says otherwise.
    """

    job_id: int
    claim: Claim
    due_ns: float
    speeds: tuple[Speed, ...]
    usual: int
    num_steps: float
    head_ns: float
    tail_ns: float
    weight: float = 1.0
    least_gpu_ns: float = field(init=False)

    def __post_init__(self) -> None:
        extra_ns = self.head_ns + self.tail_ns
        self.least_gpu_ns = min([self.num_steps * speed.gpu_ns + extra_ns * speed.degree for speed in self.speeds])

    @property
    def least_ns(self) -> float:
        """What is left of it takes at least so long."""
        return self.head_ns + self.num_steps * self.speeds[-1].step_ns + self.tail_ns


@dataclass(frozen=True, slots=True)
class Outlook:
    """What comes of an order of service: the degrees of the rides now, and the first of them that is late.

    At `next_ns` the first of them ends, and from then on they have the degrees `then`.
    """

    degrees: list[int]
    late: int | None
    next_ns: float
    then: list[int]


@dataclass(slots=True)
class _Left:
    """What is left of a ride at some time of the future."""

    ride: Ride
    index: int
    steps: float
    head_ns: float
    tail_ns: float
    rank: int = -1  # Of its speed; -1: it has no devices.

    def run_ns(self) -> float:
        return self.head_ns + self.steps * self.ride.speeds[self.rank].step_ns + self.tail_ns

    def run(self, span_ns: float) -> None:
        step_ns = self.ride.speeds[self.rank].step_ns
        head_ns = min(self.head_ns, span_ns)
        self.head_ns, span_ns = self.head_ns - head_ns, span_ns - head_ns
        if step_ns:
            steps = min(self.steps, span_ns / step_ns)
            self.steps, span_ns = self.steps - steps, span_ns - steps * step_ns
        self.tail_ns -= span_ns


def roll(rides: Sequence[Ride], num_gpus: int, now_ns: int) -> Outlook:
    """Let rides go in this order of service, which is that of their claims, until none is left that is due.

    Whenever one ends, devices are shared anew: see `_share`. Steps are taken for a fluid.
    """
    active = [_Left(ride, index, ride.num_steps, ride.head_ns, ride.tail_ns) for index, ride in enumerate(rides)]
    num_due = sum(ride.claim <= Claim.DUE for ride in rides)
    now, next_ns = float(now_ns), inf
    shares: list[list[int]] = []
    while active and (active[0].index < num_due or len(shares) < 2):
        _share(active, num_gpus, now)
        if len(shares) < 2:
            shares.append([0] * len(rides))
            for one in active:
                shares[-1][one.index] = one.ride.speeds[one.rank].degree if one.rank >= 0 else 0
        running = [one for one in active if one.rank >= 0]
        if not running:
            break
        span_ns = min([one.run_ns() for one in running])
        now += span_ns
        next_ns = min(next_ns, now)
        for one in running:
            one.run(span_ns)
        going = [one for one in active if one.rank < 0 or one.run_ns() > _NEARLY_NS]
        for one in active:
            is_over = one.rank >= 0 and one.run_ns() <= _NEARLY_NS
            if one.ride.claim is Claim.DUE and now > one.ride.due_ns + (_NEARLY_NS if is_over else 0):
                return Outlook(shares[0], one.index, next_ns, shares[-1])
        active = going
    nobody = [0] * len(rides)
    return Outlook(shares[0] if shares else nobody, None, next_ns, shares[1] if len(shares) > 1 else nobody)


def _share(active: Sequence[_Left], free: int, now: float) -> None:
    """Give devices to those who may have some, in this order:

    1. each that is due, in order of service, the narrowest group with which it would be on time if it kept that, or
       else the widest for which there is room;
    2. wider ones to these, where that is worth it;
    3. the usual ones to the others, in order;
    4. what is left to whoever gains by it.
    """
    due: list[_Left] = []
    others: list[_Left] = []
    for one in active:
        one.rank = -1
        (due if one.ride.claim <= Claim.DUE else others).append(one)
    for one in due:
        if free:
            one.rank = _narrowest(one, free, now)
            free -= one.ride.speeds[one.rank].degree if one.rank >= 0 else 0
    free = _widen(due, free, _WORTH)
    for one in others:
        if free:
            one.rank = _widest(one, one.ride.usual, free)
            free -= one.ride.speeds[one.rank].degree if one.rank >= 0 else 0
    _widen(active, free, 1.0)


def _narrowest(one: _Left, free: int, now: float) -> int:
    """The narrowest that is on time; else the widest; for those without a deadline the usual. -1: there is no room."""
    if one.ride.claim is not Claim.DUE:
        return _widest(one, one.ride.usual, free)
    budget_ns, found = one.ride.due_ns - now - one.head_ns - one.tail_ns, -1
    for rank, speed in enumerate(one.ride.speeds):
        if speed.degree > free:
            break
        found = rank
        if one.steps * speed.step_ns <= budget_ns:
            break
    return found


def _widest(one: _Left, most: int, free: int) -> int:
    return next((rank for rank in range(most, -1, -1) if one.ride.speeds[rank].degree <= free), -1)


def _widen(candidates: Iterable[_Left], free: int, worth: float) -> int:
    """Widen, again and again, the group that saves most time per device by it; returns how many are still free."""
    growing = [one for one in candidates if one.rank >= 0 and one.ride.claim is not Claim.FIXED]
    while free:
        best, most = None, 0.0
        for one in growing:
            speeds, rank = one.ride.speeds, one.rank
            if rank + 1 == len(speeds):
                continue
            narrow, wide = speeds[rank], speeds[rank + 1]
            extra = wide.degree - narrow.degree
            if extra <= free and narrow.step_ns >= worth * wide.step_ns:
                gain = one.steps * (narrow.step_ns - wide.step_ns) / extra
                if gain > most:
                    best, most = one, gain
        if best is None:
            break
        speeds = best.ride.speeds
        best.rank += 1
        free -= speeds[best.rank].degree - speeds[best.rank - 1].degree
    return free
