"""All workers of a node on one communicator, on which any subset of them can talk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tilework.comm.exchange import ExchangeComm, Piece
from tilework.core.comm import Comm, GroupBroken
from tilework.core.work import Group

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class NodeLink(Protocol):
    """The communicator of a node, or of a part of it, as one of its workers has it.

    It may be asynchronous. Then its calls return when their messages are queued on the device's current stream, and an
    aborted call leaves its tensors undefined instead of raising an error. It need not notice that a peer is lost. All
    calls but `abort` may raise RuntimeError.
    """

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        """Send and receive all of these at once, by ranks of the link; only the ranks that are named call it."""

    def all_to_all(self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int]) -> None:
        """Do `core.comm.Comm.all_to_all` among all ranks."""

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Do `core.comm.Comm.all_gather` among all ranks."""

    def split(self, parts: Sequence[Sequence[int]]) -> NodeLink | None:
        """Return the link of the part (a list of ranks) that contains this rank; None if no part does.

        All ranks make the same call at the same time, each rank is in one part at most, and each part has its ranks in
        order.
        """

    def abort(self) -> None:
        """End the calls that are under way; none may follow. Called once, from any thread."""


class Node:
    """One communicator of all workers of a node. Every worker constructs its link at the same time.

    Any subset of the workers can talk, and only its members call (GF-DiT: 778 ms to 60 us). They talk point to point,
    which takes two calls and two more for each other member. The subsets that `split` was called with have links of
    their own, on which an exchange is one call. All links can only be aborted together: breaking off one group breaks
    every group of the node, and a new node, with a new id, must follow.

    Rejected: a communicator for each group that is used, with some of them warmed up (TetriServe, section 5). Here the
    first meeting of all workers connects every pair of them, so no group is slower at its first use. Also rejected: one
    call per exchange on the whole link, with empty messages to the others: NCCL sends these, too, and would wait for
    them.
    """

    def __init__(self, link: NodeLink, rank: int = 0) -> None:
        self._link = link
        self._rank = rank
        self._links = [link]
        self._lock = Lock()
        self._parts: dict[tuple[int, ...], NodeLink] = {}
        self.is_broken = False

    def split(self, devices: Group, kind: str) -> None:
        """Make links for the groups that a buddy allocator prefers; `devices` are those of all ranks, in order.

        Every worker does this at the same time; `kind` is that of the devices. If it fails on one worker, all of them
        leave the links unused: their groups talk point to point. Raises GroupBroken.
        """
        whole = NodePart(self, self._rank, range(len(devices)))
        parts = {tuple(range(len(devices))): self._link}
        try:
            for blocks in _blocks(devices):
                part = self._link.split(blocks)
                if part is not None:
                    self._made(part)
                    parts[next(block for block in blocks if self._rank in block)] = part
            failed = torch.zeros(1, dtype=torch.uint8, device=kind)
        except RuntimeError as error:
            _log.warning("the node's communicator cannot be split, so that exchanges take more calls: %s", error)
            failed = torch.ones(1, dtype=torch.uint8, device=kind)
        heard = torch.empty(len(devices), dtype=torch.uint8, device=kind)
        whole.all_gather(heard, failed)
        if not any(heard.tolist()):
            self._parts = parts

    def _made(self, link: NodeLink) -> None:
        """Keep a link for `abort`, and abort it now if `abort` came earlier."""
        with self._lock:
            self._links.append(link)
            if self.is_broken:
                link.abort()

    def part(self, ranks: tuple[int, ...]) -> NodeLink | None:
        """Return the link of exactly these ranks, if there is one."""
        return self._parts.get(ranks)

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        """Do `ExchangeComm.exchange` with ranks of the node."""
        if sends or receives:
            self.call(lambda: self._link.exchange(sends, receives))
        elif self.is_broken:
            raise GroupBroken("the node's communicator was aborted")

    def call(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of a call of one of the node's links. Raises GroupBroken."""
        if self.is_broken:
            raise GroupBroken("the node's communicator was aborted")
        try:
            return call()
        except RuntimeError as error:
            self.abort()
            raise GroupBroken(f"the node's communicator failed: {error}") from error

    def abort(self) -> None:
        with self._lock:
            if not self.is_broken:
                self.is_broken = True  # Set first, so that results of the aborted calls are known to be wrong.
                for link in self._links:
                    link.abort()


def _blocks(devices: Group) -> Iterator[list[tuple[int, ...]]]:
    """Yield the ranks of aligned blocks of these devices, by width: 2, 4, 8 ..., narrower than all of them."""
    width = 2
    while width < len(devices):
        firsts = sorted({device_id // width * width for device_id in devices})
        blocks = [tuple(range(first, first + width)) for first in firsts]
        if whole := [tuple(map(devices.index, block)) for block in blocks if set(block) <= set(devices)]:
            yield whole
        width *= 2


class NodePart(ExchangeComm):
    """Implements core.comm.Comm for the members of a group, as ranks of their node's communicator."""

    def __init__(self, node: Node, rank: int, node_ranks: Sequence[int]) -> None:
        super().__init__(rank, len(node_ranks))
        self.node = node
        self._node_ranks = tuple(node_ranks)
        self._link = node.part(self._node_ranks)

    @property
    def has_aborted_calls(self) -> bool:
        return self.node.is_broken

    def all_to_all(self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int]) -> None:
        if self._link is None:
            super().all_to_all(output, source, output_splits, source_splits)
        else:
            link = self._link
            self.node.call(lambda: link.all_to_all(output, source, output_splits, source_splits))

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        if self._link is None or not source.numel():
            super().all_gather(output, source)
        else:
            link = self._link
            self.node.call(lambda: link.all_gather(output, source))

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        self.node.exchange(self._on_node(sends), self._on_node(receives))

    def among(self, ranks: Sequence[int]) -> Comm:
        return NodePart(self.node, ranks.index(self.rank), [self._node_ranks[rank] for rank in ranks])

    def abort(self) -> None:
        self.node.abort()

    def close(self) -> None:
        """Do nothing: nothing was set up."""

    def _on_node(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [(self._node_ranks[rank], tensor) for rank, tensor in pieces]
