"""Start and end times of reservations on their devices, one after another; `admission.reservations` has the theory."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.admission.list_schedule import first_slot
from tilework.core.interfaces import Block, Demand
from tilework.core.time import NEVER_NS
from tilework.core.work import Group

DeviceTimes = dict[int, int]
"""A time for each device that is up."""
Nodes = Sequence[Sequence[int]]
"""The devices of each node."""


def choose_group(
    free_ns: DeviceTimes, nodes: Nodes, demand: Demand, ready_ns: int, spared_ns: DeviceTimes | None = None
) -> Group | None:
    """The devices of one node on which a block can begin first; of equal nodes, the first.

    `list_schedule.first_slot` chooses devices and start on a node. A block that is wider than all nodes takes all of a
    widest node. With `spared_ns`, it must end by then on each of its devices; None if that is impossible.
    """
    best, best_ns = None, NEVER_NS
    width = min(demand.width, max(map(len, nodes)))
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


def run_in_order(
    free_ns: DeviceTimes, nodes: Nodes, blocks: Sequence[Block], anew: bool = False
) -> tuple[list[Group], list[int]]:
    """Let blocks run in order; returns the group and the end of each, and leaves in `free_ns` when devices are free.

    Each runs on its own group; a block without one, and with `anew` every block, on the group that `choose_group`
    finds. It begins when all its devices are free and it is ready. A block that takes no time needs no devices.
    """
    groups, ends_ns = [], []
    for block in blocks:
        group, run_ns = block.devices, block.demand.run_ns
        if anew or not group:
            group = choose_group(free_ns, nodes, block.demand, block.ready_ns) or ()
            assert group, "there is a device"
        groups.append(group)
        end_ns = block.ready_ns
        if run_ns:
            for device_id in group:
                if free_ns[device_id] > end_ns:  # noqa: PLR1730 (A call takes longer.)
                    end_ns = free_ns[device_id]
            end_ns += run_ns
            for device_id in group:
                free_ns[device_id] = end_ns
        ends_ns.append(end_ns)
    return groups, ends_ns


def latest_ends(spared_ns: DeviceTimes, blocks: Sequence[Block], dues_ns: Sequence[int]) -> list[int]:
    """When each block must have ended on its group, so that it and all later blocks are in time.

    `spared_ns` is until when the blocks after all of these can spare each device. It is changed in place to until when
    these blocks can. They are in time exactly if each device is free by then, and each block is ready early enough.
    """
    ends_ns = []
    for block, due_ns in zip(reversed(blocks), reversed(dues_ns), strict=True):
        end_ns, run_ns = due_ns, block.demand.run_ns
        if run_ns:
            for device_id in block.devices:
                if spared_ns[device_id] < end_ns:  # noqa: PLR1730
                    end_ns = spared_ns[device_id]
            start_ns = end_ns - run_ns
            for device_id in block.devices:
                spared_ns[device_id] = start_ns
        ends_ns.append(end_ns)
    ends_ns.reverse()
    return ends_ns
