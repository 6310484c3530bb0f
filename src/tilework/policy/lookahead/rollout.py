"""Rolling a node forward: who would be on time if nobody else came, and at which degrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from math import inf

from tilework.policy.toolkit.demand import Speed

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
    degree at which it runs when no deadline says otherwise. `rank` is that of the degree at which it runs now, -1 if it
    does not; these devices cannot be taken from it before `hold_ns` have passed, when its step ends. `due_ns` is the
    deadline of one that is due, for the others only their place among those of equal claim: the smaller, the sooner.
    `shares` tells that a step on one device may be cheaper together with others' (see `Batch`).
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
    rank: int = -1
    hold_ns: float = 0.0
    shares: bool = False

    @property
    def least_device_ns(self) -> float:
        """What is left of it takes at least so much time of devices."""
        extra_ns = self.head_ns + self.tail_ns
        return min([self.num_steps * speed.device_ns + extra_ns * speed.degree for speed in self.speeds])

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


@dataclass(slots=True, eq=False)
class _Left:
    """What is left of a ride at some time of the future."""

    ride: Ride
    index: int
    steps: float
    head_ns: float
    tail_ns: float
    rank: int = -1  # Of its speed; -1: it has no devices.
    before: int = -1  # The rank that it had last.
    hold_ns: float = 0.0

    @property
    def degree(self) -> int:
        return self.ride.speeds[self.rank].degree

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


def roll(rides: Sequence[Ride], num_devices: int, now_ns: int, calm_ns: float = inf) -> Outlook:
    """Let rides go in this order of service, which is that of their claims, until none is left that is due.

    Those of `Claim.DUE` are in order of their deadlines. Whenever a ride ends, devices are shared anew: see `_share`.
    Whoever runs now keeps his devices to the end of the step; after that, steps are taken for a fluid. Nobody is given
    more devices than he needs, if a step on them takes longer than `calm_ns` and none would be left.

    It is the inner loop of the look-ahead: a round touches those who have devices, not all who wait.
    """
    left = [
        _Left(ride, index, ride.num_steps, ride.head_ns, ride.tail_ns, before=ride.rank, hold_ns=ride.hold_ns)
        for index, ride in enumerate(rides)
    ]
    certain = [one for one in left if one.ride.claim < Claim.DUE]
    due = [one for one in left if one.ride.claim is Claim.DUE]
    others = [one for one in left if one.ride.claim > Claim.DUE]
    in_step = [one for one in left if one.hold_ns > _NEARLY_NS]
    now, next_ns = float(now_ns), inf
    shares: list[list[int]] = []
    while certain or due or (others and len(shares) < 2):
        running, turn_ns = _share(certain, due, others, num_devices, now, calm_ns), inf
        if not shares or (len(shares) < 2 and next_ns < inf):
            shares.append(_degrees(running, len(rides)))
        if in_step:
            running, turn_ns = _obtained(running, in_step, num_devices)
        if not running:
            break
        runs_ns = [one.run_ns() for one in running]
        span_ns = min(*runs_ns, turn_ns)
        now += span_ns
        late: list[int] = []
        for one, run_ns in zip(running, runs_ns, strict=True):
            one.before, one.hold_ns = one.rank, one.hold_ns - span_ns
            if run_ns - span_ns > _NEARLY_NS:
                one.run(span_ns)
                one.rank = -1
                continue
            next_ns = min(next_ns, now)
            one.rank = -1
            if one.ride.claim is Claim.DUE:
                due.remove(one)
                if now > one.ride.due_ns + _NEARLY_NS:
                    late.append(one.index)
            else:
                (certain if one.ride.claim < Claim.DUE else others).remove(one)
        in_step = [one for one in in_step if one.hold_ns > _NEARLY_NS]
        if due and now > due[0].ride.due_ns:
            late.append(due[0].index)
        if late:
            return Outlook(shares[0], min(late), next_ns, shares[-1])
    nobody = [0] * len(rides)
    return Outlook(shares[0] if shares else nobody, None, next_ns, shares[1] if len(shares) > 1 else nobody)


def _degrees(running: Iterable[_Left], num_rides: int) -> list[int]:
    degrees = [0] * num_rides
    for one in running:
        degrees[one.index] = one.degree
    return degrees


def _obtained(running: Sequence[_Left], in_step: Sequence[_Left], free: int) -> tuple[list[_Left], float]:
    """What each can have of its share at once: whoever is in a step ends it, others take what fits.

    Returns those who have devices, and how long it is until the first has more or fewer of them; `free` is how many
    devices there are.
    """
    turning = [one for one in in_step if one.rank != one.before]
    if not turning:
        return list(running), inf
    for one in turning:
        one.rank = one.before
    free -= sum(one.degree for one in in_step)
    obtained = list(in_step)
    for one in running:
        if one.hold_ns > _NEARLY_NS:
            continue
        one.rank = _widest(one, one.rank, free)
        if one.rank >= 0:
            free -= one.degree
            obtained.append(one)
    return obtained, min(one.hold_ns for one in turning)


def _share(
    certain: Sequence[_Left], due: Sequence[_Left], others: Sequence[_Left], free: int, now: float, calm_ns: float
) -> list[_Left]:
    """Give devices to those who may have some, in this order:

    1. each that is due, in order of service, the narrowest group with which it would be on time if it kept that, or
       else the widest for which there is room;
    2. wider ones to these, where that is worth it;
    3. the usual ones to the others, in order;
    4. what is left to whoever gains by it.

    Returns those who got some, in order of service. Nobody has any before.
    """
    running: list[_Left] = []
    for one in chain(certain, due):
        if not free:
            return running
        one.rank = _narrowest(one, free, now)
        if one.rank >= 0:
            free -= one.degree
            running.append(one)
    free = _widen(running, free, _WORTH, calm_ns)
    for one in others:
        if not free:
            return running
        one.rank = _widest(one, one.ride.usual, free)
        while one.rank > 0 and one.degree == free and one.ride.speeds[one.rank].step_ns > calm_ns:
            one.rank -= 1
        if one.rank >= 0:
            free -= one.degree
            running.append(one)
    _widen(running, free, 1.0, calm_ns)
    return running


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


def _widen(candidates: Iterable[_Left], free: int, worth: float, calm_ns: float) -> int:
    """Widen, again and again, the group that saves most time per device by it; returns how many are still free."""
    growing = [one for one in candidates if one.ride.claim is not Claim.FIXED]
    while free:
        best, most = None, 0.0
        for one in growing:
            speeds, rank = one.ride.speeds, one.rank
            if rank + 1 == len(speeds):
                continue
            narrow, wide = speeds[rank], speeds[rank + 1]
            extra = wide.degree - narrow.degree
            if extra <= free - (wide.step_ns > calm_ns) and narrow.step_ns >= worth * wide.step_ns:
                gain = one.steps * (narrow.step_ns - wide.step_ns) / extra
                if gain > most:
                    best, most = one, gain
        if best is None:
            break
        speeds = best.ride.speeds
        best.rank += 1
        free -= speeds[best.rank].degree - speeds[best.rank - 1].degree
    return free
