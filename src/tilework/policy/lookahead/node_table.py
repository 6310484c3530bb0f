"""The node of each waiting job and the room of the nodes, kept from plan to plan until devices change.

Where not all devices serve all pipelines, what this package calls a node is a pool (`core.pools`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import islice
from math import ceil, inf

from tilework.core.policy import ClusterView, DeviceView, JobView
from tilework.core.pools import Within, may_run
from tilework.policy.lookahead.arrivals import DueArrivals
from tilework.policy.lookahead.node_jobs import is_idle
from tilework.policy.toolkit.open_devices import DeviceChanges


class NodeTable:
    """The devices by node, and `node_of`: the node that serves each waiting job that a plan looks at.

    `changed` are the nodes where there may be something to decide: works of their devices were committed or have ended,
    or the jobs that wait there have changed. `idle` counts the idle devices of each node that has some.

    `by_host` are the nodes of each host: several where its devices serve different pipelines. `least_bytes` is the
    memory of the smallest device; None: no limit.

    `full` are the nodes that defer jobs: no other job finds room there. `due_arrivals` are those of requests that could
    be on time, by node.

    A node has *room* for what jobs on time do not need: devices that only make a job faster count as room. A job that
    runs on another node and will move here is *expected*, and counts with the devices that it needs.
    """

    def __init__(self, devices: Sequence[DeviceView], *, changed: bool = True) -> None:
        """`changed`: whether there may be something to decide on these devices."""
        self.devices = devices
        self.by_node: dict[int, list[DeviceView]] = {}
        self.by_host: dict[int, list[int]] = {}
        self.node_of: dict[int, int] = {}
        self._device_node: dict[int, int] = {}
        for device in devices:
            self.by_node.setdefault(device.pool, []).append(device)
            self._device_node[device.device_id] = device.pool
        for number, here in self.by_node.items():
            self.by_host.setdefault(here[0].node, []).append(number)
        limits = [device.memory.total_bytes for device in devices if device.memory.total_bytes is not None]
        self.least_bytes = min(limits, default=None)
        self.widest = max(map(len, self.by_node.values()), default=0)
        self.waiting: dict[int, dict[int, JobView]] = {number: {} for number in self.by_node}
        self.changed = set(self.by_node) if changed else set[int]()
        self.idle: dict[int, int] = {}
        self.due_arrivals = {number: DueArrivals() for number in self.by_node}
        self.full: set[int] = set()
        self._wake_ns: dict[int, float] = {}
        self._again_ns: dict[int, int] = {}
        self._expected: dict[int, tuple[int, int]] = {}
        self._room = {number: len(devices) for number, devices in self.by_node.items()}
        self._with_room: list[list[int]] = [[] for _ in range(self.widest + 1)]
        for number, room in sorted(self._room.items()):
            self._with_room[room].append(number)
        self._changes = DeviceChanges()
        self._was_idle: dict[int, int] = {}
        self._free_ns: dict[int, int] = {}
        self._by_load: list[tuple[int, int, int]] = []
        self._changes.among(devices)
        self._count_idle(self.by_node)

    def update(self, waiting: Sequence[JobView], view: ClusterView, now_ns: int) -> list[JobView]:
        """Update the table for a new plan; returns the jobs that no node serves yet, in order."""
        self.changed.update(number for number, wake_ns in self._wake_ns.items() if wake_ns <= now_ns)
        changed = {device.pool for device in self._changes.among(self.devices)}
        self.changed |= changed
        if view.needs_loads and len(self.by_host) < len(self.by_node):
            # The pools of a host depend on each other in what they load and read ahead.
            hosts = {self.by_node[number][0].node for number in self.changed}
            self.changed.update(number for host in hosts for number in self.by_host[host])
        self._free_ns = {}
        self._by_load = []
        self._count_idle(changed)
        for job_id in self.node_of.keys() - {job.job_id for job in waiting}:
            self._remove(job_id)
        self._again_ns = {job_id: at_ns for job_id, at_ns in self._again_ns.items() if at_ns > now_ns}
        for job_id in [job_id for job_id in self._expected if view.job(job_id) is None]:
            self._stop_expecting(job_id)
        return [job for job in waiting if job.job_id not in self.node_of]

    def _count_idle(self, numbers: Iterable[int]) -> None:
        """Count the idle devices of these nodes again; the others have as many as before."""
        for number in numbers:
            self._was_idle[number] = sum(map(is_idle, self.by_node[number]))
            if not self._was_idle[number]:
                del self._was_idle[number]
        self.idle = dict(self._was_idle)

    def set_wake(self, number: int, wake_ns: float) -> None:
        """Count the node as changed from this time on; inf: not before something happens."""
        if wake_ns < inf:
            self._wake_ns[number] = wake_ns
        else:
            self._wake_ns.pop(number, None)

    def set_committed(self, number: int, arrivals_ns: Iterable[int]) -> None:
        """Note that nothing is to be decided on a node: its jobs, which came then, need a device each to their ends."""
        arrivals_ns = list(arrivals_ns)
        self.due_arrivals[number].add(arrivals_ns)
        self.set_need(number, len(arrivals_ns))
        self.set_wake(number, inf)
        self.full.discard(number)
        self.changed.discard(number)

    def wake_ns(self) -> int | None:
        """Return the next time at which a node counts as changed, whatever happens until then; None without one."""
        return ceil(min(self._wake_ns.values())) if self._wake_ns else None

    # The node that serves a job.

    def serves(self, number: int, within: Within) -> bool:
        """Return whether devices of a node may run what only those `within` may; then all of them may."""
        return may_run(within, self.by_node[number][0].device_id)

    def widest_within(self, within: Within) -> int:
        """Return the most devices of a node that may run it."""
        if within is None:
            return self.widest
        widths = [len(devices) for number, devices in self.by_node.items() if self.serves(number, within)]
        return max(widths, default=1)

    def assign(self, job: JobView, number: int) -> None:
        """Let a job wait at this node."""
        if self.node_of.get(job.job_id) != number:
            self._remove(job.job_id)
            self.node_of[job.job_id] = number
            load = self._load(number)
            self.waiting[number][job.job_id] = job
            self._load_changed(number, load)
            self.changed.add(number)

    def _remove(self, job_id: int) -> None:
        number = self.node_of.pop(job_id, None)
        if number is not None:
            load = self._load(number)
            del self.waiting[number][job_id]
            self._load_changed(number, load)
            self.changed.add(number)

    def expect(self, job: JobView, number: int, width: int) -> None:
        """Expect a job that runs on another node, as soon as it has stopped there."""
        self._stop_expecting(job.job_id)
        self._expected[job.job_id] = number, width
        self.take_room(number, width)

    def returning(self, job: JobView) -> int | None:
        """Return the node of a job that has begun and waits: where it is expected, else where it was; None if new."""
        number = self._stop_expecting(job.job_id)
        return self.node_with(job) if number is None else number

    def node_with(self, job: JobView) -> int | None:
        """Return the node that has the state of a job; None if none has."""
        return self._device_node.get(job.last_devices[0]) if job.last_devices else None

    def may_try(self, job: JobView, now_ns: int) -> bool:
        """Return whether to look for another node for a job now, after `try_again`."""
        return self._again_ns.get(job.job_id, 0) <= now_ns

    def try_again(self, job: JobView, at_ns: int) -> None:
        """Set when it is worth while to look again for another node for a job; nothing was found now."""
        self._again_ns[job.job_id] = at_ns

    def _stop_expecting(self, job_id: int) -> int | None:
        if job_id not in self._expected:
            return None
        number, width = self._expected.pop(job_id)
        self.take_room(number, -width)
        return number

    # Idle devices.

    def take_idle(self, number: int | None, width: int, within: Within = None) -> int | None:
        """Take `width` idle devices of this node, or else of the one with the fewest that suffice; returns the node.

        Another one must be `within`.
        """
        if number is None or self.idle.get(number, 0) < width:
            enough = (one for one, idle in self.idle.items() if idle >= width and self.serves(one, within))
            number = min(enough, key=self._tightness, default=None)
        if number is not None:
            self.idle[number] -= width
            if not self.idle[number]:
                del self.idle[number]
        return number

    def only_there(self, number: int, within: Within) -> bool:
        """Return whether a node may run it, and no other one that had idle devices at the start of this plan may."""
        others = (one for one in self._was_idle if one != number)
        return self.serves(number, within) and not any(self.serves(one, within) for one in others)

    def _tightness(self, number: int) -> tuple[int, int]:
        return self.idle[number], number

    def least_loaded(self, most: int, within: Within = None) -> list[int]:
        """Return the nodes `within` with the fewest waiting jobs; among equals those whose devices are free first."""
        if not self._by_load:
            self._free_ns = {
                number: sum([device.free_ns for device in devices]) for number, devices in self.by_node.items()
            }
            self._by_load = sorted(map(self._load, self.by_node))
        return list(islice((number for _, _, number in self._by_load if self.serves(number, within)), most))

    def _load(self, number: int) -> tuple[int, int, int]:
        """Return the place of a node by load; the times at which devices are free stay until the next plan."""
        return len(self.waiting[number]), self._free_ns.get(number, 0), number

    def _load_changed(self, number: int, before: tuple[int, int, int]) -> None:
        if self._by_load:
            del self._by_load[bisect_left(self._by_load, before)]
            insort(self._by_load, self._load(number))

    # Room.

    def set_need(self, number: int, need: int) -> None:
        """Set how many devices of a node are needed by the jobs that it serves."""
        expected = sum(width for target, width in self._expected.values() if target == number)
        self._set_room(number, len(self.by_node[number]) - need - expected)

    def take_room(self, number: int, width: int) -> None:
        self._set_room(number, self._room[number] - width)

    def _set_room(self, number: int, room: int) -> None:
        before, after = self._with_room[max(0, self._room[number])], self._with_room[max(0, room)]
        self._room[number] = room
        if before is not after:
            del before[bisect_left(before, number)]
            insort(after, number)

    def with_room(self, width: int, most: int, within: Within = None) -> list[int]:
        """Return nodes `within` with room for `width` devices, the least room first: others stay whole for wide jobs.

        Before them comes a node that is whole, if another one is: at low load a job need not share a node.
        """
        rooms = self._with_room
        if within is not None:
            rooms = [[number for number in numbers if self.serves(number, within)] for numbers in rooms]
        whole = rooms[self.widest]
        found = whole[:1] if len(whole) > 1 else []
        for numbers in rooms[width:]:
            found += numbers[: most - len(found)]
        return found
