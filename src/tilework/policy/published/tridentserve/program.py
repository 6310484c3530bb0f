"""The dispatch program: which requests begin now, on which placement type, and on how many of its devices.

Each group of options is one request. At most one option of each is chosen, with the most value, within the devices
that each pool has free. With one pool this is a multiple-choice knapsack.

Source: TridentServe §6.2, constraints C1 and C2. The solvers stand for its ILP; `ilp` has that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilework.policy.placement.roles import PlacementType
from tilework.policy.published.tridentserve.layout import SHARED, Pool
from tilework.policy.toolkit.knapsack import Option, solve_knapsack_quickly

EVERYWHERE = Pool(SHARED, PlacementType.EDC)

_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class PoolOption(Option):
    """`width` devices of a pool bring `value`, and the request takes `run_ns`."""

    pool: Pool = EVERYWHERE
    run_ns: int = 0


Capacities = Mapping[Pool, int]
"""Number of free devices of each pool."""

Solver = Callable[[Sequence[Sequence[PoolOption]], Capacities], Sequence[int | None]]
"""Returns the index of each group's option, or None."""


def solve_quickly(groups: Sequence[Sequence[PoolOption]], capacities: Capacities) -> list[int | None]:
    """Choose at most one option of each group: much value, and the most if there is one pool and few devices.

    The pools take turns. At its turn, a pool is filled anew by `solve_knapsack_quickly`, and a group counts with what
    it gains over its option elsewhere. So no turn loses value. The first pool of `capacities` comes first; put there
    what the fewest groups need.
    """
    chosen: list[int | None] = [None] * len(groups)
    used = {option.pool for options in groups for option in options}
    pools = [pool for pool in capacities if pool in used]
    for _ in range(_ROUNDS if len(pools) > 1 else 1):
        before = list(chosen)
        for pool in pools:
            _refill(groups, chosen, pool, capacities[pool])
        if chosen == before:
            break
    return chosen


def _refill(groups: Sequence[Sequence[PoolOption]], chosen: list[int | None], pool: Pool, capacity: int) -> None:
    """Choose anew what a pool runs, if that gains anything."""
    members: list[int] = []
    indices: list[Sequence[int]] = []
    gains: list[Sequence[Option]] = []
    now = 0
    known: dict[tuple[int, int], tuple[Sequence[int], Sequence[Option]]] = {}
    for number, options in enumerate(groups):
        index = chosen[number]
        elsewhere = 0
        if index is not None:
            value = options[index].value
            elsewhere, now = (0, now + value) if options[index].pool == pool else (value, now)
        key = id(options), elsewhere  # Groups that are one object are looked at once.
        if key not in known:
            found = [at for at, option in enumerate(options) if option.pool == pool and option.value > elsewhere]
            known[key] = found, [Option(options[at].width, options[at].value - elsewhere) for at in found]
        if known[key][0]:
            members.append(number)
            indices.append(known[key][0])
            gains.append(known[key][1])
    picked = solve_knapsack_quickly(gains, capacity)
    if sum(gain[at].value for gain, at in zip(gains, picked, strict=True) if at is not None) <= now:
        return
    for number, its, at in zip(members, indices, picked, strict=True):
        index = chosen[number]
        if at is not None:
            chosen[number] = its[at]
        elif index is not None and groups[number][index].pool == pool:
            chosen[number] = None


def shortest_first(groups: Sequence[Sequence[PoolOption]], capacities: Capacities) -> list[int | None]:
    """Choose the shortest requests first, each at the widest option of the first pool that has room for it.

    Values are ignored; equal times go by the order of `groups`. Source: TridentServe §8.4, "wo-scheduler".
    """
    left = dict(capacities)
    chosen = list[int | None]([None] * len(groups))
    order = sorted(range(len(groups)), key=lambda number: min((one.run_ns for one in groups[number]), default=0))
    for number in order:
        widest: dict[Pool, int] = {}
        for index, option in enumerate(groups[number]):
            if option.pool not in widest or option.width > groups[number][widest[option.pool]].width:
                widest[option.pool] = index
        for pool in sorted(widest, key=lambda pool: tuple(PlacementType).index(pool.kind)):
            option = groups[number][widest[pool]]
            if option.width <= left.get(pool, 0):
                chosen[number] = widest[pool]
                left[pool] -= option.width
                break
    return chosen
