"""DDiT's theoretical optimum: the devices of each request class, and the degree of its groups, for a known mix.

Each class gets devices of its own, in order, and runs on groups of one degree, which lie within nodes. A dynamic
program finds the best such partition. The cost of a group for its class is, by the batch model, how long a backlog
takes; by the queue model, how long a request is in the system if requests arrive at random.

Source: DDiT §4.2.2, Algorithm 1, and appendix A. Unlike them:
- Equation 7 as printed halves the service time together with the wait. Half of what M/M/c waits is the approximation
  of M/D/c, so time in the system is 1/mu + Wq/2; with one group that is equation 6.
- Line 19 as printed forgets what earlier k and p have found; the smallest is kept.
- Erlang's recursion replaces Stirling's formula, which is 8% off at 1!.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import ceil, inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """Requests that cost the same: `service_s` is the time of one, by degree.

    `amount` is how many there are to do (batch model), or how many arrive per second (queue model).
    """

    name: str
    amount: float
    service_s: Mapping[int, float]


Model = Callable[[float, float, int], float]
"""(amount, service time, number of groups) -> seconds, infinite if the groups cannot keep up."""


def batch_s(amount: float, service_s: float, num_groups: int) -> float:
    """Return when a backlog is done that is spread evenly over the groups. Source: DDiT §4.2.2, equation 3."""
    return ceil(amount / num_groups) * service_s


def queue_s(amount: float, service_s: float, num_groups: int) -> float:
    """Return the mean time in the system of Poisson arrivals with equal service times: M/D/1 exactly, M/D/c about.

    Source: DDiT appendix A, equations 6 and 7, corrected as said at the head of this file.
    """
    offered = amount * service_s
    if offered >= num_groups:
        return inf
    wait_s = _erlang_c(offered, num_groups) * service_s / (num_groups - offered)
    return service_s + wait_s / 2


def _erlang_c(offered: float, num_servers: int) -> float:
    """Return the probability that an arrival finds all M/M/c servers busy, with `offered` < `num_servers`."""
    blocked = 1.0
    for servers in range(1, num_servers + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    return blocked / (1 - offered / num_servers * (1 - blocked))


class Objective(StrEnum):
    """Sums over the classes."""

    OCCUPANCY = "occupancy"  # Devices times seconds, as Algorithm 1 does.
    LATENCY = "latency"  # Seconds times the class's share of the requests: the mean over all requests.


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The devices of a class, from `first` to before `end`, and the seconds that the model predicts."""

    name: str
    first: int
    end: int
    degree: int
    num_groups: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The best partition, one share per class in the order given. Infinite and without shares if none keeps up."""

    cost: float
    shares: tuple[Share, ...]


def groups_within_nodes(first: int, end: int, degree: int, devices_per_node: int) -> int:
    """Count the groups of a degree that the devices from `first` to before `end` hold; no group crosses nodes.

    Source: DDiT §4.2.2, BandwidthAwarePartition.
    """
    cuts = [first, *range(first - first % devices_per_node + devices_per_node, end, devices_per_node), end]
    return sum((right - left) // degree for left, right in pairwise(cuts))


def optimal_allocation(
    classes: Sequence[RequestClass],
    *,
    num_devices: int,
    devices_per_node: int,
    model: Model = queue_s,
    objective: Objective = Objective.OCCUPANCY,
) -> Allocation:
    """Return the partition of the devices among the classes, in their order, with the smallest sum of the objective.

    The first devices may stay unused. Of equally good allocations, the last class gets the fewest devices, in
    groups of the degree that comes first; then the one before it. O(devices^2 x classes x degrees x nodes).

    Source: DDiT §4.2.2, Algorithm 1.
    """
    total = sum(one.amount for one in classes)
    best: list[Allocation] = [Allocation(cost=0.0, shares=())] * (num_devices + 1)
    for one in classes:
        after = []
        for end in range(num_devices + 1):
            found = Allocation(cost=inf, shares=())
            for first in reversed(range(end)):
                for share in _shares(one, first, end, devices_per_node, model):
                    weight = end - first if objective is Objective.OCCUPANCY else one.amount / total
                    cost = best[first].cost + weight * share.seconds
                    if cost < found.cost:
                        found = Allocation(cost=cost, shares=(*best[first].shares, share))
            after.append(found)
        best = after
    return best[num_devices]


def _shares(one: RequestClass, first: int, end: int, devices_per_node: int, model: Model) -> list[Share]:
    """Return the shares that a class can have of these devices, one per degree."""
    found = []
    for degree, service_s in one.service_s.items():
        num_groups = groups_within_nodes(first, end, degree, devices_per_node)
        if num_groups:
            seconds = model(one.amount, service_s, num_groups)
            found.append(
                Share(name=one.name, first=first, end=end, degree=degree, num_groups=num_groups, seconds=seconds)
            )
    return found
