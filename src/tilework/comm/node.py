"""All workers of a node on one communicator, on which any subset of them can talk."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from tilework.comm.exchange import ExchangeComm, Piece
from tilework.core.comm import GroupBroken


class Link(Protocol):
    """The communicator of a node, as one of its workers has it: grouped point-to-point messages, and nothing else.

    It may be asynchronous. Then `exchange` returns when its messages are queued on the device's current stream, and one
    that is aborted leaves its tensors undefined instead of raising an error. It need not see that a peer is lost.
    """

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        """Send and receive all of these at once, by ranks of the node. Raises RuntimeError."""

    def abort(self) -> None:
        """End what is under way; nothing follows. Called once, from any thread."""


class Node:
    """One communicator of all workers of a node. Every worker constructs its link at the same time.

    Nothing is set up for a subset, and only its members call (GF-DiT: 778 ms to 60 us). It can only be aborted as a
    whole: a lost worker breaks every group of the node, and a new node, with a new id, must follow.

    Rejected: a communicator for each group that is used, with some of them warmed (TetriServe, section 5). Here the
    first meeting of all workers connects every pair of them, so no group has a first use that is slower.
    """

    def __init__(self, link: Link) -> None:
        self._link, self._lock = link, Lock()
        self.is_broken = False

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        """As ExchangeComm.exchange, with ranks of the node."""
        if self.is_broken:
            raise GroupBroken("the node's communicator was aborted")
        if not sends and not receives:
            return
        try:
            self._link.exchange(sends, receives)
        except RuntimeError as error:
            self.abort()
            raise GroupBroken("the node's communicator failed") from error

    def abort(self) -> None:
        with self._lock:
            if not self.is_broken:
                self.is_broken = True  # First: what ends by it must be known to be wrong.
                self._link.abort()


class NodePart(ExchangeComm):
    """core.comm.Comm for the members of a group, as ranks of their node's communicator."""

    def __init__(self, node: Node, rank: int, node_ranks: Sequence[int]) -> None:
        super().__init__(rank, len(node_ranks))
        self.node, self._node_ranks = node, tuple(node_ranks)

    @property
    def has_aborted_calls(self) -> bool:
        return self.node.is_broken

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        self.node.exchange(self._on_node(sends), self._on_node(receives))

    def abort(self) -> None:
        self.node.abort()

    def close(self) -> None:
        """Nothing was set up."""

    def _on_node(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [(self._node_ranks[rank], tensor) for rank, tensor in pieces]
