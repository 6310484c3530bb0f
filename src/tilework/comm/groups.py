"""A worker's groups: how they form, are kept and end."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

from tilework.comm.exchange import ExchangeComm
from tilework.comm.forming import Forming
from tilework.comm.joining import Joining
from tilework.comm.node import NodePart
from tilework.comm.rendezvous import Meeting
from tilework.comm.sockets import SocketComm
from tilework.core.comm import COLLECTIVES, LINK_TIMEOUT_S, SOCKETS, Comm, GroupBroken
from tilework.core.wire.commands import GroupRef
from tilework.core.wire.reports import NodeFormed

_LEAST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 4e-3


class Groups:
    """The groups that the worker of device `device_id` belongs to; `address` is that of the rendezvous.

    `open`, `rest` and `close` belong to one thread; `enter` and `break_off` may be called by any thread at any time. A
    group is kept until `close`: its members must agree on which groups exist, so the runtime decides for all of them.
    If each member evicted groups itself, one would wait at the rendezvous for others that still have the group.

    With sockets, each group connects separately; with other `collectives` it is a part of a node that was entered.
    Nodes form while the worker runs, and there may be several: groups of an old node go on while the next one forms.
    `tell` gets a report when a node is ready or has failed; it has `timeout_s` to form.
    """

    def __init__(
        self,
        device_id: int,
        address: str,
        collectives: str = SOCKETS,
        timeout_s: float = LINK_TIMEOUT_S,
        tell: Callable[[NodeFormed], None] = lambda _report: None,
    ) -> None:
        assert collectives in COLLECTIVES
        self._device_id = device_id
        self._address = address
        self._collectives = collectives
        self._timeout_s = timeout_s
        self._tell = tell
        self._nodes: dict[int, Forming] = {}
        self._comms: dict[int, ExchangeComm] = {}
        self._broken: set[int] = set()
        self._latest: int | None = None  # The group that was opened last, until `rest`.
        self._ended = False
        self._changed = Condition()

    def open(self, ref: GroupRef) -> Comm:
        """Return the group's communicator. A new one is ready when every member has joined, however long that takes.

        Raises GroupBroken, now and on later calls, if the group was broken off, a member is lost while it connects, its
        node could not form, or the rendezvous has closed.
        """
        with self._changed:
            self._latest = ref.group_id
        self._check(ref.group_id)
        if comm := self._comms.get(ref.group_id):
            return comm
        return self._connect(ref) if ref.node_id is None else self._part_of_node(ref, ref.node_id)

    def rest(self) -> None:
        """Note that no group has calls under way until the next `open`."""
        with self._changed:
            self._latest = None

    def close(self, group_id: int) -> None:
        """Forget the group or node, and that it was broken off. Nothing of it may be under way or still to come."""
        with self._changed:
            comm, node = self._comms.pop(group_id, None), self._nodes.pop(group_id, None)
            was_broken = group_id in self._broken
            self._broken.discard(group_id)
        if comm is not None:
            comm.close()
        if node is not None:
            node.break_off()
        if was_broken or node is not None:
            self._meeting(group_id).end()

    def break_off(self, group_id: int) -> None:
        """Make the call of this group that is under way, and all later ones, raise GroupBroken.

        A call that is under way can be ended only with the whole node that the group is a part of.
        """
        with self._changed:
            comm, node = self._comms.get(group_id), self._nodes.get(group_id)
            self._broken.add(group_id)
            is_under_way = self._latest == group_id or not isinstance(comm, NodePart)
            self._changed.notify_all()
        if comm is not None and is_under_way:
            comm.abort()
        if node is not None:
            node.break_off()

    def break_all(self) -> None:
        """Break off every group, including those opened later, because the worker is about to end. From any thread."""
        with self._changed:
            self._ended = True
            comms, nodes = list(self._comms.values()), list(self._nodes.values())
            self._changed.notify_all()
        for comm in comms:
            comm.abort()
        for node in nodes:
            node.break_off()

    def enter(self, node: GroupRef) -> None:
        """Begin to form the communicator of all workers of a node; groups that name the node are parts of it.

        Every worker of the node does this with the same `node`. After the loss of a worker `node` is a new one.
        """
        with self._changed:
            forming = Forming(
                node,
                self._device_id,
                self._meeting(node.group_id),
                self._collectives,
                self._timeout_s,
                self._tell,
            )
            self._nodes[node.group_id] = forming
            is_broken = self._ended or node.group_id in self._broken
        if is_broken:
            forming.break_off()
        else:
            forming.begin()

    def _connect(self, ref: GroupRef) -> Comm:
        rank, size = ref.devices.index(self._device_id), len(ref.devices)
        try:
            with Joining(self._meeting(ref.group_id).path, rank, size) as joining:
                self._wait(ref.group_id, joining.advance)
                comm = self._keep(ref, SocketComm(rank, joining.connections))
            comm.meet(COLLECTIVES[SOCKETS])
            if comm.rank == 0:  # Other members may still look into their store.
                self._meeting(ref.group_id).end()
        except (GroupBroken, FileNotFoundError) as error:
            self.break_off(ref.group_id)
            raise GroupBroken(f"group {ref.group_id} could not form: {error}") from error
        return comm

    def _wait(self, group_id: int, is_done: Callable[[], bool]) -> None:
        """Poll `is_done` until it returns True. Raises GroupBroken if the group is broken off."""
        pause_s = _LEAST_PAUSE_S
        while not is_done():
            with self._changed:
                self._check(group_id)
                self._changed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _part_of_node(self, ref: GroupRef, node_id: int) -> ExchangeComm:
        forming = self._nodes.get(node_id)
        if forming is None:
            raise GroupBroken(f"group {ref.group_id} is part of a node that has ended")
        node = forming.wait(lambda: self._ended or ref.group_id in self._broken)
        ranks = [forming.devices.index(device_id) for device_id in ref.devices]
        return self._keep(ref, NodePart(node, ref.devices.index(self._device_id), ranks))

    def _keep(self, ref: GroupRef, comm: ExchangeComm) -> ExchangeComm:
        """Keep a communicator where `break_off` finds it; abort it if `break_off` came earlier."""
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
