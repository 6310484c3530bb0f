"""Components: the weights that stages need, identified by their content, and the components that a device holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class LoadSource(StrEnum):
    """Source from which a device loads components: files on disk, the operating system's cache of them, a copy in host
    memory that the device can read directly (pinned), or another device of the node.
    """

    DISK = "disk"
    PAGE_CACHE = "page_cache"
    HOST = "host"
    PEER = "peer"


HOST_SOURCES = frozenset((LoadSource.PAGE_CACHE, LoadSource.HOST))
"""Sources in the memory of the host: they have the components that were read there and not forgotten."""


@dataclass(frozen=True, slots=True, order=True)
class Component:
    """Weights that are loaded as a whole. Two pipelines share them if `digest`, a hash of their content, is the same.

    `num_bytes` is the memory that they take on a device.
    """

    digest: str
    num_bytes: int


ALIGNMENT = 64
"""Alignment of torch's own memory, in bytes. Kernels round differently where tensors begin elsewhere."""


MOST_IN_CELL = 64
"""Largest number of devices that hold the weights of a model together."""


@dataclass(frozen=True, slots=True)
class WeightBlocks:
    """Layout of the `num_bytes` of a component in a cell: blocks of `block_bytes`, and a rest that is in no block.

    Each device has a piece of every block, and all of the `whole_bytes` that are in no block. One block at a time is
    gathered.
    """

    num_bytes: int
    whole_bytes: int
    block_bytes: tuple[int, ...]

    def held_bytes(self, cell_size: int) -> int:
        """Return the bytes that each device of a cell of this size needs: its part, and the largest block."""
        if cell_size == 1:
            return self.num_bytes
        pieces = [piece_bytes(one, cell_size) for one in self.block_bytes]
        return self.whole_bytes + sum(pieces) + cell_size * max(pieces, default=0)


def piece_bytes(block_bytes: int, cell_size: int) -> int:
    """Return the bytes that each device of a cell holds of a block."""
    return -(-block_bytes // (cell_size * ALIGNMENT)) * ALIGNMENT


class DropOrder(NamedTuple):
    """Components to drop first when others need their room: `device` on devices, `host` in the memory of a host.

    All other components are dropped after these, the least recently used first.
    """

    device: tuple[Component, ...] = ()
    host: tuple[Component, ...] = ()


LEAST_RECENTLY_USED = DropOrder()


class Change(NamedTuple):
    """Components that a device must drop and load before a work, and its memory after that."""

    drops: tuple[Component, ...]
    loads: tuple[Component, ...]
    memory: Memory


@dataclass(frozen=True, slots=True)
class Memory:
    """The components on a device, the least recently used first. `total_bytes` is its memory for them; None: no limit.

    The controller keeps it as it will be at the end of the works that a device has.
    """

    total_bytes: int | None = None
    components: tuple[Component, ...] = ()

    @property
    def free_bytes(self) -> int | None:
        """Memory that no component takes; None if there is no limit."""
        return None if self.total_bytes is None else self.total_bytes - num_bytes(self.components)

    def without(self, dropped: Collection[Component]) -> Memory:
        """Return the memory without these components."""
        return Memory(self.total_bytes, tuple(one for one in self.components if one not in dropped))

    def has(self, wanted: Collection[Component]) -> bool:
        """Return whether all of these components are there."""
        return all(component in self.components for component in wanted)

    def has_room(self, wanted: Collection[Component]) -> bool:
        """Return whether the missing components of `wanted` fit beside the present ones."""
        lacking = num_bytes({one for one in wanted if one not in self.components})
        return self.free_bytes is None or lacking <= self.free_bytes

    def can_hold(self, wanted: Collection[Component]) -> bool:
        """Return whether all of these would fit at once if nothing else were there."""
        return self.total_bytes is None or num_bytes(set(wanted)) <= self.total_bytes

    def in_the_way(self, digests: Collection[str], room_bytes: int) -> tuple[Component, ...]:
        """Return the components to drop for a use of this much room that loads those of these digests itself."""
        shared = tuple(one for one in self.components if one.digest in digests)
        return (*shared, *self.without(shared).used((), (), room_bytes).drops)

    def used(self, wanted: Sequence[Component], first: Sequence[Component] = (), beside_bytes: int = 0) -> Change:
        """Return the change after which a work can use these components; they are then the most recently used.

        Other components are dropped until the work has `beside_bytes` of further room, or none is left: first those of
        `first`, in this order, and then the least recently used. `wanted` must fit (`can_hold`).
        """
        loads = tuple(dict.fromkeys(one for one in wanted if one not in self.components))
        others = [one for one in self.components if one not in wanted]
        drops: list[Component] = []
        if self.total_bytes is not None:
            assert self.can_hold(wanted), f"{num_bytes(set(wanted))} bytes do not fit into {self.total_bytes}"
            excess = num_bytes(loads) + num_bytes(self.components) + beside_bytes - self.total_bytes
            named = [one for one in dict.fromkeys(first) if one in others] if excess > 0 else []
            while excess > 0 and others:
                drops.append(named.pop(0) if named else others[0])
                others.remove(drops[-1])
                excess -= drops[-1].num_bytes
        memory = Memory(self.total_bytes, (*others, *dict.fromkeys(wanted)))
        return Change(tuple(drops), loads, memory)

    def with_read(self, components: Iterable[Component], first: Sequence[Component] = ()) -> Memory:
        """Return the memory of a host after these were read: each is the most recently used, unless it can never fit.

        Other components are dropped for it as in `used`.
        """
        memory = self
        for component in components:
            if memory.can_hold((component,)):
                memory = memory.used((component,), first).memory
        return memory


def num_bytes(components: Collection[Component]) -> int:
    """Return the bytes of all these together."""
    return sum(component.num_bytes for component in components)


def bytes_text(number: int) -> str:
    """Return the size as text, as in `700 bytes`, `41.5 MiB`, `12.0 GiB`."""
    if number < 1 << 20:
        return f"{number} bytes"
    return f"{number / 2**20:.1f} MiB" if number < 1 << 30 else f"{number / 2**30:.1f} GiB"
