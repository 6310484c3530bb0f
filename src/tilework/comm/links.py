"""The communicators that a node can have: NCCL on GPUs, and gloo, which replaces it in tests on CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from tilework.comm.exchange import PATIENCE, Piece
from tilework.comm.node import NodeLink

_WHOLE: Mapping[str, Any] = {}
_CONNECT = timedelta(seconds=60)  # Time that gloo waits for a member that never connects.
_ANY_BYTE = 255  # A float of such bytes is NaN.


class NcclLink:
    """NCCL by torch, which sends messages only inside a group of operations.

    Outside of one, torch would make a communicator for each pair of ranks.

    The thread that makes a link gets its own stream: on the device's default one the first messages would wait for the
    run of another thread. So a link is made on a thread that does nothing else.

    The runtime reports lost peers, because it sees their processes end. Where NCCL reports one, too, torch would end
    the process of each survivor; it is configured not to.

    It has not been run on a host with several GPUs yet.
    """

    def __init__(self, store: Store, rank: int, size: int, device_id: int, split: Mapping[str, Any] = _WHOLE) -> None:
        from torch.distributed import ProcessGroupNCCL

        self._store = store
        self._rank = rank
        self._device = torch.device("cuda", device_id)
        # Each thread has its own current device: on the default one this process would waste memory.
        torch.cuda.set_device(device_id)
        if not split:
            torch.cuda.set_stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        for name, value in split.items():
            setattr(options, name, value)
        self._backend: Any = ProcessGroupNCCL(store, rank, size, options)
        self._backend.eager_connect_single_device(self._device)

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        """Queue these on the current stream, which waits for them; the host does not."""
        self._backend._start_coalescing()
        for rank, tensor in sends:
            self._backend.send([tensor], rank, 0)
        for rank, tensor in receives:
            self._backend.recv([tensor], rank, 0)
        self._backend._end_coalescing().wait()

    def all_to_all(self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int]) -> None:
        self._backend.alltoall_base(output, source, output_splits, source_splits).wait()

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        self._backend._allgather_base(output, source).wait()

    def split(self, parts: Sequence[Sequence[int]]) -> NcclLink | None:
        """Split by ncclCommSplit, which all ranks of the node call together."""
        mine = _own_part(parts, self._rank)
        if mine is None:
            self._backend.perform_nocolor_split(self._device)
            return None
        options = {"split_from": self._backend, "split_color": parts.index(mine)}
        assert self._device.index is not None
        return NcclLink(_store_of(self._store, mine), mine.index(self._rank), len(mine), self._device.index, options)

    def abort(self) -> None:
        self._backend.abort()


class GlooLink:
    """gloo as a stand-in for NCCL where there is no GPU: a lost peer goes unnoticed, and an aborted call returns.

    An aborted call fills its outputs with bytes of 255, so that results computed from them are recognisably wrong.
    `SocketComm` is better for CPUs in every way; this link is for tests of the code that uses a node's communicator.
    """

    def __init__(self, store: Store, rank: int, size: int, device_id: int) -> None:
        from torch.distributed import ProcessGroupGloo

        self._store = store
        self._rank = rank
        self._device_id = device_id
        self._backend: Any = ProcessGroupGloo(store, rank, size, _CONNECT)
        self._backend._set_default_timeout(PATIENCE)
        self._aborted: Future[None] = Future()

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        def begin() -> list[Any]:
            works = [self._backend.send([tensor], rank, 0) for rank, tensor in sends]
            return works + [self._backend.recv([tensor], rank, 0) for rank, tensor in receives]

        self._call(begin, [tensor for _, tensor in receives])

    def all_to_all(self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int]) -> None:
        size = source.element_size()
        call = self._backend.alltoall_base
        splits = [[size * length for length in lengths] for lengths in (output_splits, source_splits)]
        self._call(lambda: [call(_bytes(output), _bytes(source), *splits)], [output])

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        self._call(lambda: [self._backend._allgather_base(_bytes(output), _bytes(source))], [output])

    def split(self, parts: Sequence[Sequence[int]]) -> GlooLink | None:
        mine = _own_part(parts, self._rank)
        if mine is None:
            return None
        return GlooLink(_store_of(self._store, mine), mine.index(self._rank), len(mine), self._device_id)

    def abort(self) -> None:
        self._aborted.set_result(None)

    def _call(self, begin: Callable[[], Sequence[Any]], outputs: Sequence[Tensor]) -> None:
        done: Future[None] = Future()
        # The thread of an aborted call waits on: gloo wakes it when a connection breaks, or never.
        Thread(target=_transfer, args=(begin, done), name="gloo", daemon=True).start()
        wait((done, self._aborted), return_when=FIRST_COMPLETED)
        if not done.done():
            for tensor in outputs:
                _bytes(tensor).fill_(_ANY_BYTE)


def _transfer(begin: Callable[[], Sequence[Any]], done: Future[None]) -> None:
    try:
        for work in begin():
            work.wait()
    except RuntimeError:  # A peer is lost; NCCL would not report it.
        return
    done.set_result(None)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _own_part(parts: Sequence[Sequence[int]], rank: int) -> Sequence[int] | None:
    return next((part for part in parts if rank in part), None)


def _store_of(store: Store, part: Sequence[int]) -> Store:
    """Return a store in which the members of a part exchange addresses."""
    whole: Store = PrefixStore("part-" + "-".join(map(str, part)), store)
    return whole


LINKS: Mapping[str, Callable[[Store, int, int, int], NodeLink]] = {"nccl": NcclLink, "gloo": GlooLink}
"""Makers of links, by the names of `core.comm.COLLECTIVES`, given a store, a rank, the number of ranks and a device id.

All ranks must call the maker at the same time. Raises RuntimeError.
"""
