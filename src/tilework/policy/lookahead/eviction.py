"""What devices and hosts drop first: what is expected to be missed least.

Theory of operation. A request *misses* what its device lacks. How long loads for a component are expected to take, per
time, is how often it is asked for (`ComponentRates`) x the time of a load from its host, or else from the disk, x a
factor for each device that has it: a request may go there, unless that device is busy. What is dropped is what raises
this *miss time* least per byte of room, on the device and on its host. What is certain to be needed goes last: what the
jobs that run or begin on the device still need, and what reservations on it count on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tilework.core.component import Component, DropOrder, LoadSource, Memory
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.interfaces import ClusterView, CostModel, DeviceView
from tilework.core.work import Group, Start
from tilework.policy.lookahead.component_rates import ComponentRates
from tilework.policy.toolkit.loads import at_node

_BY_COPY = 0.3
"""The share of the requests for a component that a device with it cannot serve. From .1 to .6 was about as good."""
_ON_HOST = frozenset((LoadSource.DISK, LoadSource.PAGE_CACHE, LoadSource.HOST))
_ON_DISK = frozenset((LoadSource.DISK,))


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the devices of a node have, by id, and what its host keeps."""

    devices: dict[int, Memory]
    host: Memory

    def copies(self, component: Component) -> int:
        return sum(component in memory.components for memory in self.devices.values())

    def after(self, group: Group, wanted: Sequence[Component], order: DropOrder) -> Holdings:
        """What they have when these devices have loaded what they lack of these, in this order of drops."""
        devices, read = dict(self.devices), list[Component]()
        for device_id in group:
            if devices[device_id].can_hold(wanted):
                change = devices[device_id].used(wanted, order.device)
                devices[device_id] = change.memory
                read += [one for one in change.loads if one not in self.host.components]
        return Holdings(devices, self.host.with_read(read, order.host))


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
        for start in starts if loading else ():
            if start.devices not in orders and not loading.isdisjoint(start.devices):
                orders[start.devices] = self.order(start.devices, start.stage, starts)
        return [replace(one, drop_order=orders.get(one.devices, one.drop_order)) for one in starts]

    def holdings(self, node: int) -> Holdings:
        """What a node has. Its host may forget what its devices are reading by the time when it must make room."""
        devices = {device.device_id: device.memory for device in self.view.on_node(node)}
        return Holdings(devices, Memory(self.costs.host_bytes, tuple(self.view.kept_by_host(node))))

    def order(self, group: Group, stage: Stage, starts: Sequence[Start] = ()) -> DropOrder:
        """What these devices of one node, and its host, drop first where they load what they lack of a stage."""
        here = [device for device_id in group if (device := self.view.device(device_id)) is not None]
        before, needed = self.holdings(here[0].node), self._needed(here, starts)
        components = dict.fromkeys(one for device in here for one in device.memory.components)
        without = {one: max(0, before.copies(one) - len(group)) for one in components}
        losses = {one: self._loss(one, without[one], one in before.host.components) for one in components}
        first = tuple(sorted(components, key=lambda one: (one in needed, losses[one])))
        after = before.after(group, self.costs.components(stage), DropOrder(first))
        return DropOrder(first, self.host_order(here[0].node, after))

    def host_order(self, node: int, holdings: Holdings) -> tuple[Component, ...]:
        """What the host of a node forgets first, where its devices have these components."""
        kept = {one: self._host_loss(one, holdings.copies(one)) for one in at_node(self.view, node)}
        return tuple(sorted(kept, key=kept.__getitem__))

    def miss_ns(self, component: Component, holdings: Holdings) -> float:
        """How long loads of a component are expected to take, in nanoseconds per second."""
        return self._miss_ns(component, holdings.copies(component), component in holdings.host.components)

    def _miss_ns(self, component: Component, num_copies: int, is_on_host: bool) -> float:
        sources = (_ON_HOST if is_on_host else _ON_DISK) | ({LoadSource.PEER} if num_copies else set())
        load_ns = self.costs.load_ns(component.num_bytes, self.costs.quickest_source(frozenset(sources)))
        return self.rates.per_s(component, self.now_ns) * load_ns * _BY_COPY**num_copies

    def _loss(self, component: Component, num_copies: int, is_on_host: bool) -> float:
        """What it costs, per byte, that devices drop a component, of which this many copies are left."""
        return self._miss_ns(component, num_copies, is_on_host) / max(1, component.num_bytes)

    def _host_loss(self, component: Component, num_copies: int) -> float:
        """What it costs, per byte, that a host forgets a component of which devices have this many copies."""
        lost_ns = self._miss_ns(component, num_copies, False) - self._miss_ns(component, num_copies, True)
        return lost_ns / max(1, component.num_bytes)

    def _needed(self, here: Sequence[DeviceView], starts: Sequence[Start]) -> set[Component]:
        """What jobs that run or begin on these devices still need, and what is reserved there."""
        ids = {device.device_id for device in here}
        job_ids = {job_id for device in here for work in device.works for job_id in work.job_ids}
        job_ids |= {job_id for start in starts if not ids.isdisjoint(start.devices) for job_id in start.job_ids}
        job_ids |= {
            job.job_id
            for job in self.view.promised()
            if job.promised is not None and not ids.isdisjoint(job.promised.devices)
        }
        jobs = (job for job_id in sorted(job_ids) if (job := self.view.job(job_id)) is not None)
        return {component for job in jobs for component in _wanted(job.left, self.costs)}


def _wanted(left: Cursor, costs: CostModel) -> Iterable[Component]:
    stages = [stage for stage, _ in left.pieces if stage.kind is DeviceKind.ACCELERATOR]
    return [component for stage in stages for component in costs.components(stage)]
