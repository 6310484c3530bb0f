"""Components: the weights that stages need, by their content, and what a device holds of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class LoadSource(StrEnum):
    """From where a device loads components: files on disk, the operating system's cache of them, a copy in the memory
    of the host that the device can read directly (pinned), or another device of the node.
    """

    DISK = "disk"
    PAGE_CACHE = "page_cache"
    HOST = "host"
    PEER = "peer"


HOST_SOURCES = frozenset((LoadSource.PAGE_CACHE, LoadSource.HOST))
"""The sources that are memory of the host: they have what was read there and is not forgotten yet."""


@dataclass(frozen=True, slots=True, order=True)
class Component:
    """Weights that are loaded as a whole. Two pipelines share them if `digest`, a hash of their content, is the same.

    `num_bytes` is the memory that they take on a device.
    """

    digest: str
    num_bytes: int


ALIGNMENT = 64
"""Of torch's own memory, in bytes. Kernels round differently where tensors begin elsewhere."""


MOST_IN_CELL = 64
"""The most devices that have the weights of a model together."""


@dataclass(frozen=True, slots=True)
class WeightBlocks:
    """How the `num_bytes` of a component are divided in a cell: in blocks of `block_bytes`, and what is in none.

    Each device has a piece of every block, and all of the `whole_bytes` that are in none. One block at a time is
    gathered.
    """

    num_bytes: int
    whole_bytes: int
    block_bytes: tuple[int, ...]

    def held_bytes(self, cell_size: int) -> int:
        """What each device of a cell of this size needs for the component: its part, and the largest block."""
        if cell_size == 1:
            return self.num_bytes
        pieces = [piece_bytes(one, cell_size) for one in self.block_bytes]
        return self.whole_bytes + sum(pieces) + cell_size * max(pieces, default=0)


def piece_bytes(block_bytes: int, cell_size: int) -> int:
    """What each device of a cell has of a block."""
    return -(-block_bytes // (cell_size * ALIGNMENT)) * ALIGNMENT


class DropOrder(NamedTuple):
    """Which components go first where others need their room: `device` on devices, `host` in the memory of a host.

    All others go after these, the least recently used first.
    """

    device: tuple[Component, ...] = ()
    host: tuple[Component, ...] = ()


LEAST_RECENTLY_USED = DropOrder()


class Change(NamedTuple):
    """What a device must do before a work: drop and load components; and its memory after that."""

    drops: tuple[Component, ...]
    loads: tuple[Component, ...]
    memory: Memory


@dataclass(frozen=True, slots=True)
class Memory:
    """The components on a device, the least recently used first. `total_bytes` is its memory for them; None: no limit.

    The controller keeps it as of the end of the works that a device has.
    """

    total_bytes: int | None = None
    components: tuple[Component, ...] = ()

    @property
    def free_bytes(self) -> int | None:
        """The memory that no component takes; None if there is no limit."""
        return None if self.total_bytes is None else self.total_bytes - num_bytes(self.components)

    def without(self, dropped: Collection[Component]) -> Memory:
        """The memory when these are dropped."""
        return Memory(self.total_bytes, tuple(one for one in self.components if one not in dropped))

    def has(self, wanted: Collection[Component]) -> bool:
        """Whether all of these are there."""
        return all(component in self.components for component in wanted)

    def has_room(self, wanted: Collection[Component]) -> bool:
        """Whether what is lacking of `wanted` fits beside all that is here."""
        lacking = num_bytes({one for one in wanted if one not in self.components})
        return self.free_bytes is None or lacking <= self.free_bytes

    def can_hold(self, wanted: Collection[Component]) -> bool:
        """Whether there is memory for all of these at once, if nothing else were there."""
        return self.total_bytes is None or num_bytes(set(wanted)) <= self.total_bytes

    def in_the_way(self, digests: Collection[str], room_bytes: int) -> tuple[Component, ...]:
        """What must be dropped for something that needs this room, and loads and drops components of these digests."""
        shared = tuple(one for one in self.components if one.digest in digests)
        return (*shared, *self.without(shared).used((), (), room_bytes).drops)

    def used(self, wanted: Sequence[Component], first: Sequence[Component] = (), beside_bytes: int = 0) -> Change:
        """What must be done so that a work can use these components; they are the most recently used then.

        Of the others as many are dropped as there must be for the work to have `beside_bytes` more, or all: those of
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
        """The memory of a host after these were read: each is the most recently used then, unless it can never fit.

        Others are dropped for it as in `used`.
        """
        memory = self
        for component in components:
            if memory.can_hold((component,)):
                memory = memory.used((component,), first).memory
        return memory


def num_bytes(components: Collection[Component]) -> int:
    """The bytes of all these together."""
    return sum(component.num_bytes for component in components)


def bytes_text(number: int) -> str:
    """`700 bytes`, `41.5 MiB`, `12.0 GiB`."""
    if number < 1 << 20:
        return f"{number} bytes"
    return f"{number / 2**20:.1f} MiB" if number < 1 << 30 else f"{number / 2**30:.1f} GiB"
