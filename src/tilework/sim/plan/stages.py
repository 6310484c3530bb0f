"""Division of devices among the stages of a workflow: by OnePiece's Theorem 1, by simulation, and undivided.

Theory of operation. The stages before, with and after the steps are three services, each with instances of its own
(`policy.published.onepiece`). Theorem 1 gives each as many as makes the slowest as fast as it can be, by the device
time that the traffic takes of each. It counts work, not how it comes and how long it may wait. So the division is
simulated, too, and then changed by one instance at a time, to the neighbour that keeps most deadlines (of equals: with
the least mean latency), until none is better. The policy that was asked for, with which all devices serve all stages,
is beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum, inf

from tilework.control.controller import Controller
from tilework.core.policy import Policy
from tilework.core.request import Request, Status
from tilework.core.time import NS_PER_S, s_from_ns
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.policy.placement.utilisation import proportional
from tilework.policy.published.onepiece.dispatch import OnePieceDispatch
from tilework.policy.published.onepiece.services import Service, Services
from tilework.policy.published.onepiece.traffic import Traffic as Taken
from tilework.policy.registry import make_policy
from tilework.sim.plan.trial import Question
from tilework.sim.simulation import Simulation, without_collections
from tilework.sim.trace import TraceEnding

MOST_ROUNDS = 8
"""Number of changes of the division, at most."""


class NoStages(ValueError):
    """The traffic has no stages to divide devices among; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Demand of the traffic on one service: device seconds per request."""

    name: str
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A division of instances among services, in their order; none: all devices serve all stages.

    `rate_per_s` is what Theorem 1 says that it can do, for requests as they are mixed here. The others are simulated:
    the share on time (None without deadlines) and the mean latency.
    """

    counts: tuple[int, ...]
    rate_per_s: float | None
    attainment: float | None
    mean_s: float

    @property
    def worth(self) -> tuple[float, float]:
        return self.attainment or 0.0, -self.mean_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Plan of stages. `width` is the number of devices per instance, `best` the best division that simulation found."""

    hardware: str
    num_devices: int
    width: int
    shares: Sequence[StageShare]
    offered_per_s: float
    theorem: Partition
    best: Partition
    undivided: Partition
    num_tried: int


def stage_plan(
    question: Question,
    hardware: str,
    num_devices: int,
    on_done: Callable[[Partition], None] = lambda partition: None,
) -> StagePlan:
    """Divide the devices of one hardware, for the first sample of the traffic. Raises NoStages, UnknownCost."""
    requests = question.sample_of(0).simulated
    table = question.tables[hardware]
    taken = _taken(requests, table, num_devices)
    services = taken.services.all()
    costs = TableCosts(table)
    num = num_devices // taken.widest
    if len(services) < 2 or num < len(services):
        raise NoStages(
            f"{num_devices} devices are {num} instances of {taken.widest}, and the traffic has {len(services)} "
            f"service{'s' if len(services) > 1 else ''} of stages: nothing to divide; plan for more devices"
        )
    each_s = {one: load / NS_PER_S / len(requests) for one, load in taken.loads(costs).items()}
    study = _Study(question, hardware, num_devices, tuple(requests), each_s, taken.widest, on_done)
    first = study.partition(tuple(proportional(each_s, num)[one] for one in services))
    span_s = s_from_ns(max(1, requests[-1].arrival_ns - requests[0].arrival_ns))
    return StagePlan(
        hardware=hardware,
        num_devices=num_devices,
        width=taken.widest,
        shares=tuple(StageShare(name=str(one), device_s=each_s[one]) for one in services),
        offered_per_s=len(requests) / span_s,
        theorem=first,
        best=study.climbed(first),
        undivided=study.simulated(make_policy(question.controller.policy), (), None),
        num_tried=len(study.known),
    )


def _taken(requests: Sequence[Request], table: CostTable, num_devices: int) -> Taken:
    """Return the demand of all requests on each service."""
    costs = TableCosts(table)
    taken = Taken(mode=OnePieceDispatch().mode, services=Services())
    for request in requests:
        taken.note(request, costs)
    width = min(taken.wanted, table.devices_per_node, num_devices)
    taken.set_instances(num_devices // width, width)
    return taken


class _Study:
    """Simulates divisions, each once."""

    def __init__(
        self,
        question: Question,
        hardware: str,
        num_devices: int,
        requests: tuple[Request, ...],
        each_s: Mapping[Service, float],
        width: int,
        on_done: Callable[[Partition], None],
    ) -> None:
        self._question = question
        self._table = question.tables[hardware]
        self._requests = requests
        self._sim = replace(question.sim, num_devices=num_devices)
        self._each_s = each_s
        self._width = width
        self._on_done = on_done
        self.known: dict[tuple[int, ...], Partition] = {}

    def climbed(self, at: Partition) -> Partition:
        """Return the division that is reached from this one, by the best neighbour each time."""
        for _ in range(MOST_ROUNDS):
            best = max(map(self.partition, _neighbours(at.counts)), key=lambda one: one.worth, default=at)
            if best.worth <= at.worth:
                break
            at = best
        return at

    def partition(self, counts: tuple[int, ...]) -> Partition:
        if counts not in self.known:
            own = dict(zip(self._each_s, counts, strict=True))
            rate_per_s = min(num * self._width / self._each_s[one] for one, num in own.items() if self._each_s[one])
            policy = OnePieceDispatch(moves=False, division=partial(_as_given, own))
            self.known[counts] = self.simulated(policy, counts, rate_per_s)
        return self.known[counts]

    def simulated(self, policy: Policy, counts: tuple[int, ...], rate_per_s: float | None) -> Partition:
        simulation = Simulation(
            self._question.controller, self._table, self._sim, make_controller=partial(Controller, policy=policy)
        )
        with without_collections():
            endings = simulation.run(self._requests).endings
        found = Partition(
            counts=counts, rate_per_s=rate_per_s, attainment=_attainment(endings), mean_s=_mean_s(endings)
        )
        self._on_done(found)
        return found


def _attainment(endings: Sequence[TraceEnding]) -> float | None:
    due = [one for one in endings if one.request.deadline_ns is not None]
    return sum(one.on_time for one in due) / len(due) if due else None


def _mean_s(endings: Sequence[TraceEnding]) -> float:
    """Return the mean latency; infinite if a request has no image."""
    is_whole = all(one.status is Status.DONE for one in endings)
    return fsum(s_from_ns(one.latency_ns) for one in endings) / len(endings) if is_whole else inf


def _neighbours(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the divisions in which one instance serves another service; no service is left without one."""
    for giver, num in enumerate(counts):
        for taker in range(len(counts)):
            if taker != giver and num > 1:
                yield tuple(one + (place == taker) - (place == giver) for place, one in enumerate(counts))


def _as_given(own: Mapping[Service, int], loads: Mapping[Service, float], num_instances: int) -> dict[Service, int]:
    """Return these instances for each service seen so far; the first one also gets those of the others."""
    counts = {service: own.get(service, 1) for service in loads}
    first = next(iter(counts))
    counts[first] += num_instances - sum(counts.values())
    return counts
