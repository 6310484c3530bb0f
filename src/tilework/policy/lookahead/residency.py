"""The weights that devices and hosts hold: what they drop first, what idle devices load and hosts read ahead of need.

Theory of operation. A request *misses* what its device lacks. The expected time of loads for a component, per time, is
how often it is asked for (`ComponentRates`) x the time of a load from its host, or else from the disk, x a factor for
each device that has it: a request may go there, unless that device is busy. `Eviction` drops what raises this *miss
time* least per byte of room, on the device and on its host. What is certain to be needed goes last: what the jobs that
run or begin on the device still need, and what reservations on it count on. `LoadingAhead` and `Reading` load and read
what lowers the miss time most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import exp
from typing import NamedTuple

from tilework.core.component import Component, DropOrder, LoadSource, Memory, num_bytes
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.policy import ClusterView, CostModel, DeviceView, JobView
from tilework.core.request import Request
from tilework.core.time import NS_PER_S
from tilework.core.weights import WeightCosts
from tilework.core.work import Group, LoadAhead, ReadAhead, Start
from tilework.policy.toolkit.loads import at_node

RECENT_NS, USUAL_NS = 180 * NS_PER_S, 3600 * NS_PER_S
"""Users ask again within minutes, and what is popular stays so for hours."""
_RECENT = 0.5  # The share of the last minutes in an estimate.
_MOST_KNOWN = 4096


class _AskedCounts(NamedTuple):
    """Requests for a component, each with a weight that has decayed since it came, as of the latest of them."""

    at_ns: int
    recent: float
    usual: float


@dataclass(slots=True)
class ComponentRates:
    """Estimates how often each component will be asked for, from two means that forget exponentially.

    One forgets within minutes: those who have just asked ask again. The other forgets within hours: popular components
    are asked for by others. An estimate is half of each.

    `stages` are those of accelerators, of the pipelines that were asked for, without LoRAs, the latest last.
    """

    _asked: dict[Component, _AskedCounts] = field(default_factory=dict)
    stages: dict[Stage, None] = field(default_factory=dict)
    num_requests: int = 0
    _first_ns: int | None = None
    _last_ns: int = -1
    _uids: set[str] = field(default_factory=set)  # Uids of requests that came at `_last_ns`.

    def add(self, request: Request, costs: CostModel) -> bool:
        """Count a request once, however often it is added before the next one; returns whether it was counted now."""
        now_ns = request.arrival_ns
        if now_ns < self._last_ns or (now_ns == self._last_ns and request.uid in self._uids):
            return False
        if now_ns > self._last_ns:
            self._last_ns = now_ns
            self._uids.clear()
        self._uids.add(request.uid)
        self.num_requests += 1
        self._first_ns = now_ns if self._first_ns is None else self._first_ns
        if not costs.weights.all:
            return True
        plain = [one for one in costs.graph(request.pipeline).stages if one.kind is DeviceKind.ACCELERATOR]
        self._note_stages(plain, costs)
        stages = [one for one, _ in costs.start(request).pieces if one.kind is DeviceKind.ACCELERATOR]
        for component in {one: None for stage in stages for one in costs.weights.components(stage)}:
            before = self._decayed(self._asked.pop(component, _AskedCounts(now_ns, 0.0, 0.0)), now_ns)
            self._asked[component] = _AskedCounts(now_ns, before.recent + 1, before.usual + 1)
        if len(self._asked) > _MOST_KNOWN:
            del self._asked[next(iter(self._asked))]
        return True

    def _note_stages(self, stages: Iterable[Stage], costs: CostModel) -> None:
        for stage in stages:
            if costs.weights.components(stage):
                self.stages.pop(stage, None)
                self.stages[stage] = None
        while len(self.stages) > _MOST_KNOWN:
            del self.stages[next(iter(self.stages))]

    def forget(self, pipeline: str, costs: CostModel) -> None:
        """Drop the stages of a pipeline, and the components that no other needs."""
        self.stages = {stage: None for stage in self.stages if stage.pipeline != pipeline}
        needed = set(costs.weights.all)
        self._asked = {one: asked for one, asked in self._asked.items() if one in needed}

    def per_s(self, component: Component, now_ns: int) -> float:
        """Return how many requests per second are expected to ask for a component."""
        asked = self._asked.get(component)
        if asked is None or self._first_ns is None:
            return 0.0
        now = self._decayed(asked, now_ns)
        span_ns = max(RECENT_NS, now_ns - self._first_ns)
        usual_s = USUAL_NS * (1 - exp(-span_ns / USUAL_NS)) / NS_PER_S  # The mean if one came per second.
        return _RECENT * now.recent / (RECENT_NS / NS_PER_S) + (1 - _RECENT) * now.usual / usual_s

    def _decayed(self, asked: _AskedCounts, now_ns: int) -> _AskedCounts:
        passed_ns = max(0, now_ns - asked.at_ns)
        recent, usual = exp(-passed_ns / RECENT_NS), exp(-passed_ns / USUAL_NS)
        return _AskedCounts(now_ns, asked.recent * recent, asked.usual * usual)


_BY_COPY = 0.3
"""The share of the requests for a component that a device with it cannot serve. From .1 to .6 was about as good."""
_ON_HOST = frozenset((LoadSource.DISK, LoadSource.PAGE_CACHE, LoadSource.HOST))
_ON_DISK = frozenset((LoadSource.DISK,))


@dataclass(frozen=True, slots=True)
class Holdings:
    """The components that the devices of a node have, by id, and those that its host keeps."""

    devices: dict[int, Memory]
    host: Memory

    def copies(self, component: Component) -> int:
        return sum(component in memory.components for memory in self.devices.values())

    def after(self, group: Group, wanted: Sequence[Component], order: DropOrder) -> Holdings:
        """Return the holdings after these devices have loaded what they lack of `wanted`, in this order of drops."""
        devices = dict(self.devices)
        read: list[Component] = []
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
        """Return the same starts; those on devices that load something say what is dropped for it."""
        orders: dict[Group, DropOrder] = {}
        loading = {
            device_id
            for start in starts
            if start.stage.kind is DeviceKind.ACCELERATOR
            for device_id in start.devices
            if self.view.sources.load_ns(device_id, start.stage)
        }
        for start in starts if loading else ():
            if start.devices not in orders and not loading.isdisjoint(start.devices):
                orders[start.devices] = self.order(start.devices, start.stage, starts)
        return [replace(one, drop_order=orders.get(one.devices, one.drop_order)) for one in starts]

    def holdings(self, node: int) -> Holdings:
        """Return what a node has.

        Its host may forget what its devices are reading by the time when it must make room.
        """
        devices = {device.device_id: device.memory for device in self.view.on_node(node)}
        return Holdings(devices, Memory(self.costs.weights.host_bytes, tuple(self.view.sources.kept(node))))

    def order(self, group: Group, stage: Stage, starts: Sequence[Start] = ()) -> DropOrder:
        """Return what these devices of one node, and its host, drop first where they load what they lack of a stage."""
        here = [device for device_id in group if (device := self.view.device(device_id)) is not None]
        before = self.holdings(here[0].node)
        needed = self._needed(here, starts)
        components = dict.fromkeys(one for device in here for one in device.memory.components)
        without = {one: max(0, before.copies(one) - len(group)) for one in components}
        losses = {one: self._loss(one, without[one], one in before.host.components) for one in components}
        first = tuple(sorted(components, key=lambda one: (one in needed, losses[one])))
        after = before.after(group, self.costs.weights.components(stage), DropOrder(first))
        return DropOrder(first, self.host_order(here[0].node, after))

    def host_order(self, node: int, holdings: Holdings) -> tuple[Component, ...]:
        """Return what the host of a node forgets first, where its devices have these components."""
        kept = {one: self._host_loss(one, holdings.copies(one)) for one in at_node(self.view, node)}
        return tuple(sorted(kept, key=kept.__getitem__))

    def miss_ns(self, component: Component, holdings: Holdings) -> float:
        """Return how long loads of a component are expected to take, in nanoseconds per second."""
        return self._miss_ns(component, holdings.copies(component), component in holdings.host.components)

    def _miss_ns(self, component: Component, num_copies: int, is_on_host: bool) -> float:
        sources = (_ON_HOST if is_on_host else _ON_DISK) | ({LoadSource.PEER} if num_copies else set())
        weights = self.costs.weights
        load_ns = weights.load_ns(component.num_bytes, weights.quickest_source(frozenset(sources)))
        return self.rates.per_s(component, self.now_ns) * load_ns * _BY_COPY**num_copies

    def _loss(self, component: Component, num_copies: int, is_on_host: bool) -> float:
        """Return the cost, per byte, if devices drop a component of which this many copies are left."""
        return self._miss_ns(component, num_copies, is_on_host) / max(1, component.num_bytes)

    def _host_loss(self, component: Component, num_copies: int) -> float:
        """Return the cost, per byte, if a host forgets a component of which devices have this many copies."""
        lost_ns = self._miss_ns(component, num_copies, False) - self._miss_ns(component, num_copies, True)
        return lost_ns / max(1, component.num_bytes)

    def _needed(self, here: Sequence[DeviceView], starts: Sequence[Start]) -> set[Component]:
        """Return what jobs that run or begin on these devices still need, and what is reserved there."""
        ids = {device.device_id for device in here}
        job_ids = {job_id for device in here for work in device.works for job_id in work.job_ids}
        job_ids |= {job_id for start in starts if not ids.isdisjoint(start.devices) for job_id in start.job_ids}
        job_ids |= {
            job.job_id
            for job in self.view.promised()
            if job.promised is not None and not ids.isdisjoint(job.promised.devices)
        }
        jobs = (job for job_id in sorted(job_ids) if (job := self.view.job(job_id)) is not None)
        return {component for job in jobs for component in _wanted(job.left, self.costs.weights)}


def _wanted(left: Cursor, weights: WeightCosts) -> Iterable[Component]:
    stages = [stage for stage, _ in left.pieces if stage.kind is DeviceKind.ACCELERATOR]
    return [component for stage in stages for component in weights.components(stage)]


_LOAD_PAYBACK_S = 600.0  # A load must save more time than it takes within this time.
_SOON_S = 180.0  # One that drops nothing pays if its device is expected to be asked for it within this time.
_MOST_TRIED = 8  # Stages for a device or a host, those that are asked for most often.
_State = tuple[object, ...]


@dataclass(slots=True)
class LoadingAhead:
    """Chooses loads ahead of need, one at a time on a node or pool, of what its host has (`Reading`).

    A load pays if it lowers the expected time of misses (`Eviction`) by more than it takes itself, within minutes. What
    is dropped for it counts, so that two loads never undo each other while rates stay the same. Copies of popular
    components on several devices come from the same rule.

    Where nothing is dropped for it, it pays if this device is expected to be asked for it within minutes, as much as
    any other: copies elsewhere help no request that comes while those devices are busy. So a device that has dropped
    weights for the activations of a large decode has them again as soon as it is idle.
    """

    _refused: dict[int, _State] = field(default_factory=dict)  # The latest state in which no load paid, by pool.

    def best(self, eviction: Eviction, devices: Sequence[DeviceView], idle: Sequence[DeviceView]) -> list[LoadAhead]:
        """Return the load that saves most for its time, on one of the idle devices of a node; none if none pays.

        It is computed again when a request has come, other devices are idle, or devices have other components.
        """
        if not idle or any(device.is_loading for device in devices):
            return []
        state: _State = (
            eviction.rates.num_requests,
            tuple(device.device_id for device in idle),
            tuple(device.memory for device in devices),
        )
        pool = devices[0].pool
        if self._refused.get(pool) == state:
            return []
        asked = stages_by_rate(eviction, idle[:1])
        options = [option for device in idle for option in _loads(eviction, device, asked)]
        saved, best = max(options, key=lambda option: option[0], default=(0.0, None))
        if best is not None and saved > 1:
            return [best]
        self._refused[pool] = state
        return []


def stages_by_rate(eviction: Eviction, devices: Sequence[DeviceView]) -> list[Stage]:
    """Return the stages of these devices that were asked for, most often first.

    Those of a removed model need nothing.
    """
    rates = eviction.rates
    pools = eviction.costs.pools
    served = (one for one in rates.stages if any(pools.serves(each.device_id, one.pipeline) for each in devices))
    needed = {stage: wanted for stage in served if (wanted := eviction.costs.weights.components(stage))}
    rarest = {stage: min(rates.per_s(one, eviction.now_ns) for one in wanted) for stage, wanted in needed.items()}
    return sorted(rarest, key=lambda stage: -rarest[stage])


def _loads(eviction: Eviction, device: DeviceView, asked: Sequence[Stage]) -> Iterator[tuple[float, LoadAhead | None]]:
    """Yield loads of a device, each with what it saves within its payback time, over the time that it takes."""
    weights = eviction.costs.weights
    before = eviction.holdings(device.node)
    group = (device.device_id,)
    num_devices = len(eviction.view.devices)
    lacking = (stage for stage in asked if not device.memory.has(weights.components(stage)))
    for stage in islice(lacking, _MOST_TRIED):
        wanted = weights.components(stage)
        load_ns = eviction.view.sources.load_ns(device.device_id, stage)
        is_on_host = all(one in before.host.components or one in device.memory.components for one in wanted)
        if load_ns and is_on_host and device.memory.can_hold(wanted):
            order = eviction.order(group, stage)
            after = before.after(group, wanted, order)
            changed = sorted({*device.memory.components, *wanted, *before.host.components})
            saved_ns = sum(eviction.miss_ns(one, before) - eviction.miss_ns(one, after) for one in changed)
            saved = _LOAD_PAYBACK_S * saved_ns / load_ns
            if device.memory.has_room(wanted):
                saved = max(saved, _SOON_S * eviction.rates.per_s(wanted[0], eviction.now_ns) / num_devices)
            yield saved, LoadAhead(device_id=device.device_id, stage=stage, drop_order=order)


_READ_PAYBACK_S = 300.0  # A read for no request must save more time than it takes within this time.


@dataclass(slots=True)
class Reading:
    """Chooses what a host reads: first what jobs wait for, and then what is expected to save most.

    A job that waits while all devices work is read for at once, so that its device loads from the host's memory. Jobs
    are tried in order of urgency; what an earlier one needs is not forgotten for a later one. If all have what they
    need, a read pays by the rule of `LoadingAhead`.
    """

    _refused: dict[int, _State] = field(default_factory=dict)  # The latest state in which no read paid, by node.

    def best(self, eviction: Eviction, node: int, waiting: Sequence[JobView]) -> list[ReadAhead]:
        """Return the next read of a host, if it can read now; `waiting` are the jobs that wait on its node."""
        if not eviction.view.sources.may_read(node):
            return []
        holdings = eviction.holdings(node)
        state: _State = (
            eviction.rates.num_requests,
            tuple(job.job_id for job in waiting),
            tuple(holdings.devices.values()),
            holdings.host,
        )
        if self._refused.get(node) == state:
            return []
        reads = _for_waiting(eviction, node, holdings, waiting) or _by_rate(eviction, node, holdings)
        if not reads:
            self._refused[node] = state
        return reads


def _for_waiting(eviction: Eviction, node: int, holdings: Holdings, waiting: Iterable[JobView]) -> list[ReadAhead]:
    needed: set[Component] = set()
    for job in sorted(waiting, key=lambda job: (job.urgency_ns, job.job_id)):
        for stage in dict.fromkeys(stage for stage, _ in job.left.pieces if stage.kind is DeviceKind.ACCELERATOR):
            if lacking := _lacking(eviction, holdings, stage):
                order = eviction.host_order(node, holdings)
                after = holdings.host.with_read(lacking, order)
                forgotten = set(holdings.host.components).difference(after.components)
                fits = all(one in after.components for one in lacking)
                return [ReadAhead(node=node, stage=stage, forgets=order)] if fits and not forgotten & needed else []
            needed.update(eviction.costs.weights.components(stage))
    return []


def _by_rate(eviction: Eviction, node: int, holdings: Holdings) -> list[ReadAhead]:
    saved, best = max(_reads(eviction, node, holdings), key=lambda option: option[0], default=(0.0, None))
    return [best] if best is not None and saved > 1 else []


def _reads(eviction: Eviction, node: int, holdings: Holdings) -> Iterator[tuple[float, ReadAhead | None]]:
    """Yield reads of a host, each with what it saves within the payback time, over the time that it takes."""
    if not any(_lacking(eviction, holdings, stage) for stage in eviction.rates.stages):
        return  # As nearly always.
    order = eviction.host_order(node, holdings)
    here = stages_by_rate(eviction, eviction.view.on_node(node))
    asked = ((stage, _lacking(eviction, holdings, stage)) for stage in here)
    for stage, lacking in islice(((stage, lacking) for stage, lacking in asked if lacking), _MOST_TRIED):
        after = replace(holdings, host=holdings.host.with_read(lacking, order))
        changed = sorted({*holdings.host.components, *lacking})
        saved_ns = sum(eviction.miss_ns(one, holdings) - eviction.miss_ns(one, after) for one in changed)
        read_ns = eviction.costs.weights.load_ns(num_bytes(lacking), LoadSource.DISK)
        yield _READ_PAYBACK_S * saved_ns / max(1, read_ns), ReadAhead(node=node, stage=stage, forgets=order)


def _lacking(eviction: Eviction, holdings: Holdings, stage: Stage) -> list[Component]:
    """Return the components of a stage that neither host nor devices of the node have; none if one cannot be read."""
    there = holdings.host.components
    lacking = [one for one in eviction.costs.weights.components(stage) if one not in there and not holdings.copies(one)]
    return [] if any(one in eviction.view.sources.unreadable for one in lacking) else lacking
