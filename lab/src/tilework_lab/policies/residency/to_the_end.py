"""One request per device, from its beginning to its end: what the policies of this folder share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tilework.core.component import LEAST_RECENTLY_USED, DropOrder
from tilework.core.graph.progress import Cursor
from tilework.core.interfaces import ClusterView, CostModel, Demand, DeviceView, JobView
from tilework.core.request import Request
from tilework.core.work import Plan, Start
from tilework.cost.demand import demand_at
from tilework.policy.toolkit.loads import loads_ns
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
        """How long a device would load before it can run a job, from the quickest sources."""
        return loads_ns(self.view, device.device_id, job.left)

    def least_load(self, job: JobView, idle: Sequence[DeviceView]) -> tuple[int, DeviceView]:
        """The device that loads least for a job, the first of equals, and for how long."""
        return min([(self.load_ns(job, device), device) for device in idle], key=lambda pair: pair[0])


class OneToTheEnd(ArrivalOrdered, ABC):
    """An idle device begins a waiting request and runs it to its end, alone and without interruption.

    What is dropped for it is the least recently used, unless a policy has another `drop_order`. `choose` pairs idle
    devices with waiting jobs until it returns None. Weights and tenants are ignored.
    """

    __slots__ = ()

    @abstractmethod
    def choose(self, moment: Moment, waiting: Sequence[JobView], idle: Sequence[DeviceView]) -> Choice | None:
        """One of the waiting jobs, the oldest first, with one of the idle devices, by id. Neither is empty."""

    def drop_order(self, moment: Moment, device: DeviceView, loaded_ns: int) -> DropOrder:
        """What a device drops first for what it loads from now until `loaded_ns`, and its host for what it reads."""
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
        moment, starts = Moment(view, costs, now_ns), list[Start]()
        while idle and waiting and (choice := self.choose(moment, waiting, idle)) is not None:
            job, device, why = choice
            waiting.remove(job)
            idle.remove(device)
            order, load_ns = LEAST_RECENTLY_USED, moment.load_ns(job, device)
            if load_ns:
                order = self.drop_order(moment, device, now_ns + load_ns)
            starts += _all_of(job, device.device_id, why, order)
        return Plan(starts=tuple(starts))


def _all_of(job: JobView, device_id: int, why: str, order: DropOrder) -> Iterator[Start]:
    """All that is left of a job on one device."""
    job_ids, devices = (job.job_id,), (device_id,)
    for stage, num_steps in job.left.pieces:
        yield Start(stage=stage, job_ids=job_ids, devices=devices, num_steps=num_steps, why=why, drop_order=order)
