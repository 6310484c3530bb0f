"""Time in rounds of fixed length: what a step costs in them, and how long they had better be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import log

from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.policy.demand import Segment, Speed, min_gpu_allocation

_SHORTEST_NS, _LONGEST_NS = 100 * NS_PER_MS, 2 * NS_PER_S
_WAIT, _MISSED_WEIGHT = 1.5, 2.0
_NEARLY_AS_GOOD = 1.02
_ROOM_FOR_ERRORS = 1.02


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


def choose_round_ns(kinds: Sequence[Kind], margin_ns: int) -> int:
    """Choose the length of a round for these kinds of requests, between 0.1 and 2 s; 2 s for none.

    Two things are added up. One is the GPU-time of a request of each kind, in whole steps of whole rounds, at the
    cheapest degrees that meet its deadline after a wait of one and a half rounds (half a one until the next begins,
    and one without room); relative to the least that the steps can take. So the tails count that whole steps leave, at
    the degrees that the deadlines ask for. The other is by how much of that wait the deadlines are missed even at the
    fastest degrees, averaged over the kinds, twice. The shortest is chosen of those within 2% of the least sum.

    Source: TetriServe §4.2.2 ("adapts to the step execution times ... so that requests with heterogeneous step lengths
    can finish around the same round boundary"), which leaves the rule open.
    """
    if not kinds:
        return _LONGEST_NS
    kinds = sorted(kinds, key=_least_gpu_ns, reverse=True)
    scores = {round_ns: _score(kinds, round_ns, margin_ns) for round_ns in _lengths(kinds, margin_ns)}
    limit = _NEARLY_AS_GOOD * min(scores.values())
    return min(round_ns for round_ns, score in scores.items() if score <= limit)


def _score(kinds: Sequence[Kind], round_ns: int, margin_ns: int) -> float:
    total_ns, missed, wait_ns = 0, 0.0, _WAIT * round_ns
    for kind in kinds:
        speeds = {speed.degree: speed for speed in whole_steps(kind.speeds, round_ns, margin_ns)}
        fastest = min(speeds.values(), key=lambda speed: speed.step_ns)
        parts = min_gpu_allocation(tuple(speeds.values()), kind.num_steps, kind.budget_ns - wait_ns)
        parts = parts or (Segment(kind.num_steps, fastest.degree),)
        total_ns += sum(part.num_steps * speeds[part.degree].gpu_ns for part in parts)
        slack_ns = kind.budget_ns - kind.num_steps * fastest.step_ns
        missed += min(1.0, max(0.0, 1 - slack_ns / wait_ns))
    return total_ns / sum(map(_least_gpu_ns, kinds)) + _MISSED_WEIGHT * missed / len(kinds)


def _least_gpu_ns(kind: Kind) -> int:
    return max(1, kind.num_steps * min(speed.gpu_ns for speed in kind.speeds))


def _lengths(kinds: Iterable[Kind], margin_ns: int) -> Collection[int]:
    """Lengths that some steps of some kind fill, one in every 5%, of the kind that comes first.

    Steps may take 2% longer than predicted before one less fits: a length without this room attains .75 instead of
    .86 when 5 ms pass between two works.
    """
    chosen = {_bucket(_LONGEST_NS): _LONGEST_NS}
    for kind in kinds:
        for speed in kind.speeds:
            step_ns = max(round(speed.step_ns * _ROOM_FOR_ERRORS), NS_PER_MS)
            first = max(1, -(-(_SHORTEST_NS - margin_ns) // step_ns))
            for count in range(first, (_LONGEST_NS - margin_ns) // step_ns + 1):
                round_ns = count * step_ns + margin_ns
                chosen.setdefault(_bucket(round_ns), round_ns)
    return chosen.values()


def _bucket(round_ns: int) -> int:
    return round(log(round_ns) / log(1.05))
