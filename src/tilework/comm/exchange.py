"""All collectives, built on one operation: several pieces sent and received at once, point to point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from tilework.core.comm import Comm, GroupBroken

PATIENCE = timedelta(hours=1)
"""Time that a member waits for another one that is alive: it may be busy with other works for minutes."""

Piece = tuple[int, Tensor]
"""A rank, and a tensor to send to it or to receive from it."""


class ExchangeComm(ABC):
    """Implements core.comm.Comm, except for `exchange`, `abort` and `close`. A group of one copies and sends nothing.

    A communicator that a whole node shares (NCCL) offers its subsets point-to-point messages only. For subsets with a
    communicator of their own `NodePart` uses collectives of the backend.
    """

    def __init__(self, rank: int, size: int) -> None:
        assert 0 <= rank < size
        self._rank, self._size = rank, size
        self._peers = tuple((rank + distance) % size for distance in range(1, size))

    @abstractmethod
    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        """Send and receive all of these at once. No piece is empty; between two ranks there is at most one each way.

        Raises GroupBroken.
        """

    @abstractmethod
    def abort(self) -> None: ...
    @abstractmethod
    def close(self) -> None: ...

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def has_aborted_calls(self) -> bool:
        return False  # A call that has returned has done what it says.

    def all_to_all(self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int]) -> None:
        assert len(output_splits) == len(source_splits) == self._size
        assert output_splits[self._rank] == source_splits[self._rank]
        theirs, ours = _flat(output).split_with_sizes(output_splits), _flat(source).split_with_sizes(source_splits)
        theirs[self._rank].copy_(ours[self._rank])
        self._exchange_filled(ours, theirs)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        assert output.numel() == self._size * source.numel()
        theirs = _flat(output).split_with_sizes([source.numel()] * self._size)
        theirs[self._rank].copy_(_flat(source))
        self._exchange_filled([source] * self._size, theirs)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        if self._rank != root:
            self.recv(tensor, root)
        elif tensor.numel():
            assert tensor.is_contiguous()
            self.exchange([(peer, tensor) for peer in self._peers], [])

    def send(self, tensor: Tensor, target: int) -> None:
        assert tensor.is_contiguous()
        if tensor.numel():
            self.exchange([(target, tensor)], [])

    def recv(self, tensor: Tensor, source: int) -> None:
        assert tensor.is_contiguous()
        if tensor.numel():
            self.exchange([], [(source, tensor)])

    def among(self, ranks: Sequence[int]) -> Comm:
        return _PartComm(self, ranks)

    def meet(self, device: str) -> None:
        """Return when every member has called this. Raises GroupBroken."""
        hello = torch.zeros(1, dtype=torch.uint8, device=device)
        heard = torch.empty(self._size, dtype=torch.uint8, device=device)
        self.all_gather(heard, hello)
        heard.tolist()  # On a GPU a call returns before it is done.
        if self.has_aborted_calls:
            raise GroupBroken("the group was broken off while its members met")

    def _exchange_filled(self, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        """Exchange the pieces that are not empty; both ends know the lengths, so empty ones need not be sent."""
        sends = [(peer, ours[peer]) for peer in self._peers if ours[peer].numel()]
        receives = [(peer, theirs[peer]) for peer in reversed(self._peers) if theirs[peer].numel()]
        self.exchange(sends, receives)


class _PartComm(ExchangeComm):
    """Some ranks of a group, whose messages go through its connections."""

    def __init__(self, whole: ExchangeComm, ranks: Sequence[int]) -> None:
        super().__init__(ranks.index(whole.rank), len(ranks))
        self._whole = whole
        self._ranks = tuple(ranks)

    @property
    def has_aborted_calls(self) -> bool:
        return self._whole.has_aborted_calls

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        self._whole.exchange(self._in_whole(sends), self._in_whole(receives))

    def abort(self) -> None:
        self._whole.abort()

    def close(self) -> None:
        """Do nothing: nothing was set up."""

    def _in_whole(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [(self._ranks[rank], tensor) for rank, tensor in pieces]


def _flat(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous()
    assert tensor.dim() == 1
    return tensor
