"""Split: how the budget of a virtual replica divides among its primary and its auxiliaries.

Theory of operation. v is how many requests one device of a type serves per time that it is busy. With n_P primaries, an
auxiliary keeps pace if n_A v_A >= n_P v_P. The most primaries with which all auxiliaries keep pace are about N / (1 +
sum of v_P / v_A): the auxiliaries get what they need for these, in whole units, and what is left over.

Source: TridentServe appendix C.1, "Split()". Its overflow rule (one primary less, and the unit to the auxiliary with
the larger deficit) is the loop of `split`. Departures: an auxiliary gets whole units, since a decode that runs best on
two devices needs both; a tiny budget, which the paper gives "to the roles present", never goes below one unit of each
role, and the caller asks `keeps_pace` whether the guarantee holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from tilework.policy.placement.roles import PlacementType, VirtualReplica

Counts = dict[PlacementType, int]
"""Number of devices of each type."""

Rates = Mapping[PlacementType, float]
"""Number of requests that a device of each type serves per busy time; any unit of time, one for all types."""

Units = Mapping[PlacementType, int]
"""Number of devices of one node that make a replica of each type; 1 where a type is missing."""

_ROUNDING = 1e-9


def split(replica: VirtualReplica, budget: int, rates: Rates, units: Units) -> Counts:
    """Return the devices of each type of a virtual replica, `budget` in all.

    Each auxiliary keeps pace with the primary unless one unit of each leaves no room for that; see `keeps_pace`.
    `rates` has all types of the replica, above 0. `budget` is at least one unit of each.
    """
    least = {kind: units.get(kind, 1) for kind in replica.types}
    assert budget >= sum(least.values()), f"{budget} devices are less than one unit of each type of {replica}"
    primary = replica.primary
    ratios = [rates[primary] / rates[kind] for kind in replica.auxiliaries]
    num = max(least[primary], 1 + int(budget / (1 + sum(ratios))))  # One more: the quotient may be rounded down.
    while num > least[primary] and budget - num < sum(_needed(replica, num, rates, least).values()):
        num -= 1
    needed = _needed(replica, num, rates, least)
    if budget - num < sum(needed.values()):  # Tiny: one unit of each comes before proportion.
        needed = {kind: least[kind] for kind in replica.auxiliaries}
    return _with_rest({primary: num, **needed}, budget, rates, least)


def keeps_pace(replica: VirtualReplica, counts: Mapping[PlacementType, int], rates: Rates) -> bool:
    """Return whether each auxiliary serves as many requests as the primary: n_A v_A >= n_P v_P, but for rounding."""
    served = counts[replica.primary] * rates[replica.primary] * (1 - _ROUNDING)
    return all(counts[kind] * rates[kind] >= served for kind in replica.auxiliaries)


def _with_rest(counts: Counts, total: int, rates: Rates, least: Units) -> Counts:
    """Return the counts, the primary's first, with the rest of `total` at the auxiliary with the largest deficit."""
    primary, *auxiliaries = counts
    if not auxiliaries:
        return {primary: total}
    while room := total - sum(counts.values()):
        fitting = [kind for kind in auxiliaries if least[kind] <= room] or auxiliaries
        kind = min(fitting, key=lambda kind: counts[kind] * rates[kind])
        counts[kind] += min(room, least[kind])
    return counts


def _needed(replica: VirtualReplica, num: int, rates: Rates, least: Units) -> Counts:
    """Return the fewest devices, in whole units, with which each auxiliary keeps pace with `num` primaries."""
    served = num * rates[replica.primary]
    needed = {}
    for kind in replica.auxiliaries:
        unit = least[kind]
        count = max(1, ceil(served / rates[kind] / unit)) * unit
        while count * rates[kind] < served:  # The quotient may be rounded down.
            count += unit
        needed[kind] = count
    return needed
