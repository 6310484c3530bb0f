"""Time in rounds of fixed length: what a step costs in them, and how long they had better be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log

from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.policy.toolkit.demand import Speed

_SHORTEST_NS, _LONGEST_NS = 100 * NS_PER_MS, 2 * NS_PER_S
_WAIT, _MISSED_WEIGHT = 1.5, 2.0
_NEARLY_AS_GOOD = 1.02
_ROOM_FOR_ERRORS = 1.02
_GRID, _TRIALS_AT_ONCE = 8, 64  # One length in eight is in the coarse grid; lengths x kinds tried at once.
_BUCKETS_NS = [
    ceil(1.05 ** (index + 0.5))
    for index in range(round(log(_SHORTEST_NS) / log(1.05)), round(log(_LONGEST_NS) / log(1.05)))
]


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one shape: `budget_ns` is what their deadlines leave for `num_steps` steps."""

    speeds: tuple[Speed, ...]
    num_steps: int
    budget_ns: int


def whole_steps(speeds: Sequence[Speed], round_ns: int, margin_ns: int) -> tuple[Speed, ...]:
    """What steps cost if only whole ones run in a round: the tail of the round is shared among them.

    A step that is longer than a round keeps its GPUs to the end of the round in which it ends.
    """
    return tuple(Speed(speed.degree, _in_rounds_ns(speed.step_ns, round_ns, margin_ns)) for speed in speeds)


def _in_rounds_ns(step_ns: int, round_ns: int, margin_ns: int) -> int:
    room_ns = round_ns - margin_ns
    if step_ns <= room_ns:
        return round_ns // (room_ns // max(1, step_ns))
    return -(-(step_ns + margin_ns) // round_ns) * round_ns


class RoundSearch:
    """The search for the best length of a round for these kinds of requests, between 0.1 and 2 s; 2 s for none.

    Two things are added up. One is the GPU-time of a request of each kind, in whole steps of whole rounds, at the
    cheapest degrees that meet its deadline after a wait of one and a half rounds (half a one until the next begins,
    and one without room); relative to the least that the steps can take. So the tails count that whole steps leave, at
    the degrees that the deadlines ask for. The other is by how much of that wait the deadlines are missed even at the
    fastest degrees, averaged over the kinds, twice. The shortest is chosen of those within 2% of the least sum.

    Source: TetriServe §4.2.2 ("adapts to the step execution times ... so that requests with heterogeneous step lengths
    can finish around the same round boundary"), which leaves the rule open.

    It goes in pieces of about half a millisecond, since whoever decides must not keep others waiting: lengths are tried
    in a coarse grid first, then in what it left out.
    """

    def __init__(self, kinds: Sequence[Kind], margin_ns: int) -> None:
        self._kinds = sorted(kinds, key=_least_device_ns, reverse=True)
        self._least_ns = sum(map(_least_device_ns, kinds))
        self._margin_ns = margin_ns
        lengths = sorted(_lengths(self._kinds, margin_ns)) if kinds else []
        self._left = [length for first in range(_GRID) for length in lengths[first::_GRID]]
        self._scores: dict[int, float] = {}

    @property
    def is_over(self) -> bool:
        return not self._left

    def proceed(self) -> None:
        """Try some more lengths."""
        count = max(1, _TRIALS_AT_ONCE // max(1, len(self._kinds)))
        self._scores |= {round_ns: self._score(round_ns) for round_ns in self._left[:count]}
        del self._left[:count]

    def best_ns(self) -> int:
        """The best length of those tried."""
        if not self._scores:
            return _LONGEST_NS
        limit = _NEARLY_AS_GOOD * min(self._scores.values())
        return min(round_ns for round_ns, score in self._scores.items() if score <= limit)

    def _score(self, round_ns: int) -> float:
        total_ns, missed, wait_ns = 0, 0.0, _WAIT * round_ns
        for kind in self._kinds:
            steps = [
                (step_ns := _in_rounds_ns(speed.step_ns, round_ns, self._margin_ns), speed.degree * step_ns)
                for speed in kind.speeds
            ]
            fastest_ns, fastest_device_ns = min(steps)
            device_ns = cheapest_ns(steps, kind.num_steps, kind.budget_ns - wait_ns)
            total_ns += kind.num_steps * fastest_device_ns if device_ns is None else device_ns
            slack_ns = kind.budget_ns - kind.num_steps * fastest_ns
            missed += min(1.0, max(0.0, 1 - slack_ns / wait_ns))
        return total_ns / self._least_ns + _MISSED_WEIGHT * missed / len(self._kinds)


def cheapest_ns(steps: Sequence[tuple[int, int]], num_steps: int, budget_ns: float) -> int | None:
    """The GPU-time of `min_device_allocation`, without naming the degrees, which takes several times as long.

    `steps`: the time and the GPU-time of one step, for each degree.
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


def _least_device_ns(kind: Kind) -> int:
    return max(1, kind.num_steps * min(speed.device_ns for speed in kind.speeds))


def _lengths(kinds: Iterable[Kind], margin_ns: int) -> Collection[int]:
    """Lengths that some steps of some kind fill, one in every 5%, of the kind that comes first.

    Steps may take 2% longer than predicted before one less fits: a length without this room attains .75 instead of
    .86 when 5 ms pass between two works.
    """
    chosen = {bisect_right(_BUCKETS_NS, _LONGEST_NS): _LONGEST_NS}
    for kind in kinds:
        for speed in kind.speeds:
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
