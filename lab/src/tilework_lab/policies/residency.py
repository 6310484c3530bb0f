"""Policies for more weights than devices hold: each device runs one request to its end, and they choose which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tilework.core.block import Demand
from tilework.core.component import LEAST_RECENTLY_USED, Component, DropOrder
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel, DeviceView, JobView
from tilework.core.request import Request
from tilework.core.time import NEVER_NS, NS_PER_S, s_from_ns
from tilework.core.work import Plan, Start
from tilework.cost.demand import demand_at
from tilework.policy.toolkit.loads import at_node, loads_ns
from tilework.policy.toolkit.order import ArrivalOrdered

_MOST_WAITING = 64  # Per device: the oldest.

Choice = tuple[JobView, DeviceView, str]
"""A job, the device that begins it now, and why."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The cluster at one time, and the predicted costs."""

    view: ClusterView
    costs: CostModel
    now_ns: int

    def load_ns(self, job: JobView, device: DeviceView) -> int:
        """Return how long a device would load before it can run a job, from the quickest sources."""
        return loads_ns(self.view, device.device_id, job.left)

    def least_load(self, job: JobView, idle: Sequence[DeviceView]) -> tuple[int, DeviceView]:
        """Return the device that loads least for a job, the first of equals, and for how long."""
        return min([(self.load_ns(job, device), device) for device in idle], key=lambda pair: pair[0])


class OneToTheEnd(ArrivalOrdered, ABC):
    """An idle device begins a waiting request and runs it to its end, alone and without interruption.

    What is dropped for it is the least recently used, unless a policy has another `drop_order`. `choose` pairs idle
    devices with waiting jobs until it returns None. Weights and tenants are ignored.
    """

    __slots__ = ()

    @abstractmethod
    def choose(self, moment: Moment, waiting: Sequence[JobView], idle: Sequence[DeviceView]) -> Choice | None:
        """Return one of the waiting jobs, the oldest first, with one of the idle devices, by id. Neither is empty."""

    def drop_order(self, moment: Moment, device: DeviceView, loaded_ns: int) -> DropOrder:
        """Return the order of drops of a device that loads from now until `loaded_ns`, and of its host, which reads."""
        return LEAST_RECENTLY_USED

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (1,)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        return demand_at(request, left, 1, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        idle = [device for device in view.devices if not device.works]
        if not idle:
            return Plan()
        waiting = list(islice(view.waiting(), _MOST_WAITING * len(view.devices)))
        moment = Moment(view, costs, now_ns)
        starts: list[Start] = []
        while idle and waiting and (choice := self.choose(moment, waiting, idle)) is not None:
            job, device, why = choice
            waiting.remove(job)
            idle.remove(device)
            load_ns = moment.load_ns(job, device)
            order = self.drop_order(moment, device, now_ns + load_ns) if load_ns else LEAST_RECENTLY_USED
            starts += _all_of(job, device.device_id, why, order)
        return Plan(starts=tuple(starts))


def _all_of(job: JobView, device_id: int, why: str, order: DropOrder) -> Iterator[Start]:
    """Yield all that is left of a job on one device."""
    for stage, num_steps in job.left.pieces:
        yield Start(
            stage=stage,
            job_ids=(job.job_id,),
            devices=(device_id,),
            num_steps=num_steps,
            why=why,
            drop_order=order,
        )


class FifoLoad(OneToTheEnd):
    """The oldest request goes to the first free device, whatever that has.

    Source: "FIFO, any GPU" of our reference simulation of GenTD26 (lab/docs/workloads.md).
    """

    __slots__ = ()

    def choose(self, moment: Moment, waiting: Sequence[JobView], idle: Sequence[DeviceView]) -> Choice | None:
        return waiting[0], idle[0], "has waited longest"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastRecentlyUsed(OneToTheEnd):
    """The request that some free device can begin with the shortest load goes first, the older of equals.

    One that has waited `patience_ns` goes before all that have not, the oldest first, to the device that loads least.

    Source: "LRU + shortest load first (300 s patience)" of our reference simulation of GenTD26 (lab/docs/workloads.md).
    """

    patience_ns: int = 300 * NS_PER_S

    def choose(self, moment: Moment, waiting: Sequence[JobView], idle: Sequence[DeviceView]) -> Choice | None:
        first = waiting[0]
        if moment.now_ns - first.request.arrival_ns >= self.patience_ns:
            return first, moment.least_load(first, idle)[1], "has waited longer than any should"
        options = [(*moment.least_load(job, idle), job) for job in waiting]
        load_ns, device, job = min(options, key=lambda option: option[0])
        return job, device, f"loads least, {s_from_ns(load_ns):.1f} s"


@dataclass(slots=True)
class Sticky(OneToTheEnd):
    """Each pipeline has one device as its home, where its requests run in order of arrival; others never run them.

    A pipeline that comes for the first time, or whose home was lost, gets the device that is home to the fewest
    pipelines, the lowest id of equals.

    Source: "sticky: one home per checkpoint" of our reference simulation of GenTD26 (lab/docs/workloads.md).
    """

    _homes: dict[str, int] = field(default_factory=dict, init=False)

    def choose(self, moment: Moment, waiting: Sequence[JobView], idle: Sequence[DeviceView]) -> Choice | None:
        up = [device.device_id for device in moment.view.devices]
        by_id = {device.device_id: device for device in idle}
        for job in waiting:
            home = by_id.get(self._home(job.request.pipeline, up))
            if home is not None:
                return job, home, "its pipeline has its home here"
        return None

    def forget(self, pipeline: str, costs: CostModel) -> None:
        self._homes.pop(pipeline, None)

    def _home(self, pipeline: str, up: Sequence[int]) -> int:
        home = self._homes.get(pipeline)
        if home is None or home not in up:
            num_homes = Counter(self._homes.values())
            home = self._homes[pipeline] = min(up, key=lambda device_id: (num_homes[device_id], device_id))
        return home


class DeadlineLeastRecentlyUsed(OneToTheEnd):
    """The request with the earliest deadline of those that would be on time if they began now goes first.

    Each is tried on the free device that loads least for it: its load and its run must end by the deadline. If none can
    be on time, the one with the shortest load goes first, the older of equals; so do requests without a deadline.

    Source: "deadline-aware + shortest load" of our reference simulation of GenTD26 (lab/docs/workloads.md), which does
    not say how it orders those that can be on time. Of six orders that we tried (deadline, slack, load, load and run,
    load and then slack, slack below 30 s and then load), this one is on time most often at loads of .5 and more.
    """

    __slots__ = ()

    def choose(self, moment: Moment, waiting: Sequence[JobView], idle: Sequence[DeviceView]) -> Choice | None:
        tried = [(*moment.least_load(job, idle), job) for job in waiting]
        in_time: list[tuple[int, int, JobView, DeviceView]] = []
        for load_ns, device, job in tried:
            deadline_ns = job.request.deadline_ns
            if deadline_ns is not None and moment.now_ns + load_ns + job.demand.run_ns <= deadline_ns:
                in_time.append((deadline_ns, load_ns, job, device))
        if in_time:
            _, load_ns, job, device = min(in_time, key=lambda option: option[0])
            return job, device, f"is due first of those that can be on time, and loads {s_from_ns(load_ns):.1f} s"
        load_ns, device, job = min(tried, key=lambda option: option[0])
        return job, device, f"no request can be on time; this one loads least, {s_from_ns(load_ns):.1f} s"


@dataclass(slots=True)
class DeadlineBelady(DeadlineLeastRecentlyUsed):
    """Requests as in `deadline-lru`. Devices and hosts drop first what is asked for latest from now on.

    It has to know all requests that will come (`NeedsFuture`), so it is a yardstick, and no server can run it. Requests
    that wait do not count as asked for: those that cannot be on time wait for long, and what they need would be kept
    for them. Counting all of them, or those that can be on time, was no better on `gentd26` at loads of .5 to .8.

    Source: "Belady eviction + deadline-aware" of our reference simulation of GenTD26 (lab/docs/workloads.md); Belady, A
    study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966.
    """

    _requests: Sequence[Request] | None = field(default=None, init=False)
    _asked_ns: dict[Component, list[int]] | None = field(
        default=None, init=False
    )  # Times of requests for each, ascending.

    def foresee(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._asked_ns = None

    def drop_order(self, moment: Moment, device: DeviceView, loaded_ns: int) -> DropOrder:
        if self._asked_ns is None:
            assert self._requests is not None, "only a simulation can run this policy"
            self._asked_ns = _arrivals_ns(self._requests, moment.costs)
        host = at_node(moment.view, device.node)
        here = device.memory.components
        return DropOrder(self._latest_first(here, moment.now_ns), self._latest_first(host, loaded_ns))

    def _latest_first(self, components: Iterable[Component], now_ns: int) -> tuple[Component, ...]:
        """Return those that are asked for latest from now on first; of equals the order stays."""
        return tuple(sorted(components, key=lambda one: -self._next_ns(one, now_ns)))

    def _next_ns(self, component: Component, now_ns: int) -> int:
        assert self._asked_ns is not None
        asked_ns = self._asked_ns.get(component, [])
        index = bisect_right(asked_ns, now_ns)
        return asked_ns[index] if index < len(asked_ns) else NEVER_NS


def _arrivals_ns(requests: Iterable[Request], costs: CostModel) -> dict[Component, list[int]]:
    found: dict[Component, list[int]] = {}
    for request in sorted(requests, key=lambda one: one.arrival_ns):
        for component in {
            one for stage in costs.graph(request.pipeline).stages for one in costs.weights.components(stage)
        }:
            found.setdefault(component, []).append(request.arrival_ns)
    return found
