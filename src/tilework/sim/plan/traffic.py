"""Traffic: requests drawn anew for each seed, or those that came, drawn again in blocks; and what-ifs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random
from typing import NamedTuple

from tilework.core.request import Request, Shape
from tilework.cost.degrees import fastest_latency_ns, least_device_ns
from tilework.cost.table_costs import TableCosts
from tilework.sim.workloads.family import WorkloadFamily, stream
from tilework.sim.workloads.requests import to_requests

_BLOCKS = 12
"""Number of parts of equal length into which traffic that came is cut, to be drawn again."""


class Size(NamedTuple):
    """Part of a request that decides its cost on any hardware."""

    pipeline: str
    shape: Shape
    steps: int

    def __str__(self) -> str:
        return f"{self.pipeline} {self.shape}, {self.steps} steps"


def size_of(request: Request) -> Size:
    return Size(request.pipeline, request.shape, request.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The same traffic, but with deadlines `slo` times as long, at `rate` times the rate, and with `heaviest` times as
    many requests of the size that takes most device time, at the cost of the others.
    """

    slo: float = 1.0
    rate: float = 1.0
    heaviest: float = 1.0

    def __str__(self) -> str:
        named = (("deadlines", self.slo), ("rate", self.rate), ("heaviest size", self.heaviest))
        return ", ".join(f"{name} x {factor:g}" for name, factor in named if factor != 1) or "as asked"


AS_ASKED = WhatIf()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests by seed. `draw` makes those of a seed, in order of arrival; at least one has a deadline."""

    draw: Callable[[int], Sequence[Request]]

    def requests(self, seed: int, what_if: WhatIf = AS_ASKED, sizes: Collection[Size] | None = None) -> list[Request]:
        """Draw the requests of a seed, of `sizes` alone if any are given. Equal arguments give equal requests."""
        found = [_changed(request, what_if) for request in self.draw(seed)]
        if what_if.heaviest != 1:
            found = _with_more(found, what_if.heaviest, stream(seed, "heaviest"))
        return [one for one in found if sizes is None or size_of(one) in sizes]


@dataclass(frozen=True, slots=True)
class Sample:
    """A part of the requests of a seed: `judged` are those whose deadlines count, of all that are `simulated`.

    Theory of operation. A target of 95% is decided by hundreds of requests, and a busy half hour has thousands. So the
    traffic is cut into windows of as many deadlines, and windows are simulated one by one, until they are enough: first
    the one in the middle, then those at the quarters, so that a few are spread over all of it. A window is simulated
    from before its first request, for as long as half of it and as the longest deadline, so that it finds devices as
    busy as they would be; and on until its last deadline, so that what comes later competes. A queue that grows for
    longer than that is not seen from its beginning.
    """

    simulated: Sequence[Request]
    judged: Sequence[Request]


def sample_of(requests: Sequence[Request], size: int, number: int) -> Sample:
    """Return sample number `number`, from 0, of requests in order of arrival: `size` deadlines, or somewhat fewer."""
    due = [one for one in requests if one.deadline_ns is not None]
    num = num_samples(len(due), size)
    if num == 1:
        return Sample(requests, requests)
    place = _spread(num)[number]
    first, last = due[place * len(due) // num], due[(place + 1) * len(due) // num - 1]
    longest_ns = max(one.deadline_ns - one.arrival_ns for one in due if one.deadline_ns is not None)
    begin_ns = first.arrival_ns - max(longest_ns, (last.arrival_ns - first.arrival_ns) // 2)
    window = [one for one in requests if begin_ns <= one.arrival_ns <= last.arrival_ns + longest_ns]
    judged = [one for one in window if first.arrival_ns <= one.arrival_ns <= last.arrival_ns]
    return Sample(window, judged)


def num_samples(num_due: int, size: int) -> int:
    """Return the number of samples into which requests with this many deadlines are cut."""
    return max(1, ceil(num_due / size))


def _spread(num: int) -> list[int]:
    """Return 0 to `num` - 1 in an order whose first few are spread evenly (van der Corput's sequence)."""
    bits = max(1, (num - 1).bit_length())
    reversed_ = (int(f"{place:0{bits}b}"[::-1], 2) for place in range(1 << bits))
    ordered = [place for place in reversed_ if place < num]
    return sorted(range(num), key=lambda place: ordered.index((place + num // 2) % num))


def _changed(request: Request, what_if: WhatIf) -> Request:
    arrival_ns = round(request.arrival_ns / what_if.rate)
    if request.deadline_ns is None:
        return replace(request, arrival_ns=arrival_ns)
    slo_ns = round((request.deadline_ns - request.arrival_ns) * what_if.slo)
    return replace(request, arrival_ns=arrival_ns, deadline_ns=arrival_ns + slo_ns)


def _with_more(requests: Sequence[Request], factor: float, rng: Random) -> list[Request]:
    """Return the same arrivals, with `factor` times as many of the heaviest size, as far as there are others to take
    from.
    """
    heaviest = max(map(size_of, requests), key=lambda size: (size.shape.pixels * size.steps, size))
    places: dict[bool, list[int]] = {True: [], False: []}  # True: of the heaviest size.
    for index, request in enumerate(requests):
        places[size_of(request) == heaviest].append(index)
    if not places[False]:
        return list(requests)
    is_more = factor > 1
    wanted = min(len(requests), round(len(places[True]) * factor))
    taken = rng.sample(places[not is_more], abs(wanted - len(places[True])))
    found = list(requests)
    for index in taken:
        found[index] = _moved(requests[rng.choice(places[is_more])], requests[index].arrival_ns, requests[index].uid)
    return found


def _moved(request: Request, arrival_ns: int, uid: str) -> Request:
    deadline_ns = None if request.deadline_ns is None else request.deadline_ns + arrival_ns - request.arrival_ns
    return replace(request, uid=uid, arrival_ns=arrival_ns, deadline_ns=deadline_ns)


@dataclass(frozen=True, slots=True)
class Resampled:
    """Requests that came, for a seed: those of seed 0 as they came, of others with blocks of time drawn again.

    The blocks are of equal length, and as many, so that rate and length stay; what comes together stays together.

    Source: the moving block bootstrap, with fixed blocks.
    """

    requests: Sequence[Request]

    def __call__(self, seed: int) -> Sequence[Request]:
        if seed == 0:
            return self.requests
        first_ns = self.requests[0].arrival_ns
        block_ns = (self.requests[-1].arrival_ns - first_ns) // _BLOCKS + 1
        blocks: list[list[Request]] = [[] for _ in range(_BLOCKS)]
        for one in self.requests:
            blocks[(one.arrival_ns - first_ns) // block_ns].append(one)
        drawn = stream(seed, "blocks").choices(range(_BLOCKS), k=_BLOCKS)
        return [
            _moved(one, one.arrival_ns + (place - block) * block_ns, f"{place}/{one.uid}")
            for place, block in enumerate(drawn)
            for one in blocks[block]
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Demand of requests: the least device time per second (`load`), the devices with fewer than which the target is
    out of reach (`least`), and the share of deadlines that can be kept if nothing else runs (`reachable`).
    """

    load: float
    least: int
    reachable: float


def demand_of(requests: Sequence[Request], costs: TableCosts, target: float, *, has_batches: bool) -> Demand:
    """Return the demand of requests on devices of these costs. Raises UnknownCost.

    Those on time are at least a share `target`, and all is done by the latest deadline. With batches, requests may take
    less than each alone, so that one device is all that is known to be needed.
    """
    until_ns = max(one.deadline_ns for one in requests if one.deadline_ns is not None) - requests[0].arrival_ns
    span_ns = requests[-1].arrival_ns - requests[0].arrival_ns
    span_ns = round(span_ns * len(requests) / max(1, len(requests) - 1)) or until_ns  # If all came at once.
    needed_ns = [least_device_ns(costs, *size_of(one)) for one in requests]
    due = sorted(ns for one, ns in zip(requests, needed_ns, strict=True) if one.deadline_ns is not None)
    lightest_ns = sum(due[: ceil(target * len(due))])
    least = 1 if has_batches else max(1, ceil(lightest_ns / until_ns))
    reachable = sum(_is_reachable(one, costs) for one in requests) / len(due)
    return Demand(load=sum(needed_ns) / span_ns, least=least, reachable=reachable)


def _is_reachable(request: Request, costs: TableCosts) -> bool:
    """Return whether a request can keep its deadline alone. Tables do not say how fast a cache or no guidance is."""
    if request.deadline_ns is None:
        return False
    is_as_tabled = request.guided and request.cache is None
    return not is_as_tabled or fastest_latency_ns(costs, *size_of(request)) <= request.deadline_ns - request.arrival_ns


def sizes_of(requests: Sequence[Request]) -> dict[Size, list[Request]]:
    """Return the requests of each size, those with most pixels and steps first."""
    found: dict[Size, list[Request]] = {}
    for one in requests:
        found.setdefault(size_of(one), []).append(one)
    return dict(sorted(found.items(), key=lambda item: (-item[0].shape.pixels * item[0].steps, item[0])))


@dataclass(frozen=True, slots=True)
class DrawnTraffic:
    """Requests of a workload, drawn anew for each seed."""

    workload: WorkloadFamily

    def __call__(self, seed: int) -> Sequence[Request]:
        return to_requests(self.workload.requests(seed))
