"""Components on devices: which are loaded before a work, from which source, and which are dropped for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tilework.control.cluster.device import NO_WORK, Device, PendingLoad
from tilework.control.cluster.load_sources import HostRead
from tilework.control.cluster.tracker import Tracker
from tilework.core.actions import Action, DropComponents, LoadComponents, ReadComponents
from tilework.core.component import HOST_SOURCES, Component, DropOrder, LoadSource, Memory, num_bytes
from tilework.core.events import ComponentsLoaded, ComponentsRead, DeviceJoined
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.work import LoadAhead, ReadAhead, Start
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.policy.toolkit.loads import at_node


class Components:
    """Loads what the stage of each start needs onto the devices that lack it, just before the work; and ahead of need.

    Hosts read from the disk ahead of need, too, while their devices work: one stage's components at a time.

    If there is no room, components are dropped in the order of the start (`Start.drop_order`). A component is loaded
    from the quickest source that has it (`LoadSources`): another device of the node that has done all its loads, the
    memory of a node that has read it before and has not forgotten it, or the disk.
    """

    def __init__(self, costs: TableCosts, tracker: Tracker) -> None:
        self._costs = costs
        self._weights = costs.weights
        self._tracker = tracker
        self._known = {component.digest: component for component in costs.weights.all}
        self._reads: dict[int, int] = {}  # The node of each read ahead of need.
        self._next_id = 1

    def serve(self, part: CostTable) -> list[Action]:
        """Learn what stages of a pipeline need now; the host has read it. Components that nothing needs are dropped."""
        before = self._weights.all
        self._costs.serve(part)
        for node in {device.node for device in self._tracker.devices}:
            self._tracker.sources.use(node, part.all_components)
        return self._changed(before)

    def remove(self, pipeline: str) -> list[Action]:
        """Forget a pipeline, and drop the components that only it needs."""
        before = self._weights.all
        self._costs.remove(pipeline)
        return self._changed(before)

    def _changed(self, before: Collection[Component]) -> list[Action]:
        known = self._weights.all
        self._known = {component.digest: component for component in known}
        gone = set(before).difference(known)
        self._tracker.sources.forget(gone)
        actions: list[Action] = []
        for device in self._tracker.devices:
            actions += self._drop(device, [one for one in device.memory.components if one in gone])
        self._tracker.models_changed()
        return actions

    def make_room(self, device_id: int, digests: Collection[str], room_bytes: int) -> list[Action]:
        """Drop components that are in the way of a measurement, which loads these digests and needs this room."""
        device = self._tracker.device(device_id)
        assert device is not None
        return self._drop(device, device.memory.in_the_way(digests, room_bytes))

    def _drop(self, device: Device, drops: Sequence[Component]) -> list[Action]:
        if not drops:
            return []
        device.leave_out(drops)
        self._tracker.set_memory(device.device_id, device.memory.without(drops))
        return [DropComponents(device.device_id, _digests(drops))]

    def join(self, joined: DeviceJoined) -> None:
        """Add a device with the components that it has, as far as the costs know them."""
        there, read = (
            tuple(self._known[digest] for digest in digests if digest in self._known)
            for digests in (joined.components, joined.read)
        )
        self._tracker.add_device(joined.device_id, joined.node, joined.kind, Memory(joined.memory_bytes, there))
        self._tracker.sources.use(joined.node, (*read, *there))

    def prepare(self, start: Start, work_id: int, beside_bytes: int = 0) -> list[Action]:
        """Return the actions that must be done before a start, which becomes this work.

        The devices have the components from then on, and the work has `beside_bytes` of further memory. It waits for
        the components that a device is loading already.
        """
        actions: list[Action] = []
        if start.stage.kind is DeviceKind.ACCELERATOR:
            for device_id in start.devices:
                device = self._tracker.device(device_id)
                assert device is not None
                device.await_loads(work_id, self._weights.components(start.stage))
                actions += self._change(device, start.stage, work_id, start.drop_order, beside_bytes)
        return actions

    def load_ahead(self, load: LoadAhead) -> Sequence[Action]:
        """Load ahead of need onto an idle device."""
        device = self._tracker.device(load.device_id)
        assert device is not None
        assert not device.works
        assert not device.is_loading
        assert self._costs.pools.serves(device.device_id, load.stage.pipeline)
        return self._change(device, load.stage, NO_WORK, load.drop_order)

    def read_ahead(self, read: ReadAhead, now_ns: int) -> Sequence[Action]:
        """Let the host of a node read those of a stage's components that neither it nor a device of the node has."""
        sources = self._tracker.sources
        assert sources.may_read(read.node)
        there = set(at_node(self._tracker, read.node))
        wanted = tuple(one for one in dict.fromkeys(self._weights.components(read.stage)) if one not in there)
        if not wanted:
            return ()
        size = num_bytes(wanted)
        read_id = self._next_id
        end_ns = now_ns + self._weights.load_ns(size, LoadSource.DISK)
        forgets = sources.may_forget(read.node, read.forgets)
        sources.begin_read(read.node, HostRead(wanted, forgets, end_ns))
        self._reads[read_id] = read.node
        self._next_id += 1
        return (ReadComponents(read_id, read.node, read.stage, _digests(wanted), size, _digests(forgets)),)

    def _read(self, event: ComponentsRead) -> None:
        """End a read. Its node's devices count a change, since the policy may now have something to decide there."""
        node = self._reads.pop(event.read_id)
        self._tracker.sources.end_read(node, is_kept=event.is_kept)
        for device in self._tracker.on_node(node):
            device.num_changes += 1

    def _change(
        self, device: Device, stage: Stage, work_id: int, order: DropOrder, beside_bytes: int = 0
    ) -> Sequence[Action]:
        """Return the actions by which a device drops and loads for a stage. It has the components from then on."""
        change = device.memory.used(self._weights.components(stage), order.device, beside_bytes)
        actions = list[Action]()
        if change.drops:
            actions.append(DropComponents(device.device_id, _digests(change.drops)))
            device.leave_out(change.drops)
        if change.loads:
            actions += self._load(device, stage, change.loads, work_id, order)
        self._tracker.set_memory(device.device_id, change.memory)
        return actions

    def _load(
        self, device: Device, stage: Stage, wanted: Sequence[Component], work_id: int, order: DropOrder
    ) -> Sequence[LoadComponents]:
        """Load components, those of one source together. Only a read from the disk makes a host forget others."""
        by_source: dict[LoadSource, list[Component]] = {}
        for component in wanted:
            by_source.setdefault(self._tracker.sources.of(component, device), []).append(component)
        loads: list[LoadComponents] = []
        wait_ns = self._tracker.sources.wait_ns(device, wanted)
        for source, components in by_source.items():
            read = [one for one in components if not self._tracker.sources.is_being_read(device.node, one)]
            if source in HOST_SOURCES:
                self._tracker.sources.use(device.node, read)
            load = PendingLoad(
                load_id=self._next_id,
                work_id=work_id,
                components=tuple(components),
                source=source,
                forgets=self._tracker.sources.may_forget(device.node, order.host) if source is LoadSource.DISK else (),
                left_ns=self._weights.load_ns(num_bytes(components), source) + (0 if loads else wait_ns),
                is_measured=len(read) == len(components),
            )
            loads.append(_action(device, stage, load))
            device.add_load(load)
            self._next_id += 1
        return loads

    def on_report(self, event: ComponentsLoaded | ComponentsRead) -> None:
        """Record that a device has loaded, or that a host has read ahead."""
        if isinstance(event, ComponentsLoaded):
            self._loaded(event)
        else:
            self._read(event)

    def _loaded(self, event: ComponentsLoaded) -> None:
        """Learn from a load that has ended; a load that is no longer known is ignored."""
        device = self._tracker.up.get(event.device_id)
        load = None if device is None else device.end_load(event.load_id)
        if device is None or load is None:
            return
        there = [one for one in load.components if one.digest not in event.dropped]
        is_measured = load.is_measured and not event.dropped
        if is_measured and self._weights.observe(num_bytes(there), load.source, event.run_ns):
            self._tracker.sources.changed()
        self._tracker.sources.use(device.node, there, load.forgets)


def _action(device: Device, stage: Stage, load: PendingLoad) -> LoadComponents:
    return LoadComponents(
        load.load_id,
        device.device_id,
        stage,
        _digests(load.components),
        num_bytes(load.components),
        load.source,
        _digests(load.forgets),
        is_ahead=load.work_id == NO_WORK,
    )


def _digests(components: Sequence[Component]) -> tuple[str, ...]:
    return tuple(component.digest for component in components)
