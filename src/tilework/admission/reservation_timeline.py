"""The devices on which promised jobs are to run, one after another; `admission.reservations` has the theory."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.core.interfaces import Block, Demand
from tilework.core.work import Group

Times = dict[int, int]
"""A time for each device that is up."""
Nodes = Sequence[Sequence[int]]
"""The devices of each node."""
NEVER = 1 << 62


def choose(levels: Times, nodes: Nodes, demand: Demand, ready_ns: int, latest_ns: Times | None = None) -> Group | None:
    """The devices of one node on which a block can begin first, if they are free as `levels` says.

    One that is wider than all nodes takes all of the widest one. Of the devices that are free by its beginning it takes
    those that became free last, so that the others are left to whoever comes next. With `latest_ns`, it must be over by
    then on each of its devices; None if that cannot be.
    """
    best, best_ns, run_ns = None, NEVER, demand.run_ns
    width = min(demand.width, max(map(len, nodes)))
    for node in nodes:
        usable = (
            node
            if latest_ns is None
            else [device_id for device_id in node if levels[device_id] + run_ns <= latest_ns[device_id]]
        )
        by_time = sorted(usable, key=levels.__getitem__)
        for device_id in by_time[width - 1 :]:
            start_ns = max(levels[device_id], ready_ns)
            if start_ns >= best_ns:
                break
            end_ns = start_ns + run_ns
            free = [
                one for one in by_time if levels[one] <= start_ns and (latest_ns is None or end_ns <= latest_ns[one])
            ]
            if len(free) >= width:
                best, best_ns = free[-width:], start_ns
                break
    return None if best is None else tuple(sorted(best))


def follow(levels: Times, nodes: Nodes, blocks: Sequence[Block], anew: bool = False) -> tuple[list[Group], list[int]]:
    """Let blocks run in order; returns the devices and the end of each, and leaves in `levels` when devices are free.

    Each goes to its home; to those that `choose` takes if it has none, or with `anew`. It begins when all of them are
    free and it is ready. One that takes no time, since nothing is left of it, needs no devices.
    """
    homes, ends_ns = [], []
    for block in blocks:
        home, run_ns = block.devices, block.demand.run_ns
        if anew or not home:
            home = choose(levels, nodes, block.demand, block.ready_ns) or ()
            assert home, "there is a device"
        homes.append(home)
        end_ns = block.ready_ns
        if run_ns:
            for device_id in home:
                if levels[device_id] > end_ns:  # noqa: PLR1730 (A call takes longer.)
                    end_ns = levels[device_id]
            end_ns += run_ns
            for device_id in home:
                levels[device_id] = end_ns
        ends_ns.append(end_ns)
    return homes, ends_ns


def latest_ends(latest_ns: Times, blocks: Sequence[Block], dues_ns: Sequence[int]) -> list[int]:
    """When each block must have ended at its home, so that it and all behind it are in time.

    `latest_ns` says until when those behind all of these can spare each device, and is turned into until when these
    can. So they are in time exactly if each device is free by then, and each block ready early enough.
    """
    ends_ns = []
    for block, due_ns in zip(reversed(blocks), reversed(dues_ns), strict=True):
        end_ns, run_ns = due_ns, block.demand.run_ns
        if run_ns:
            for device_id in block.devices:
                if latest_ns[device_id] < end_ns:  # noqa: PLR1730
                    end_ns = latest_ns[device_id]
            start_ns = end_ns - run_ns
            for device_id in block.devices:
                latest_ns[device_id] = start_ns
        ends_ns.append(end_ns)
    ends_ns.reverse()
    return ends_ns
