"""All GPUs of a node on one NCCL communicator, on which any subset of them can talk."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from tilework.comm.exchange import PATIENCE, ExchangeComm, Piece
from tilework.core.comm import GroupBroken


class NcclNode:
    """One communicator of all workers of a node. Every worker constructs it at the same time; then they all `meet`.

    Messages between two ranks go only inside of a group of operations: outside of one torch would make a new
    communicator for each pair. Nothing is set up for a subset, and only its members call (GF-DiT: 778 ms to 60 us).
    NCCL does not see a lost peer, and can only abort the whole communicator: a lost worker breaks every group of the
    node, and a new node, with a new id, must follow.

    It has been run on no host with several GPUs yet.
    """

    def __init__(self, store: Store, rank: int, size: int, device_id: int) -> None:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        self._lock = Lock()
        self.broken = False
        try:
            self._backend: Any = ProcessGroupNCCL(store, rank, size, options)
            self._backend.eager_connect_single_device(torch.device("cuda", device_id))
        except RuntimeError as error:
            raise GroupBroken(f"the node could not connect: {error}") from error

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        """As ExchangeComm.exchange, with ranks of the node. Waits on the current stream, not on the host."""
        if self.broken:
            raise GroupBroken("the node's communicator was aborted")
        if not sends and not receives:
            return
        try:
            self._backend._start_coalescing()
            for rank, tensor in sends:
                self._backend.send([tensor], rank, 0)
            for rank, tensor in receives:
                self._backend.recv([tensor], rank, 0)
            self._backend._end_coalescing().wait()
        except RuntimeError as error:
            self.abort()
            raise GroupBroken("the node's communicator failed") from error

    def abort(self) -> None:
        with self._lock:
            if not self.broken:
                self.broken = True
                self._backend.abort()


class NcclComm(ExchangeComm):
    """core.comm.Comm for CUDA tensors: the members of a group, as ranks of their node's communicator.

    A call returns when its messages are queued on the current stream, and cannot know yet whether they arrive. What
    was computed with them counts only if no call raises and `broken` is false after the device was synchronised.
    """

    def __init__(self, node: NcclNode, rank: int, node_ranks: Sequence[int]) -> None:
        super().__init__(rank, len(node_ranks))
        self.node, self._node_ranks = node, tuple(node_ranks)

    @property
    def broken(self) -> bool:
        return self.node.broken

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        self.node.exchange(self._on_node(sends), self._on_node(receives))

    def abort(self) -> None:
        self.node.abort()

    def close(self) -> None:
        """Nothing was set up."""

    def _on_node(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [(self._node_ranks[rank], tensor) for rank, tensor in pieces]
