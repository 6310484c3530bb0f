"""The communicators that a node can have: NCCL on GPUs, and gloo, which rehearses it on CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Thread
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from tilework.comm.exchange import PATIENCE, Piece
from tilework.comm.node import Link

_ANY_BYTE = 255  # A float of such bytes is not a number.


class NcclLink:
    """NCCL by torch. Messages go only inside of a group of operations: outside of one torch would make a communicator
    for each pair of ranks.

    That a peer is lost is for the runtime to say, which sees its process end. Where NCCL reports it, too, torch would
    end the process of each survivor; it is told not to.

    It has been run on no host with several GPUs yet.
    """

    def __init__(self, store: Store, rank: int, size: int, device_id: int) -> None:
        from torch.distributed import ProcessGroupNCCL

        # Each thread has a current card of its own: on the first one this process would take memory for nothing.
        torch.cuda.set_device(device_id)
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        self._backend: Any = ProcessGroupNCCL(store, rank, size, options)
        self._backend.eager_connect_single_device(torch.device("cuda", device_id))

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        """Queue these on the current stream, which waits for them; the host does not."""
        self._backend._start_coalescing()
        for rank, tensor in sends:
            self._backend.send([tensor], rank, 0)
        for rank, tensor in receives:
            self._backend.recv([tensor], rank, 0)
        self._backend._end_coalescing().wait()

    def abort(self) -> None:
        self._backend.abort()


class GlooLink:
    """gloo as a stand-in for NCCL where there is no GPU: a lost peer is not seen, and a call that is aborted returns.

    What it was to receive is set to bytes of 255 then, so that results made of it are seen to be wrong. `SocketComm` is
    better for CPUs in every way; this one is for tests and rehearsals of what is done with a node's communicator.
    """

    def __init__(self, store: Store, rank: int, size: int, device_id: int) -> None:
        from torch.distributed import ProcessGroupGloo

        self._backend: Any = ProcessGroupGloo(store, rank, size, PATIENCE)
        self._aborted: Future[None] = Future()

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        done: Future[None] = Future()
        # The thread of a call that is aborted waits on: gloo wakes it when a connection breaks, or never.
        Thread(target=self._transfer, args=(sends, receives, done), name="gloo", daemon=True).start()
        wait((done, self._aborted), return_when=FIRST_COMPLETED)
        if not done.done():
            for _, tensor in receives:
                tensor.view(-1).view(torch.uint8).fill_(_ANY_BYTE)

    def abort(self) -> None:
        self._aborted.set_result(None)

    def _transfer(self, sends: Sequence[Piece], receives: Sequence[Piece], done: Future[None]) -> None:
        try:
            works = [self._backend.send([tensor], rank, 0) for rank, tensor in sends]
            works += [self._backend.recv([tensor], rank, 0) for rank, tensor in receives]
            for work in works:
                work.wait()
        except RuntimeError:  # A peer is lost, which NCCL would not say.
            return
        done.set_result(None)


LINKS: Mapping[str, Callable[[Store, int, int, int], Link]] = {"nccl": NcclLink, "gloo": GlooLink}
"""By the names of `core.comm.COLLECTIVES`: makes the link of a rank, of how many, on the device of this number.

All ranks must call it at the same time. Raises RuntimeError.
"""
