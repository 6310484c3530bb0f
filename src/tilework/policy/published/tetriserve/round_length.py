"""The length of rounds: what a step costs in rounds of a length, and the search for the best length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log

from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.cost.demand import Speed

_SHORTEST_NS, _LONGEST_NS = 100 * NS_PER_MS, 2 * NS_PER_S
_WAIT = 1.5
_WAIT_IF_EARLY = 1.0
_TAIL_IF_EARLY = 0.5
_MISSED_WEIGHT = 2.0
_NEARLY_AS_GOOD = 1.02
_ROOM_FOR_ERRORS = 1.02
_GRID = 8  # One length in eight is in the coarse grid.
_TRIALS_AT_ONCE = 64  # Lengths x classes.
_BUCKETS_NS = [
    ceil(1.05 ** (index + 0.5))
    for index in range(round(log(_SHORTEST_NS) / log(1.05)), round(log(_LONGEST_NS) / log(1.05)))
]


@dataclass(frozen=True, slots=True)
class ClassBudget:
    """The steps of a request class, and the time `budget_ns` that deadlines leave for them."""

    speeds: tuple[Speed, ...]
    num_steps: int
    budget_ns: int


def whole_steps(speeds: Sequence[Speed], round_ns: int, margin_ns: int) -> tuple[Speed, ...]:
    """Return the time of steps if only whole ones run in a round: the tail of the round is shared among them.

    A step that is longer than a round keeps its devices to the end of the round in which it ends.
    """
    return tuple(Speed(speed.degree, _in_rounds_ns(speed.step_ns, round_ns, margin_ns)) for speed in speeds)


def _in_rounds_ns(step_ns: int, round_ns: int, margin_ns: int) -> int:
    room_ns = round_ns - margin_ns
    if step_ns <= room_ns:
        return round_ns // (room_ns // max(1, step_ns))
    return -(-(step_ns + margin_ns) // round_ns) * round_ns


class RoundSearch:
    """The search for the best length of a round for some request classes, between 0.1 and 2 s; 2 s for no class.

    The score of a length is the sum of two terms. The first is the device time of a request of each class, in whole
    steps of whole rounds, at the cheapest degrees that meet its deadline after a wait of one and a half rounds (half a
    round until the next begins, and one without room), relative to the least that the steps can take. So it counts the
    tails that whole steps leave, at the degrees that the deadlines ask for. The second is the share of that wait by
    which deadlines are missed even at the fastest degrees, averaged over the classes, twice. The shortest length within
    2% of the least score is chosen.

    Rounds that may end early, as soon as all their work is done, have half of the tails and wait one round: halfway
    between rounds that never do and those that always do. With the former's score the grid's FLUX cells on 8 devices
    are worse; with the latter's (no tail, half a round) those on several nodes collapse, since a job on another node
    nearly always keeps the round open.

    Source: TetriServe §4.2.2 ("adapts to the step execution times ... so that requests with heterogeneous step lengths
    can finish around the same round boundary"), which leaves the rule open.

    The search goes in pieces of about half a millisecond, so that no decision waits for it: lengths of a coarse grid
    are tried first, then those between.
    """

    def __init__(self, budgets: Sequence[ClassBudget], margin_ns: int, ends_early: bool = False) -> None:
        self._ends_early = ends_early
        self._budgets = sorted(budgets, key=_least_device_ns, reverse=True)
        self._least_ns = sum(map(_least_device_ns, budgets))
        self._margin_ns = margin_ns
        lengths = sorted(_lengths(self._budgets, margin_ns)) if budgets else []
        self._left = [length for first in range(_GRID) for length in lengths[first::_GRID]]
        self._scores: dict[int, float] = {}

    @property
    def is_over(self) -> bool:
        return not self._left

    def proceed(self) -> None:
        """Try some more lengths."""
        count = max(1, _TRIALS_AT_ONCE // max(1, len(self._budgets)))
        self._scores |= {round_ns: self._score(round_ns) for round_ns in self._left[:count]}
        del self._left[:count]

    def best_ns(self) -> int:
        """Return the best length of those tried."""
        if not self._scores:
            return _LONGEST_NS
        limit = _NEARLY_AS_GOOD * min(self._scores.values())
        return min(round_ns for round_ns, score in self._scores.items() if score <= limit)

    def _score(self, round_ns: int) -> float:
        total_ns = 0
        missed = 0.0
        wait_ns = (_WAIT_IF_EARLY if self._ends_early else _WAIT) * round_ns
        for budget in self._budgets:
            steps = [
                (step_ns := self._step_ns(speed.step_ns, round_ns), speed.degree * step_ns) for speed in budget.speeds
            ]
            fastest_ns, fastest_device_ns = min(steps)
            device_ns = cheapest_ns(steps, budget.num_steps, budget.budget_ns - wait_ns)
            total_ns += budget.num_steps * fastest_device_ns if device_ns is None else device_ns
            slack_ns = budget.budget_ns - budget.num_steps * fastest_ns
            missed += min(1.0, max(0.0, 1 - slack_ns / wait_ns))
        return total_ns / self._least_ns + _MISSED_WEIGHT * missed / len(self._budgets)

    def _step_ns(self, step_ns: int, round_ns: int) -> int:
        """Return the time of a step in rounds of a length, with its share of the tail; half if they may end early."""
        whole_ns = _in_rounds_ns(step_ns, round_ns, self._margin_ns)
        if not self._ends_early or step_ns > round_ns - self._margin_ns:
            return whole_ns
        return step_ns + int(_TAIL_IF_EARLY * (whole_ns - step_ns))


def cheapest_ns(steps: Sequence[tuple[int, int]], num_steps: int, budget_ns: float) -> int | None:
    """Return the device time of `min_device_allocation`, without naming the degrees, which takes several times as long.

    `steps`: the time and the device time of one step, for each degree.
    """
    best = min((device_ns for step_ns, device_ns in steps if num_steps * step_ns <= budget_ns), default=None)
    best = None if best is None else num_steps * best
    for slow_ns, slow_device_ns in steps:
        lack_ns = num_steps * slow_ns - budget_ns
        if lack_ns <= 0:
            continue
        for fast_ns, fast_device_ns in steps:
            if slow_ns <= fast_ns or slow_device_ns >= fast_device_ns:
                continue
            num_fast = ceil(lack_ns / (slow_ns - fast_ns))
            if num_fast < num_steps:
                device_ns = (num_steps - num_fast) * slow_device_ns + num_fast * fast_device_ns
                best = device_ns if best is None or device_ns < best else best
    return best


def _least_device_ns(budget: ClassBudget) -> int:
    return max(1, budget.num_steps * min(speed.device_ns for speed in budget.speeds))


def _lengths(budgets: Iterable[ClassBudget], margin_ns: int) -> Collection[int]:
    """Return lengths that some steps of some class fill, one in every 5%, of the class that comes first.

    Steps may take 2% longer than predicted before one less fits: a length without this room attains .75 instead of
    .86 when 5 ms pass between two works.
    """
    chosen = {bisect_right(_BUCKETS_NS, _LONGEST_NS): _LONGEST_NS}
    for budget in budgets:
        for speed in budget.speeds:
            if len(chosen) > len(_BUCKETS_NS):
                return chosen.values()
            step_ns = max(round(speed.step_ns * _ROOM_FOR_ERRORS), NS_PER_MS)
            count = max(1, -(-(_SHORTEST_NS - margin_ns) // step_ns))
            while (round_ns := count * step_ns + margin_ns) <= _LONGEST_NS:
                bucket = bisect_right(_BUCKETS_NS, round_ns)
                chosen.setdefault(bucket, round_ns)
                to_next_ns = _BUCKETS_NS[bucket] - margin_ns if bucket < len(_BUCKETS_NS) else _LONGEST_NS
                count = max(count + 1, -(-to_next_ns // step_ns))
    return chosen.values()
