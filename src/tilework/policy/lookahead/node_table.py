"""Who waits at which node, and what room the nodes have: kept from plan to plan, as long as no device comes or goes."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from tilework.core.interfaces import ClusterView, DeviceView, JobView


class Nodes:
    """The devices by node, and the home of every job that is looked at: the node that serves it.

    `stirred` are the nodes where there may be something to decide: their devices have been told something or have ended
    something, or others wait there than before. `idle` are the numbers of idle devices, where there are any.

    A node has *room* for what those on time do not need: devices that only make somebody quicker count for it. A job
    that is running elsewhere, and is to come, is expected, and counts for what it needs.
    """

    def __init__(self, devices: Sequence[DeviceView]) -> None:
        self.devices = devices
        self.by_node: dict[int, list[DeviceView]] = {}
        self.number_of: dict[int, int] = {}
        for device in devices:
            self.by_node.setdefault(device.node, []).append(device)
            self.number_of[device.device_id] = device.node
        self.widest = max(map(len, self.by_node.values()), default=0)
        self.homes: dict[int, int] = {}
        self.waiting: dict[int, dict[int, JobView]] = {number: {} for number in self.by_node}
        self.stirred = set(self.by_node)
        self.idle: dict[int, int] = {}
        self._expected: dict[int, tuple[int, int]] = {}
        self._room = {number: len(devices) for number, devices in self.by_node.items()}
        self._with_room: list[set[int]] = [set() for _ in range(self.widest + 1)]
        for number, room in self._room.items():
            self._with_room[room].add(number)
        self._changes: list[int] = []
        self._was_idle: dict[int, int] = {}

    def look(self, waiting: Sequence[JobView], view: ClusterView) -> list[JobView]:
        """Notice what has changed since the last plan. Returns those who have no home yet, in order."""
        changes = [device.num_changes for device in self.devices]
        if changes != self._changes:
            before = self._changes or [-1] * len(changes)
            pairs = zip(self.devices, before, changes, strict=True)
            self.stirred.update(device.node for device, old, new in pairs if old != new)
            self._changes = changes
        self.idle = {}
        for device in self.devices:
            if not device.works:
                self.idle[device.node] = self.idle.get(device.node, 0) + 1
        self._was_idle = dict(self.idle)
        for job_id in self.homes.keys() - {job.job_id for job in waiting}:
            self._leave(job_id)
        for job_id in [job_id for job_id in self._expected if view.job(job_id) is None]:
            self._arrive(job_id)
        return [job for job in waiting if job.job_id not in self.homes]

    # Homes.

    def settle(self, job: JobView, number: int) -> None:
        """Let a job wait at this node."""
        if self.homes.get(job.job_id) != number:
            self._leave(job.job_id)
            self.homes[job.job_id] = number
            self.waiting[number][job.job_id] = job
            self.stirred.add(number)

    def _leave(self, job_id: int) -> None:
        number = self.homes.pop(job_id, None)
        if number is not None:
            del self.waiting[number][job_id]
            self.stirred.add(number)

    def expect(self, job: JobView, number: int, width: int) -> None:
        """A job that runs elsewhere is to come here as soon as it has stopped."""
        self._arrive(job.job_id)
        self._expected[job.job_id] = number, width
        self.take_room(number, width)

    def welcome(self, job: JobView) -> int | None:
        """The node of a job that has begun and waits: where it is expected, or else where it was last."""
        number = self._arrive(job.job_id)
        if number is None and job.last_devices:
            number = self.number_of.get(job.last_devices[0])
        return number

    def _arrive(self, job_id: int) -> int | None:
        if job_id not in self._expected:
            return None
        number, width = self._expected.pop(job_id)
        self.take_room(number, -width)
        return number

    # Idle devices.

    def take_idle(self, home: int | None, width: int) -> int | None:
        """Count on so many idle devices, at home or else on the node with the fewest that are enough; returns it."""
        number = home
        if number is None or self.idle.get(number, 0) < width:
            number = min(
                (number for number, idle in self.idle.items() if idle >= width), key=self._tightness, default=None
            )
        if number is not None:
            self.idle[number] -= width
            if not self.idle[number]:
                del self.idle[number]
        return number

    def is_idle_beside(self, number: int) -> bool:
        """Whether other nodes had idle devices when this plan was begun."""
        return len(self._was_idle) > (number in self._was_idle)

    def _tightness(self, number: int) -> tuple[int, int]:
        return self.idle[number], number

    def least_loaded(self, most: int) -> list[int]:
        """The nodes in which fewest wait; of these, those whose devices are free first."""
        return nsmallest(
            most, self.by_node, key=lambda number: (len(self.waiting[number]), self._free_ns(number), number)
        )

    def _free_ns(self, number: int) -> int:
        return sum(device.free_ns for device in self.by_node[number])

    # Room.

    def set_need(self, number: int, need: int) -> None:
        """So many devices of a node are needed by those whom it serves."""
        expected = sum(width for target, width in self._expected.values() if target == number)
        self._set_room(number, len(self.by_node[number]) - need - expected)

    def take_room(self, number: int, width: int) -> None:
        self._set_room(number, self._room[number] - width)

    def _set_room(self, number: int, room: int) -> None:
        self._with_room[max(0, self._room[number])].discard(number)
        self._room[number] = room
        self._with_room[max(0, room)].add(number)

    def roomy(self, width: int, most: int) -> list[int]:
        """Nodes with room for so many devices, those with the least first, so that others stay whole for wide ones."""
        found: list[int] = []
        for numbers in self._with_room[width:]:
            found += nsmallest(most - len(found), numbers)
        return found
