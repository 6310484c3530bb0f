"""Loads of components in reservations: the most that a promised job must load before its stages.

Theory of operation. A device may have to drop components for another job, so a reservation includes the loads of all
its stages, each from the slowest source. Two kinds of loads are known not to be needed. First, those of the next stage,
if all the reservation's devices have its components: nothing is loaded if the stage runs next there. That does not hold
on other devices, nor once another reservation has run on one of them, so the block has a second demand,
`Block.unloaded`. Second, those of later stages, if the devices have their components, and room for the components of
all stages beside the largest activation: such devices never drop any.

Starts change the components of devices. `what_if` follows them, and computes anew the reservations on devices that drop
some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tilework.core.block import Block, Demand
from tilework.core.component import LoadSource, Memory, num_bytes
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.policy import DeviceView
from tilework.core.request import Request
from tilework.core.weights import WeightCosts
from tilework.cost.demand import reserved_at
from tilework.cost.table_costs import TableCosts

MOST_LOADED = 64
"""Number of first reservations that may rely on components that are there; later ones may not."""


_FROM_HOST = frozenset({LoadSource.DISK, LoadSource.HOST})


def load_bound_ns(stage: Stage, weights: WeightCosts) -> int:
    """Return the longest time that the components of a stage may take to load. CPU slots have all components.

    They come from the slowest source; or a device waits for its host, which has just begun to read them, and then
    loads.
    """
    if stage.kind is DeviceKind.CPU:
        return 0
    size = num_bytes(weights.components(stage))
    source = weights.quickest_source(_FROM_HOST)
    return weights.load_ns(size) + (0 if source is LoadSource.DISK else weights.load_ns(size, source))


def reserve(
    block: Block, request: Request, left: Cursor, width: int, memories: Sequence[Memory] | None, costs: TableCosts
) -> Block:
    """Return the block for a job's remaining work in this width, on the devices that the block has.

    `memories` are those of its devices that are up, in their order; None where no device ever loads anything. A block
    without work for a CPU slot has none. Raises UnknownCost.
    """
    if memories is None:
        demand, unloaded = reserved_at(request, left, width, costs), None
    else:
        demand, unloaded = _with_loads(request, left, width, memories, costs)
    slot = block.slot if demand.slot is not None else None
    # Written out: `replace` takes twice as long.
    return Block(block.due_ns, block.ready_ns, demand, block.devices, slot, unloaded, block.within)


def _with_loads(
    request: Request, left: Cursor, width: int, memories: Sequence[Memory], costs: TableCosts
) -> tuple[Demand, Demand | None]:
    """Return a job's remaining work on devices with these memories, and elsewhere if that is more (`Block.unloaded`).

    The first device is the one for stages without steps. Raises UnknownCost.
    """
    weights = costs.weights
    unloaded = reserved_at(request, left, width, costs, partial(load_bound_ns, weights=weights))
    if not memories:
        return unloaded, None
    is_roomy = all(one.total_bytes is None or one.total_bytes >= weights.most_bytes for one in memories)

    def bound_ns(stage: Stage) -> int:
        used = memories if stage.has_steps else memories[:1]
        is_kept = is_roomy or stage == left.stage
        if is_kept and all(memory.has(weights.components(stage)) for memory in used):
            return 0
        return load_bound_ns(stage, weights)

    loaded = reserved_at(request, left, width, costs, bound_ns)
    return (loaded, None) if loaded == unloaded else (loaded, unloaded)


def in_order(blocks: Sequence[Block]) -> list[Block]:
    """Return the reservations; those that run after another on one of their devices rely on no components there."""
    taken: set[int] = set()
    found: list[Block] = []
    for index, block in enumerate(blocks):
        is_first = index < MOST_LOADED and taken.isdisjoint(block.devices)
        found.append(block if is_first else block.if_unloaded)
        if block.demand.run_ns:
            taken.update(block.devices)
    return found


def moved(block: Block, devices: tuple[int, ...], slot: int | None) -> Block:
    """Return the reservation on other devices."""
    block = block if devices == block.devices else block.if_unloaded
    return replace(block, devices=devices, slot=slot)


def expected_ns(left: Cursor, devices: Sequence[DeviceView], weights: WeightCosts) -> int:
    """Return how long a job's remaining stages load, one after another, on the devices that lack the least."""
    total_ns = 0
    for stage, _ in left.pieces:
        if stage.kind is DeviceKind.ACCELERATOR:
            wanted = weights.components(stage)
            lacking = [[one for one in wanted if one not in device.memory.components] for device in devices]
            total_ns += weights.load_ns(min(map(num_bytes, lacking), default=0))
    return total_ns


def too_large(request: Request, devices: Sequence[DeviceView], costs: TableCosts) -> tuple[Stage, int] | None:
    """Return a stage of a request whose components do not fit together onto some device, and the bytes that this has.
    None if there is no such stage. The bytes are those that the device has for components.
    """
    memories = [Memory(costs.memory_bytes), *(device.memory for device in devices)]  # None of them may be up.
    for stage, _ in costs.start(request).pieces:
        if stage.kind is DeviceKind.ACCELERATOR:
            wanted = costs.weights.components(stage)
            for memory in memories:
                if not memory.can_hold(wanted):
                    assert memory.total_bytes is not None, "one without a limit holds anything"
                    return stage, memory.total_bytes
    return None
