"""Forming of a node's communicator, on its own thread, while the worker runs works."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from threading import Condition, Thread, Timer

from torch.distributed import FileStore  # type: ignore[attr-defined]

from tilework.comm.links import LINKS
from tilework.comm.node import Node, NodePart
from tilework.comm.rendezvous import Meeting
from tilework.core.comm import COLLECTIVES, GroupBroken
from tilework.core.wire.commands import GroupRef
from tilework.core.wire.reports import NodeFormed
from tilework.core.work import Group

_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 4e-3
_TRY = {
    "nccl": "; if it stays so, try NCCL_P2P_DISABLE=1 (wrong IOMMU or ACS settings), a larger /dev/shm "
    "(docker run --shm-size=1g or --ipc=host), and NCCL_DEBUG=WARN, which says more"
}


class Forming:
    """The communicator of the workers of `node`, as it forms; `tell` gets a report when it is ready or has failed.

    It has `timeout_s` to form.

    One other thread may call `wait`. Any thread may call `break_off` at any time. Neither connecting nor a first
    message can be interrupted, so the forming thread is abandoned; it closes what it makes if it ever ends.
    """

    def __init__(
        self,
        node: GroupRef,
        device_id: int,
        meeting: Meeting,
        collectives: str,
        timeout_s: float,
        tell: Callable[[NodeFormed], None],
    ) -> None:
        self._ref = node
        self._device_id = device_id
        self._meeting = meeting
        self._collectives = collectives
        self._tell = tell
        self._changed = Condition()
        self._node: Node | None = None  # Its link has connected.
        self._stands = False
        self._failure = ""
        self._doing = "the workers have not come together"
        self._timeout_s = timeout_s
        self._limit: Timer | None = None

    def begin(self) -> None:
        self._limit = Timer(self._timeout_s, self._give_up)
        self._limit.daemon = True
        self._limit.start()
        Thread(target=self._run, name="node", daemon=True).start()

    @property
    def devices(self) -> Group:
        return self._ref.devices

    def wait(self, is_given_up: Callable[[], bool]) -> Node:
        """Return the node's communicator once it is ready. Raises GroupBroken if it fails or the caller gives up."""
        with self._changed:
            while not self._stands:
                if self._failure or is_given_up():
                    raise GroupBroken(self._failure or "the group was broken off")
                self._changed.wait(_LONGEST_PAUSE_S)
            assert self._node is not None
            return self._node

    def break_off(self) -> None:
        """End the communicator, even if it is ready."""
        self._end("the node was broken off")

    def _give_up(self) -> None:
        if not self._stands:
            self._fail(f"{self._doing} within {self._timeout_s:g} s")

    def _fail(self, why: str) -> None:
        reason = f"{why}{_TRY.get(self._collectives, '')}"
        if self._end(reason):
            self._tell(NodeFormed(self._ref.group_id, 0, reason))

    def _end(self, reason: str) -> bool:
        """Return whether it had not ended before."""
        with self._changed:
            is_first = not self._failure
            self._failure = self._failure or reason
            node = self._node
            self._changed.notify_all()
        self._cancel_limit()
        if node is not None:
            node.abort()
        return is_first

    def _cancel_limit(self) -> None:
        """Cancel the timer, which would keep alive this object and its connections."""
        limit, self._limit = self._limit, None
        if limit is not None:
            limit.cancel()

    def _run(self) -> None:
        begin_ns = time.monotonic_ns()
        try:
            self._await_all()
            self._connect()
        except Exception as error:  # A back end may raise anything, and the other threads wait for the reason.
            self._fail(f"{self._doing}: {_said(error)}")
            return
        with self._changed:
            self._stands = not self._failure
            self._changed.notify_all()
        self._cancel_limit()
        if self._stands:
            self._tell(NodeFormed(self._ref.group_id, time.monotonic_ns() - begin_ns))

    def _await_all(self) -> None:
        self._meeting.come(self._device_id)
        pause_s = _LEAST_PAUSE_S
        missing = list(self._ref.devices)
        while missing := [one for one in missing if not self._meeting.has_come(one)]:
            self._doing = f"worker{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not come"
            with self._changed:
                if self._failure:
                    raise GroupBroken(self._failure)
                self._changed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _connect(self) -> None:
        self._doing = "the workers could not connect"
        devices = self._ref.devices
        kind = COLLECTIVES[self._collectives]
        rank, size = devices.index(self._device_id), len(devices)
        store = FileStore(self._meeting.store)
        store.set_timeout(timedelta(seconds=self._timeout_s))
        link = LINKS[self._collectives](store, rank, size, self._device_id)
        node = Node(link, rank)
        with self._changed:
            self._node = node
            is_left = bool(self._failure)
        if is_left:
            node.abort()
            return
        self._doing = "the workers have connected, but their first messages did not arrive"
        NodePart(node, rank, range(size)).meet(kind)
        node.split(devices, kind)


def _said(error: Exception) -> str:
    """Return an error's text without the stack that torch appends, but with what NCCL says of it."""
    first, _, others = str(error).partition("\n")
    last = others.partition("Last error:")[2].strip().partition("\n")[0]
    return f"{first} ({last})" if last else first
