"""Loads of components in reservations: what a promised job must load before its stages, at worst.

Theory of operation. A device may have to drop components for another job, so a reservation counts the loads of all its
stages, each from the slowest source. Two kinds are known not to be needed. First, the components of its next stage, if
all its devices have them: then nothing is loaded if it runs next there. That does not hold on other devices, nor once
another reservation has run on one of them, so its block has a second demand, `Block.unloaded`. Second, those of its
later stages, if its devices have them and have room for all components that there are beside the largest activation:
these never drop any.

Starts change what devices have. `what_if` follows them, and computes the reservations again whose devices drop
something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tilework.core.component import LoadSource, Memory, num_bytes
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.interfaces import Block, CostModel, Demand, DeviceView
from tilework.core.request import Request
from tilework.cost.demand import reserved_at

MOST_LOADED = 64
"""Only the first reservations may count on components that are there."""


_FROM_HOST = frozenset({LoadSource.DISK, LoadSource.HOST})


def load_bound_ns(stage: Stage, costs: CostModel) -> int:
    """How long the components of a stage take to load at most. CPU slots have all components.

    From the slowest source; or a device waits for its host, which has just begun to read them, and loads them then.
    """
    if stage.kind is DeviceKind.CPU:
        return 0
    size, source = num_bytes(costs.components(stage)), costs.quickest_source(_FROM_HOST)
    return costs.load_ns(size) + (0 if source is LoadSource.DISK else costs.load_ns(size, source))


def reserve(
    request: Request, left: Cursor, width: int, memories: Sequence[Memory], costs: CostModel
) -> tuple[Demand, Demand | None]:
    """The remaining work of a job on devices with these memories, and elsewhere if that is more (`Block.unloaded`).

    The first device is that for stages without steps. Raises UnknownCost.
    """
    unloaded = reserved_at(request, left, width, costs, partial(load_bound_ns, costs=costs))
    if not memories:
        return unloaded, None
    is_roomy = all(one.total_bytes is None or one.total_bytes >= costs.most_bytes for one in memories)

    def bound_ns(stage: Stage) -> int:
        used = memories if stage.has_steps else memories[:1]
        is_kept = is_roomy or stage == left.stage
        if is_kept and all(memory.has(costs.components(stage)) for memory in used):
            return 0
        return load_bound_ns(stage, costs)

    loaded = reserved_at(request, left, width, costs, bound_ns)
    return (loaded, None) if loaded == unloaded else (loaded, unloaded)


def in_order(blocks: Sequence[Block]) -> list[Block]:
    """The same reservations, but those that run after another on one of their devices count on nothing there."""
    taken: set[int] = set()
    found: list[Block] = []
    for index, block in enumerate(blocks):
        is_first = index < MOST_LOADED and taken.isdisjoint(block.devices)
        found.append(block if is_first else block.if_unloaded)
        if block.demand.run_ns:
            taken.update(block.devices)
    return found


def moved(block: Block, devices: tuple[int, ...], slot: int | None) -> Block:
    """The reservation on other devices."""
    block = block if devices == block.devices else block.if_unloaded
    return replace(block, devices=devices, slot=slot)


def expected_ns(left: Cursor, devices: Sequence[DeviceView], costs: CostModel) -> int:
    """How long the remaining stages of a job load on the devices that lack the least, one stage after another."""
    total_ns = 0
    for stage, _ in left.pieces:
        if stage.kind is DeviceKind.ACCELERATOR:
            wanted = costs.components(stage)
            lacking = [[one for one in wanted if one not in device.memory.components] for device in devices]
            total_ns += costs.load_ns(min(map(num_bytes, lacking), default=0))
    return total_ns


def too_large(request: Request, devices: Sequence[DeviceView], costs: CostModel) -> tuple[Stage, int] | None:
    """A stage of a request whose components do not fit together onto some device, and how many bytes that has for them;
    None if there is none.
    """
    memories = [Memory(costs.memory_bytes), *(device.memory for device in devices)]  # None may be up.
    for stage, _ in costs.start(request).pieces:
        if stage.kind is DeviceKind.ACCELERATOR:
            wanted = costs.components(stage)
            for memory in memories:
                if not memory.can_hold(wanted):
                    assert memory.total_bytes is not None, "one without a limit holds anything"
                    return stage, memory.total_bytes
    return None
