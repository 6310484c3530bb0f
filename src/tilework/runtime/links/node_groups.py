"""The groups of a node's workers, whether they connect by themselves or are parts of one communicator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tilework.comm.rendezvous import Meeting
from tilework.core.wire.commands import BreakGroup, CloseGroup, GroupRef
from tilework.core.wire.reports import NodeFormed
from tilework.core.work import Group
from tilework.runtime.links.communicator import NodeCommunicator, Sent
from tilework.runtime.links.groups import GroupTable


class NodeGroups:
    """Gives groups to the workers of a node, by `send`, and breaks them off. Each connects by itself, until `unite`."""

    def __init__(self, send: Callable[[int, Sent], None]) -> None:
        self._send = send
        self._table = GroupTable()
        self._communicator: NodeCommunicator | None = None

    def unite(
        self,
        up: Group,
        meeting: Callable[[int], Meeting],
        on_changed: Callable[[], None],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
        timeout_s: float,
    ) -> None:
        """Let groups be parts of a communicator of the workers that are up, from now on.
        `on_changed` is called when it has formed or ended.
        """
        self._communicator = NodeCommunicator(self._table, self._send, meeting, on_changed, call_later, timeout_s)
        self._communicator.form(up)

    async def decided(self) -> str:
        """Wait until it is known whether groups can form; returns why they cannot, else an empty text."""
        if self._communicator is None:
            return ""
        await self._communicator.decided()
        return self._communicator.failure

    def alone(self, devices: Iterable[int]) -> Group:
        """Return those of these workers that can run in no group now."""
        if self._communicator is None:
            return ()
        return tuple(one for one in devices if one not in self._communicator.linked)

    @property
    def is_linking(self) -> bool:
        return self._communicator is not None and self._communicator.is_forming

    def use(self, devices: Group) -> GroupRef:
        """Return the group of these workers, for commands that are sent next."""
        node_id = None if self._communicator is None else self._communicator.node_id(devices)
        ref, closed = self._table.use(devices, node_id)
        for old in closed:
            self._send_all(old, CloseGroup(old.group_id))
        return ref

    def break_off(self, ref: GroupRef) -> None:
        """End a group, if it has not been ended before."""
        if self._table.forget(ref):
            self._break(ref)
            if self._communicator is not None:
                self._communicator.break_off(ref)

    def join(self, up: Group) -> None:
        """Form the communicator again, since a worker has joined; these are up."""
        if self._communicator is not None:
            self._communicator.form(up)

    def lose(self, device_id: int, up: Group) -> None:
        """Handle the loss of a worker: end its groups. These remain."""
        for ref in self._table.forget_device(device_id):
            self._break(ref)
        if self._communicator is not None:
            self._communicator.lose(device_id, up)

    def answered(self, device_id: int, report: NodeFormed) -> None:
        if self._communicator is not None:
            self._communicator.answered(device_id, report)

    def stop(self) -> None:
        if self._communicator is not None:
            self._communicator.stop()

    def _break(self, ref: GroupRef) -> None:
        """End the work that runs in the group now, and close the group after the commands that are queued for it."""
        self._send_all(ref, BreakGroup(ref.group_id))
        self._send_all(ref, CloseGroup(ref.group_id))

    def _send_all(self, ref: GroupRef, command: BreakGroup | CloseGroup) -> None:
        for device_id in ref.devices:
            self._send(device_id, command)
