"""A worker's groups: how they come together, are kept and end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Condition

from torch.distributed import FileStore  # type: ignore[attr-defined]

from tilework.comm.connecting import Connecting
from tilework.comm.exchange import ExchangeComm
from tilework.comm.joining import Joining
from tilework.comm.links import LINKS
from tilework.comm.node import Node, NodePart
from tilework.comm.rendezvous import Meeting
from tilework.comm.sockets import SocketComm
from tilework.core.comm import COLLECTIVES, SOCKETS, Comm, GroupBroken
from tilework.core.wire.commands import GroupRef

_LEAST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 4e-3


class Groups:
    """The groups that the worker of device `device_id` belongs to; `address` is that of the rendezvous.

    `open`, `close` and `enter` belong to one thread; `break_off` may come from any, at any time. A group is kept until
    `close`: its members must agree on which groups exist, so the runtime decides for all of them. If each member
    evicted groups itself, one would wait at the rendezvous for others that still have the group.

    By sockets each group connects separately; by other `collectives` it is a part of the node that was entered last.
    """

    def __init__(self, device_id: int, address: str, collectives: str = SOCKETS) -> None:
        assert collectives in COLLECTIVES
        self._device_id, self._address, self._collectives = device_id, address, collectives
        self._node: GroupRef | None = None
        self._comms: dict[int, ExchangeComm] = {}
        self._broken: set[int] = set()
        self._formed: set[int] = set()
        self._ended = False
        self._changed = Condition()

    def open(self, ref: GroupRef) -> Comm:
        """The group's communicator. A new one is ready when every member has joined, however long that takes.

        Raises GroupBroken, now and on later calls, if the group was broken off, a member is lost while it connects, or
        the rendezvous has closed.
        """
        self._check(ref.group_id)
        if comm := self._comms.get(ref.group_id):
            return comm
        return self._form(ref) if self._connects_each else self._part_of_node(ref)

    def close(self, group_id: int) -> None:
        """Forget the group, also that it was broken off. Nothing of it may be under way, or still to come."""
        with self._changed:
            comm = self._comms.pop(group_id, None)
            was_broken = group_id in self._broken
            self._broken.discard(group_id)
            self._formed.discard(group_id)
        if comm is not None:
            comm.close()
        if was_broken:
            self._meeting(group_id).end()

    def break_off(self, group_id: int, *, unless_formed: bool = False) -> None:
        """Make the call of this group that is under way, and all later ones, raise GroupBroken.

        This breaks the whole node that the group is a part of, if it is one. One whose members have all met is left as
        it is `unless_formed`: what needs no lost member goes on.
        """
        with self._changed:
            if unless_formed and group_id in self._formed:
                return
            self._broken.add(group_id)
            comm = self._comms.get(group_id)
            self._changed.notify_all()
        if comm is not None:
            comm.abort()

    def break_all(self) -> None:
        """Break off every group, also those still to be opened: the worker is to end. From any thread."""
        with self._changed:
            self._ended = True
            comms = list(self._comms.values())
            self._changed.notify_all()
        for comm in comms:
            comm.abort()

    def enter(self, node: GroupRef) -> None:
        """Form the communicator of all workers of the node; the groups opened from now on are its subsets.

        Every worker of the node does this, with the same `node`, before it opens a group, and again with a new one
        when one of them was lost. What runs on the former node is broken off; its groups are parts of the new one when
        they are opened next. Nothing happens where each group connects separately.

        Raises GroupBroken.
        """
        if self._connects_each:
            return
        if self._node is not None:
            self.break_off(self._node.group_id)
            self.close(self._node.group_id)
        with self._changed:
            self._comms.clear()
        self._node = node
        self._form(node)

    @property
    def _connects_each(self) -> bool:
        return self._collectives == SOCKETS

    def _form(self, ref: GroupRef) -> Comm:
        connect = self._connect_sockets if self._connects_each else self._connect_node
        try:
            comm = self._keep(ref, connect(ref))
            comm.meet(COLLECTIVES[self._collectives])
            if comm.rank == 0 and self._connects_each:  # Others may look into their store again.
                self._meeting(ref.group_id).end()
        except (GroupBroken, FileNotFoundError) as error:
            self.break_off(ref.group_id)
            reason = str(error).partition("\n")[0]  # Torch appends its stack.
            raise GroupBroken(f"group {ref.group_id} could not form: {reason}") from error
        with self._changed:
            self._formed.add(ref.group_id)
        return comm

    def _connect_sockets(self, ref: GroupRef) -> SocketComm:
        rank, size = ref.devices.index(self._device_id), len(ref.devices)
        with Joining(self._meeting(ref.group_id).path, rank, size) as joining:
            self._wait(ref.group_id, joining.advance)
            return SocketComm(rank, joining.connections)

    def _connect_node(self, ref: GroupRef) -> ExchangeComm:
        """Connecting has a time limit; waiting until all members are there has none."""
        meeting, rank, size = self._meeting(ref.group_id), ref.devices.index(self._device_id), len(ref.devices)
        meeting.come(self._device_id)
        self._wait(ref.group_id, lambda: all(map(meeting.has_come, ref.devices)))

        def connect() -> ExchangeComm:
            try:
                link = LINKS[self._collectives](FileStore(meeting.store), rank, size, self._device_id)
            except RuntimeError as error:
                raise GroupBroken(f"the node could not connect: {error}") from error
            return NodePart(Node(link), rank, range(size))

        return Connecting(connect, self._changed).wait(partial(self._check, ref.group_id))

    def _wait(self, group_id: int, is_done: Callable[[], bool]) -> None:
        """Look until it is done. Raises GroupBroken if the group is broken off."""
        pause_s = _LEAST_PAUSE_S
        while not is_done():
            with self._changed:
                self._check(group_id)
                self._changed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _part_of_node(self, ref: GroupRef) -> ExchangeComm:
        assert self._node is not None, "enter comes before open"
        self._check(self._node.group_id)
        whole = self._comms[self._node.group_id]  # Or it could not form, and is broken.
        assert isinstance(whole, NodePart)
        ranks = [self._node.devices.index(device_id) for device_id in ref.devices]
        return self._keep(ref, NodePart(whole.node, ref.devices.index(self._device_id), ranks))

    def _keep(self, ref: GroupRef, comm: ExchangeComm) -> ExchangeComm:
        """From here on `break_off` finds it; one that came before is caught up with."""
        with self._changed:
            self._comms[ref.group_id] = comm
        if self._ended or ref.group_id in self._broken:
            comm.abort()
        return comm

    def _check(self, group_id: int) -> None:
        if self._ended or group_id in self._broken:
            raise GroupBroken(f"group {group_id} was broken off")

    def _meeting(self, group_id: int) -> Meeting:
        return Meeting(self._address, group_id)
