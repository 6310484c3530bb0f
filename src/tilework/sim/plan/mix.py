"""The cheapest hardware: one kind for all, or two, each with the sizes that it is cheaper for.

Theory of operation. A server has devices of one kind, so a mix is two servers, and each size of request goes to one of
them. Sizes are put in the order of what they cost on one hardware over what they cost on the other (device time at the
degree that takes least, times the price), and cut in two at each place: what is best of all divisions, if devices could
be bought in parts. That cost is also a bound: divisions are sized by simulation from the cheapest bound on, until the
bound is above the cheapest that was found. Each part has to meet the target by itself.

A size goes to no hardware that does not know its pipeline, or on which it is late even alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from statistics import median

from tilework.core.request import Request
from tilework.cost.degrees import fastest_latency_ns, least_device_ns
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.sim.plan.search import Sized
from tilework.sim.plan.traffic import Size, sizes_of

MOST_DIVISIONS = 4
"""Number of divisions of the sizes that are simulated, at most."""

Division = Mapping[str, frozenset[Size]]
"""The sizes that each hardware serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Devices to buy: the number of each hardware, and their sizes. `usd_per_h` is the price of all."""

    parts: Sequence[Sized]
    usd_per_h: float


def cheapest(
    requests: Sequence[Request],
    tables: Mapping[str, CostTable],
    prices: Mapping[str, float],
    alone: Sequence[Sized],
    size: Callable[[str, frozenset[Size]], Sized],
) -> Purchase | None:
    """Return the cheapest purchase; None if there is none that meets the target.

    Args:
        prices: of a device of each hardware, in US dollars per hour.
        alone: for each hardware that serves all sizes, the search for it.
        size: searches for the devices of a hardware that serve some sizes.
    """
    found = [Purchase(parts=(one,), usd_per_h=one.fewest * prices[one.sizing.hardware]) for one in alone if one.fewest]
    best = min(found, key=lambda one: one.usd_per_h, default=None)
    divisions = sorted(_divisions(requests, tables, prices), key=lambda pair: pair[0])
    for bound, division in divisions[:MOST_DIVISIONS]:
        if best is not None and bound >= best.usd_per_h:
            break
        parts = [size(hardware, own) for hardware, own in division.items()]
        if any(part.fewest is None for part in parts):
            continue
        usd = sum((part.fewest or 0) * prices[part.sizing.hardware] for part in parts)
        if best is None or usd < best.usd_per_h:
            best = Purchase(parts=tuple(parts), usd_per_h=usd)
    return best


def _divisions(
    requests: Sequence[Request], tables: Mapping[str, CostTable], prices: Mapping[str, float]
) -> Iterator[tuple[float, Division]]:
    """Yield divisions of the sizes between two kinds of hardware, each with the least that they can cost per hour."""
    sizes = sizes_of(requests)
    until_ns = max(one.arrival_ns if one.deadline_ns is None else one.deadline_ns for one in requests)
    span_ns = max(1, until_ns - requests[0].arrival_ns)
    usd = {name: _usd(sizes, table, prices[name] / span_ns) for name, table in tables.items()}
    for one, other in combinations(tables, 2):
        served = [size for size in sizes if min(usd[one][size], usd[other][size]) < inf]
        if len(served) < len(sizes):
            continue
        ordered = sorted(served, key=lambda size: usd[one][size] / usd[other][size])
        for place in range(1, len(ordered)):
            own = {one: ordered[:place], other: ordered[place:]}
            bound = sum(usd[name][size] for name, some in own.items() for size in some)
            if bound < inf and all(_has_deadline(sizes, some) for some in own.values()):
                yield bound, {name: frozenset(some) for name, some in own.items()}


def _has_deadline(sizes: Mapping[Size, Sequence[Request]], some: Sequence[Size]) -> bool:
    return any(request.deadline_ns is not None for size in some for request in sizes[size])


def _usd(sizes: Mapping[Size, Sequence[Request]], table: CostTable, usd_per_ns: float) -> dict[Size, float]:
    """Return the cost of the requests of each size on a hardware; infinite where it cannot serve them in time."""
    costs = TableCosts(table)
    known = {row.pipeline for row in table.rows}
    found = {}
    for size, requests in sizes.items():
        slos_ns = [one.deadline_ns - one.arrival_ns for one in requests if one.deadline_ns is not None]
        is_late = size.pipeline in known and bool(slos_ns) and fastest_latency_ns(costs, *size) > median(slos_ns)
        is_served = size.pipeline in known and not is_late
        found[size] = len(requests) * least_device_ns(costs, *size) * usd_per_ns if is_served else inf
    return found


def unknown_pipelines(requests: Sequence[Request], table: CostTable) -> list[str]:
    """Return the pipelines of requests that a cost table does not have, by name."""
    return sorted({one.pipeline for one in requests} - {row.pipeline for row in table.rows})
