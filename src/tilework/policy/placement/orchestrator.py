"""The orchestrator: a placement for the requests that were seen.

Theory of operation. Each request class has a virtual replica V*, the one that sends least between devices and has the
memory for it. So devices go to virtual replicas in proportion to the requests of each V* (their *budgets*), inside a
budget to its types in inverse proportion to their rates (`split`), and to nodes so that nodes have one type (`pack`).

Source: TridentServe §6.1, algorithm 2, and appendix C.1; the listing is missing in the text that we have. Departures:

- Budgets go by device time at optimal degrees; `by="requests"` is the paper's proportion. Few large requests, which run
  on their V* alone, have most of the device time, and by their number they would get less than half of what they need.
  Requests of V0 can run on any type, so a budget that is too small for V0 costs little.
- Budgets are rounded to whole nodes where that changes none by more than a tenth.
- The paper raises the primaries of a type to a multiple of the widest degree by borrowing from its auxiliaries, while
  these keep pace. There is nothing to borrow: `split` finds the most primaries with which they do. Instead, primaries
  are rounded down if that takes no more than an eighth of them, and the rest goes to V0 (`round_down`). Without V0
  among the V*, nothing is rounded: a device with all stages would serve no request.
- Where devices are too few for each V* apart, classes share virtual replicas (`smallest`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilework.core.shares import apportioned
from tilework.policy.placement.demand import By, ClassDemand, Mix, grouped, mix_of, rates_of
from tilework.policy.placement.pack import pack
from tilework.policy.placement.placement import Nodes, Placement, colocated, counts_text, widest
from tilework.policy.placement.roles import PlacementType, VirtualReplica
from tilework.policy.placement.smallest import Assigned, can_share, smallest_placement
from tilework.policy.placement.split import Counts, Rates, Units, keeps_pace, split

_MOST_CHANGE = 0.1
"""Share of a budget by which it may change to be whole nodes."""

_MOST_ROUNDED = 1 / 8
"""The share of a type's primaries that may go to V0 for the rest to be a multiple of the widest degree."""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """A placement and why it is so.

    Attributes:
        placement: the type of each device.
        budgets: how many devices the requests of each V* were given, before primaries were aligned; all together.
            Empty if there are no requests, or classes share virtual replicas.
        mix: the share of each V* among the requests, from which `switching` sees a change.
        reasons: in words, one sentence each.
    """

    placement: Placement
    budgets: Mapping[VirtualReplica, int]
    mix: Mix
    reasons: tuple[str, ...]


def plan_placement(
    demands: Sequence[ClassDemand],
    nodes: Nodes,
    rates: Rates | None = None,
    *,
    max_degree: int = 8,
    by: By = "device_time",
    round_down: bool = True,
    before: Placement | None = None,
) -> PlacementPlan:
    """Return a placement of all devices of the nodes. The same arguments give the same placement.

    Every class that can run on the nodes beside the others has, of each type of some virtual replica, enough devices on
    one node for a degree at which it fits.

    Args:
        demands: the requests of a window, or a declared mix.
        nodes: the devices of each node; at least one device in all.
        rates: requests that a device of each type serves per second that it is busy, as measured; the profile's where
            there are none, or 0.
        max_degree: the widest group of D.
        by: what budgets are in proportion to.
        round_down: whether primaries may be rounded down to a multiple of the widest degree.
        before: the present placement. Where there is a choice, devices keep their type.
    """
    groups = grouped(demands, widest(nodes))
    reasons = _unserved(demands, groups)
    mix = mix_of(groups, by)
    if not groups:
        return PlacementPlan(colocated(nodes), {}, mix, (*reasons, "no request is known: each device has all stages"))
    needs = {replica: _Need.of(replica, classes, nodes, rates or {}) for replica, classes in groups.items()}
    budgets = _budgets(mix, needs, nodes)
    if budgets is not None:
        reasons += _budget_reasons(budgets, mix, by)
        counts, words = _counts(needs, budgets, min(max_degree, widest(nodes)), round_down)
        placement = _packed(counts, needs, nodes, before)
        if placement is not None:
            return PlacementPlan(placement, budgets, mix, (*reasons, *words))
    classes = [demand for group in groups.values() for demand in group]
    return _shared(classes, nodes, rates or {}, before, mix, _unserved(demands, groups))


@dataclass(frozen=True, slots=True)
class _Need:
    """The needs of the requests of a V*, by type: the least on one node, the devices of a replica, and rates."""

    least: Units
    units: Units
    rates: Rates

    @staticmethod
    def of(replica: VirtualReplica, classes: Sequence[ClassDemand], nodes: Nodes, measured: Rates) -> _Need:
        wide = widest(nodes)
        least = {kind: max(demand.fits[kind][0] for demand in classes) for kind in replica.types}
        units = dict(least)
        for kind in replica.auxiliaries:
            units[kind] = max(degree for demand in classes for degree in demand.fits[kind] if degree <= wide)
        return _Need(least, units, rates_of(replica, classes, measured))

    @property
    def num_devices(self) -> int:
        """One unit of each type."""
        return sum(self.units.values())


def _budgets(mix: Mix, needs: Mapping[VirtualReplica, _Need], nodes: Nodes) -> dict[VirtualReplica, int] | None:
    """Return the devices of each V*, all in all; None if there are too few for a unit of each type.

    Largest remainder, in whole nodes where that changes little. A budget of less than its units takes devices from
    those that have most to spare. If that leaves one with less than half of its share, there are too few, too.
    """
    total = sum(len(node) for node in nodes.values())
    sizes = {len(node) for node in nodes.values()}
    if sum(need.num_devices for need in needs.values()) > total:
        return None
    budgets = apportioned(mix, total)
    if len(sizes) == 1:
        whole = {replica: num * min(sizes) for replica, num in apportioned(mix, len(nodes)).items()}
        if all(abs(whole[replica] - total * share) <= _MOST_CHANGE * total * share for replica, share in mix.items()):
            budgets = whole
    for replica, need in needs.items():
        while budgets[replica] < need.num_devices:
            budgets[max(needs, key=lambda other: budgets[other] - needs[other].num_devices)] -= 1
            budgets[replica] += 1
    return budgets if all(2 * budgets[replica] >= total * share for replica, share in mix.items()) else None


def _counts(
    needs: Mapping[VirtualReplica, _Need], budgets: Mapping[VirtualReplica, int], multiple: int, round_down: bool
) -> tuple[Counts, list[str]]:
    """Return the devices of each type, and the splits in words."""
    counts: Counts = dict.fromkeys(PlacementType, 0)
    words = []
    for replica, need in needs.items():
        parts = split(replica, budgets[replica], need.rates, need.units)
        if replica.auxiliaries:
            words.append(_split_text(replica, parts, need))
        primary = replica.primary
        rest = parts[replica.primary] % multiple
        rounded = parts[primary] - rest
        may_round = round_down and replica is not VirtualReplica.V0 and VirtualReplica.V0 in needs
        if may_round and 0 < rest <= _MOST_ROUNDED * parts[primary] and rounded >= need.least[primary]:
            parts = {**parts, primary: rounded}
            counts[VirtualReplica.V0.primary] += rest
            words.append(f"{rest} {primary} become EDC, so that groups of {multiple} leave none over")
        for kind, num in parts.items():
            counts[kind] += num
    return counts, words


def _packed(
    counts: Counts, needs: Mapping[VirtualReplica, _Need], nodes: Nodes, before: Placement | None
) -> Placement | None:
    """Return the placement with a whole unit of each type on one node, or else with the least degree on one node."""
    least, units = (
        {
            kind: max(widths[kind] for widths in every if kind in widths)
            for kind in PlacementType
            if any(kind in widths for widths in every)
        }
        for every in ([need.least for need in needs.values()], [need.units for need in needs.values()])
    )
    return pack(counts, nodes, units, units, before) or pack(counts, nodes, least, units, before)


def _shared(
    classes: Sequence[ClassDemand],
    nodes: Nodes,
    rates: Rates,
    before: Placement | None,
    mix: Mix,
    reasons: Sequence[str],
) -> PlacementPlan:
    """Return a plan where classes share virtual replicas.

    If not all can run on these nodes, a class has devices before those that take less device time.
    """
    served: list[ClassDemand] = []
    words = list(reasons)
    for demand in sorted(classes, key=lambda demand: -demand.weight("device_time")):
        if can_share([*served, demand], nodes):
            served.append(demand)
        else:
            words.append(
                f"{demand.count:g} requests of a class find no devices beside those of classes with more to do"
            )
    if not served:
        return PlacementPlan(colocated(nodes), {}, mix, tuple(words))
    placement, assigned = smallest_placement(served, nodes, rates, before)
    words.append(f"the budget is tiny: {_assigned_text(assigned)} share {placement}")
    return PlacementPlan(placement, {}, mix, tuple(words))


def _unserved(demands: Sequence[ClassDemand], groups: Assigned) -> list[str]:
    served = sum(demand.count for classes in groups.values() for demand in classes)
    num = sum(demand.count for demand in demands) - served
    return [f"{num:g} requests fit on no placement"] if num > 0 else []


def _budget_reasons(budgets: Mapping[VirtualReplica, int], mix: Mix, by: By) -> list[str]:
    total = sum(budgets.values())
    what = "device time" if by == "device_time" else "requests"
    return [f"{replica} gets {num} of {total} for {mix[replica]:.0%} of the {what}" for replica, num in budgets.items()]


def _split_text(replica: VirtualReplica, parts: Counts, need: _Need) -> str:
    text = f"{replica} is {counts_text(parts)}"
    return text if keeps_pace(replica, parts, need.rates) else f"{text}; the budget is tiny, so some wait for others"


def _assigned_text(assigned: Assigned) -> str:
    names = [
        f"{sum(demand.count for demand in classes):g} requests on {replica}" for replica, classes in assigned.items()
    ]
    return " and ".join(names)
