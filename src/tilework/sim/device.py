"""The state of one simulated device: its queue, its run, and the states of jobs that it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tilework.core.actions import DropComponents, LoadComponents
from tilework.core.component import HOST_SOURCES, Component, Memory, num_bytes
from tilework.core.work import Work
from tilework.sim.runs import LoadRun, OpenLoad, Run, State

Command = Work | LoadComponents | DropComponents
"""Activities of a device, one after another."""


@dataclass(slots=True, kw_only=True, eq=False)
class StateTransfer:
    """A job's state on its way to a device. `sent_ns` is None until the sender has the state.

    `state` is None if the transfer brings nothing; `lost` if it should have brought a state that a fault has lost.
    """

    job_id: int
    move_ns: int
    sent_ns: int | None = None
    state: State | None = None
    lost: bool = False

    def send(self, state: State | None, now_ns: int, lost: bool = False) -> None:
        self.sent_ns = now_ns
        self.state = state
        self.lost = lost


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """One device.

    `memory` is what it has loaded, and `loads` what it was told to load, in order, of which it may be doing one
    (`load`) while it has no `run`. `transfers`, by job, arrived ahead of a work that is not in the queue yet;
    `awaited`, by work, belong to a work that is. `drops` are the jobs whose states the device drops at the end of a
    work, by work.
    """

    queue: deque[Command] = field(default_factory=deque)
    run: Run | None = None
    load: LoadRun | None = None
    loads: list[OpenLoad] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    hangs: bool = False
    states: dict[int, State] = field(default_factory=dict)
    transfers: dict[int, list[StateTransfer]] = field(default_factory=dict)
    awaited: dict[int, list[StateTransfer]] = field(default_factory=dict)
    drops: dict[int, list[int]] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        """True if the device cannot begin anything now."""
        return self.run is not None or self.hangs

    @property
    def free_bytes(self) -> int | None:
        """The memory that is left when all its loads have ended; None if there is no limit."""
        free_bytes = self.memory.free_bytes
        return None if free_bytes is None else free_bytes - sum(num_bytes(one.left) for one in self.loads)

    def has(self, wanted: Collection[Component], *, or_loads: bool) -> bool:
        """Return whether these components are there, or are being loaded if that is enough."""
        there = [one for load in self.loads for one in load.left] if or_loads else []
        return all(one in self.memory.components or one in there for one in wanted)


class Hosts:
    """Memory of the hosts of all nodes: components that their devices have read.

    Each keeps `host_bytes` (None: all), and forgets what a load names and then the least recently used. It outlives its
    devices' processes. `reading` is what the host of a node is reading ahead of need, until when.
    """

    def __init__(
        self, node_of: Callable[[int], int], host_bytes: int | None = None, read: Iterable[Component] = ()
    ) -> None:
        """`node_of` returns the node of a device; each host has read `read` before."""
        self._node_of = node_of
        self._empty = Memory(host_bytes).with_read(read)
        self._memories: dict[int, Memory] = {}
        self.reading: dict[int, tuple[frozenset[str], int]] = {}

    def ready_ns(self, load: LoadComponents) -> int:
        """Return when the host of a load's device has read what it is reading of the load's components; 0: now."""
        digests, end_ns = self.reading.get(self._node_of(load.device_id), (frozenset(), 0))
        return 0 if digests.isdisjoint(load.components) else end_ns

    def read(self, device_id: int, components: Iterable[Component], forgets: Sequence[str] = ()) -> None:
        """Note that a device has read these components, or is told to load them from its host's memory.

        The host forgets `forgets` first, if it must.
        """
        self.keep(self._node_of(device_id), components, forgets)

    def keep(self, node: int, components: Iterable[Component], forgets: Sequence[str] = ()) -> None:
        """Note that the host of a node has these components in memory now; forget `forgets` first, if it must."""
        memory = self._memories.get(node, self._empty)
        first = _named(forgets, memory)
        self._memories[node] = memory.with_read(components, first)

    def has(self, load: LoadComponents) -> bool:
        """Return whether the host of a load's device has all its components in memory, or is reading what it lacks."""
        reading, _ = self.reading.get(self._node_of(load.device_id), (frozenset[str](), 0))
        there = {component.digest for component in self._of(load)}
        return all(digest in there or digest in reading for digest in load.components)

    def use(self, load: LoadComponents) -> None:
        """Make the components of a load from a host's memory the most recently used there."""
        if load.source in HOST_SOURCES:
            self.read(load.device_id, self._of(load))

    def _of(self, load: LoadComponents) -> Sequence[Component]:
        """Return the components of a load that its device's host has, in the order of the load."""
        return _named(load.components, self._memories.get(self._node_of(load.device_id), self._empty))


def _named(digests: Iterable[str], memory: Memory) -> list[Component]:
    """Return the components of a memory that have these digests, in this order."""
    by_digest = {component.digest: component for component in memory.components} if digests else {}
    return [by_digest[digest] for digest in digests if digest in by_digest]
