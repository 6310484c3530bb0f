"""What devices and hosts drop first: what is expected to be missed least.

Theory of operation. To drop a component costs the time to load it again, as often as it is asked for
(`ComponentRates`). On a device that is a load from where it can be had then; in the memory of a host, the read from the
disk. Per byte of room, the cheapest go first. Where another device has a copy, a request may go there instead: the
loss counts less. What is certain to be needed goes last: what the jobs that run or begin on the device still need, and
what reservations on it count on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from tilework.core.component import Component, DropOrder, LoadSource
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind
from tilework.core.interfaces import ClusterView, CostModel, DeviceView
from tilework.core.work import Group, Start
from tilework.policy.lookahead.component_rates import ComponentRates
from tilework.policy.toolkit.loads import at_node

_WITH_COPY = 0.3
"""What losing a component counts where another copy is near. From .1 to .6 was about as good on `gentd26`."""
_ON_HOST = frozenset((LoadSource.DISK, LoadSource.PAGE_CACHE, LoadSource.HOST))


@dataclass(frozen=True, slots=True)
class Eviction:
    """Orders what is dropped at one time."""

    rates: ComponentRates
    view: ClusterView
    costs: CostModel
    now_ns: int

    def ordered(self, starts: Sequence[Start]) -> list[Start]:
        """The same starts. Those on devices that load something say what is dropped for it."""
        orders: dict[Group, DropOrder] = {}
        loading = {
            device_id
            for start in starts
            if start.stage.kind is DeviceKind.ACCELERATOR
            for device_id in start.devices
            if self.view.load_ns(device_id, start.stage)
        }
        if not loading:
            return list(starts)
        for start in starts:
            if start.devices not in orders and not loading.isdisjoint(start.devices):
                needed = self._needed(start.devices, starts)
                orders[start.devices] = self.order(start.devices, needed)
        return [replace(one, drop_order=orders.get(one.devices, one.drop_order)) for one in starts]

    def order(self, group: Group, needed: Collection[Component] = ()) -> DropOrder:
        """What these devices of one node, and its host, drop first; `needed` go last."""
        here = [device for device in self.view.devices if device.device_id in group]
        node = here[0].node
        beside = {
            component
            for device in self.view.devices
            if device.node == node and device.device_id not in group
            for component in device.memory.components
        }
        kept = frozenset(self.view.kept_by_host(node))
        on_devices = beside.union(*(device.memory.components for device in here))
        losses = {one: self._loss(one, one in kept, one in beside) for one in _components(here)}
        forgotten = {one: self._rate(one, one in on_devices) for one in at_node(self.view, node)}
        first = sorted(losses, key=lambda one: (one in needed, losses[one]))
        return DropOrder(tuple(first), tuple(sorted(forgotten, key=forgotten.__getitem__)))

    def _loss(self, component: Component, is_on_host: bool, is_beside: bool) -> float:
        """The time that loads take more, per second and byte, if devices lose a component."""
        sources = (_ON_HOST if is_on_host else {LoadSource.DISK}) | ({LoadSource.PEER} if is_beside else set())
        source = self.costs.quickest_source(frozenset(sources))
        load_ns = self.costs.load_ns(component.num_bytes, source)
        return self._rate(component, is_beside) * load_ns / max(1, component.num_bytes)

    def _rate(self, component: Component, has_copy: bool) -> float:
        return self.rates.per_s(component, self.now_ns) * (_WITH_COPY if has_copy else 1.0)

    def _needed(self, group: Group, starts: Sequence[Start]) -> set[Component]:
        """What jobs that run or begin on these devices still need, and what is reserved there."""
        works = [work for device in self.view.devices if device.device_id in group for work in device.works]
        job_ids = {job_id for work in works for job_id in work.job_ids}
        job_ids |= {job_id for start in starts if not set(group).isdisjoint(start.devices) for job_id in start.job_ids}
        job_ids |= {
            job.job_id
            for job in self.view.promised()
            if job.promised is not None and not set(group).isdisjoint(job.promised.devices)
        }
        jobs = (job for job_id in sorted(job_ids) if (job := self.view.job(job_id)) is not None)
        return {component for job in jobs for component in _wanted(job.left, self.costs)}


def _components(devices: Iterable[DeviceView]) -> list[Component]:
    """What these devices have, each once, in their order."""
    return list(dict.fromkeys(one for device in devices for one in device.memory.components))


def _wanted(left: Cursor, costs: CostModel) -> Iterable[Component]:
    stages = [stage for stage, _ in left.pieces if stage.kind is DeviceKind.ACCELERATOR]
    return [component for stage in stages for component in costs.components(stage)]
