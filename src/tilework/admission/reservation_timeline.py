"""Start and end times of reservations on their devices, one after another; `admission.reservations` has the theory."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from tilework.admission.list_schedule import first_slot
from tilework.admission.loads import moved
from tilework.core.block import Block, Demand
from tilework.core.pools import Within
from tilework.core.time import NEVER_NS
from tilework.core.work import Group

DeviceTimes = dict[int, int]
"""A time for each device that is up, also for CPU slots."""
Nodes = Sequence[Sequence[int]]
"""Accelerators of each pool: of each node, where all devices serve the same pipelines."""


class Places(NamedTuple):
    """The devices that may be chosen for a reservation: the accelerators of each pool, and CPU slots."""

    nodes: Nodes
    slots: Sequence[int] = ()

    def without(self, devices: Set[int]) -> Places:
        """Return the places without these devices."""
        if not devices:
            return self
        nodes = ([one for one in node if one not in devices] for node in self.nodes)
        return Places([node for node in nodes if node], [one for one in self.slots if one not in devices])


Chosen = tuple[Group, int | None]
"""A group, the device for stages without steps first, and a CPU slot if one is needed and any is up."""


def choose_group(
    free_ns: DeviceTimes,
    places: Places,
    demand: Demand,
    ready_ns: int,
    spared_ns: DeviceTimes | None = None,
    within: Within = None,
) -> Chosen | None:
    """Return the devices of one node on which a block can begin first, and a CPU slot of any node.

    Of equal nodes, the first is taken. `list_schedule.first_slot` chooses devices and start on a node. A block that is
    wider than all nodes takes all of a widest node. With `spared_ns`, it must leave each of its devices by then. None
    if that is impossible, or if no device `within` is up.
    """
    usable = nodes_within(places.nodes, within)
    if not usable:
        return None
    width = min(demand.width, max(map(len, usable)))
    if demand.is_flat:
        group = _flat_group(free_ns, usable, demand, width, ready_ns, spared_ns)
        return None if group is None else (group, None)
    slots = [] if demand.slot is None else sorted(places.slots)
    best: tuple[int, Chosen] | None = None
    for node in usable:
        if len(node) >= width:
            found = _Search(free_ns, demand, width, spared_ns).on(node, slots, ready_ns)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
    return None if best is None else best[1]


def nodes_within(nodes: Nodes, within: Within) -> Nodes:
    """Return those of these pools that are `within`: all of a pool's devices are, or none."""
    return nodes if within is None else [node for node in nodes if node[0] in within]


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the earliest start of a block that does not take all its devices from start to end."""

    free_ns: DeviceTimes
    demand: Demand
    width: int
    spared_ns: DeviceTimes | None

    def on(self, node: Sequence[int], slots: Sequence[int], ready_ns: int) -> tuple[int, Chosen] | None:
        """Return the start on a node, and the devices: those that become free last before they are needed."""
        free_ns = self.free_ns
        demand = self.demand
        width = self.width
        start_ns = ready_ns
        slot_from, slot_until = demand.slot or (0, 0)
        others = sorted(node, key=free_ns.__getitem__)
        slots = sorted(slots, key=free_ns.__getitem__)
        needs_slot = bool(slots)
        while True:
            others = self._spared(others, start_ns + demand.run_ns - demand.after_ns)
            firsts, slots = self._spared(others, start_ns + demand.run_ns), self._spared(slots, start_ns + slot_until)
            if len(others) < width or not firsts or (needs_slot and not slots):
                return None
            needed_ns = max(start_ns, free_ns[others[width - 1]] - demand.before_ns, free_ns[firsts[0]])
            if slots:
                needed_ns = max(needed_ns, free_ns[slots[0]] - slot_from)
            if needed_ns == start_ns:
                break
            start_ns = needed_ns
        first = self._free_by(firsts, start_ns)[-1]
        free = [one for one in self._free_by(others, start_ns + demand.before_ns) if one != first]
        slot = self._free_by(slots, start_ns + slot_from)[-1] if slots else None
        return start_ns, ((first, *sorted(free[len(free) - width + 1 :])), slot)

    def _spared(self, devices: Sequence[int], until_ns: int) -> list[int]:
        if self.spared_ns is None:
            return list(devices)
        return [one for one in devices if until_ns <= self.spared_ns[one]]

    def _free_by(self, devices: Sequence[int], at_ns: int) -> list[int]:
        return [one for one in devices if self.free_ns[one] <= at_ns]


def _flat_group(
    free_ns: DeviceTimes, nodes: Nodes, demand: Demand, width: int, ready_ns: int, spared_ns: DeviceTimes | None
) -> Group | None:
    best, best_ns = None, NEVER_NS
    for node in nodes:
        usable = sorted(node, key=free_ns.__getitem__)
        while len(usable) >= width:
            start_ns, stop = first_slot([free_ns[device_id] for device_id in usable], width, ready_ns)
            if start_ns >= best_ns:
                break
            end_ns = start_ns + demand.run_ns
            spared = (
                usable if spared_ns is None else [device_id for device_id in usable if end_ns <= spared_ns[device_id]]
            )
            if len(spared) == len(usable):
                best, best_ns = usable[stop - width : stop], start_ns
                break
            usable = spared  # No later start suits a device that must be free again before this end.
    return None if best is None else tuple(sorted(best))


def begin_ns(block: Block, free_ns: DeviceTimes) -> int:
    """Return when a block can begin on its devices: each must be free when the block takes it."""
    return max([block.ready_ns, *(free_ns[device_id] - from_ns for device_id, from_ns, _ in block.windows())])


def placed(block: Block, chosen: Chosen) -> Block:
    """Return the block on these devices."""
    devices, slot = chosen
    return block if (block.devices, block.slot) == chosen else moved(block, devices, slot)


def run_in_order(
    free_ns: DeviceTimes, places: Places, blocks: Sequence[Block], anew: bool = False
) -> tuple[list[Block], list[int]]:
    """Run blocks in order; returns them with their devices, and their ends. `free_ns` is updated.

    Each block runs on its own group; a block without one, and with `anew` every block, on the group that `choose_group`
    finds. It begins when it is ready and each device is free by the time that the block takes it. A block that takes no
    time needs no devices. A block that no device which is up may run gets none. With `anew`, a block relies on
    components of its devices only if it is the first there.
    """
    placed_blocks = []
    ends_ns = []
    taken: set[int] = set()
    for one in blocks:
        block = one
        if anew or not block.devices or _lacks_slot(block, places):
            chosen = choose_group(free_ns, places, block.demand, block.ready_ns, within=block.within)
            assert chosen is not None or block.within is not None, "there is a device"
            block = block if chosen is None else placed(block, chosen)
        if anew:
            block = block if taken.isdisjoint(block.devices) else block.if_unloaded
            taken.update(block.devices)
        run_ns = block.demand.run_ns
        placed_blocks.append(block)
        end_ns = block.ready_ns
        if run_ns and not block.demand.is_flat:
            start_ns = begin_ns(block, free_ns)
            end_ns = start_ns + run_ns
            for device_id, _, until_ns in block.windows():
                free_ns[device_id] = start_ns + until_ns
        elif run_ns:
            group = block.devices
            for device_id in group:
                if free_ns[device_id] > end_ns:  # noqa: PLR1730 (A call takes longer.)
                    end_ns = free_ns[device_id]
            end_ns += run_ns
            for device_id in group:
                free_ns[device_id] = end_ns
        ends_ns.append(end_ns)
    return placed_blocks, ends_ns


def run_in_choices(
    free_ns: DeviceTimes, places: Places, choices: Sequence[Sequence[Block]], dues_ns: Sequence[int]
) -> tuple[list[Block], list[int]]:
    """Run blocks as `run_in_order` does, each as its first choice that ends in time, on a group chosen anew.

    If no choice does, the one that ends first is taken. A block that no device which is up may run keeps its first
    choice.
    """
    found = []
    ends_ns = []
    for blocks, due_ns in zip(choices, dues_ns, strict=True):
        best, best_ns = blocks[0], NEVER_NS
        for one in blocks if best.demand.run_ns else ():
            chosen = choose_group(free_ns, places, one.demand, one.ready_ns, within=one.within)
            if chosen is not None:
                block = placed(one, chosen)
                end_ns = begin_ns(block, free_ns) + block.demand.run_ns
                if end_ns < best_ns:
                    best, best_ns = block, end_ns
                if end_ns <= due_ns:
                    break
        for device_id, _, until_ns in best.windows() if best_ns < NEVER_NS else ():
            free_ns[device_id] = best_ns - best.demand.run_ns + until_ns
        found.append(best)
        ends_ns.append(best_ns if best_ns < NEVER_NS else best.ready_ns)
    return found, ends_ns


def _lacks_slot(block: Block, places: Places) -> bool:
    return block.demand.slot is not None and block.slot is None and bool(places.slots)


def latest_ends(spared_ns: DeviceTimes, blocks: Sequence[Block], dues_ns: Sequence[int]) -> list[int]:
    """Return when each block must have ended on its group, so that it and all later blocks are in time.

    `spared_ns` are the times until which the blocks after all of these can spare each device. They are changed in place
    to those until which these blocks can. The blocks are in time exactly if each device is free by then, and each block
    is ready early enough.
    """
    ends_ns = []
    for block, due_ns in zip(reversed(blocks), reversed(dues_ns), strict=True):
        end_ns = due_ns
        run_ns = block.demand.run_ns
        if run_ns and not block.demand.is_flat:
            end_ns = min([due_ns, *(spared_ns[one] + run_ns - until_ns for one, _, until_ns in block.windows())])
            start_ns = end_ns - run_ns
            for device_id, from_ns, _ in block.windows():
                spared_ns[device_id] = start_ns + from_ns
        elif run_ns:
            for device_id in block.devices:
                if spared_ns[device_id] < end_ns:  # noqa: PLR1730
                    end_ns = spared_ns[device_id]
            start_ns = end_ns - run_ns
            for device_id in block.devices:
                spared_ns[device_id] = start_ns
        ends_ns.append(end_ns)
    ends_ns.reverse()
    return ends_ns
