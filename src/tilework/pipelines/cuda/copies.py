"""Copies between a GPU and the host by a stream of their own, through memory that the GPU reaches by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Streams(Protocol):
    """What a device has of streams, events and pinned memory. Streams and events are as those of `torch.cuda`."""

    def current(self) -> Any: ...
    def new(self) -> Any: ...
    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        """While entered, `copy` goes to this stream."""

    def event(self) -> Any: ...
    def pinned(self, num_bytes: int) -> Tensor:
        """Memory of the host that the device reads and writes by itself; bytes."""

    def like(self, tensor: Tensor) -> Tensor:
        """Memory of the device for what lies in a tensor."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy; the host does not wait for it."""


@dataclass(frozen=True, slots=True)
class CudaStreams:
    """Those of a CUDA device. Nothing of it has run on one yet."""

    device: torch.device

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def new(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)


class Copies(Protocol):
    """How the tensors of a state come from a device to the host and back. They are contiguous."""

    def room(self, num_bytes: int) -> Tensor:
        """Memory of the host, as bytes, for tensors that go `to_device`."""

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What lies in tensors, on the host, ready to be read."""

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Tensors of the host on a device, ready for what is queued on its current stream from now on."""


class DirectCopies:
    """Each by itself, on the current stream; the host waits for it. Those that lie there already are not copied."""

    def room(self, num_bytes: int) -> Tensor:
        # Aligned like torch's own: unaligned inputs may round differently.
        return torch.empty(num_bytes, dtype=torch.uint8)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.cpu() for tensor in tensors]

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return [tensor.to(device) for tensor in tensors]


DIRECT = DirectCopies()


class SideCopies:
    """All of a state at once, by a stream of its own.

    The stream begins when the current one has done what was queued before: it may be computing what is to be copied, or
    still be using what lay in the memory that is copied to. Of copies to the device the current stream waits for the
    end, the host does not; so what is read must stay until then.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams, self._side = streams, streams.new()
        self._read: list[tuple[Any, Sequence[Tensor]]] = []
        """Of copies to the device that may be under way: their ends, and what they read."""

    def room(self, num_bytes: int) -> Tensor:
        return self._streams.pinned(num_bytes)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies = [self.room(one.nbytes).view(one.dtype).view(one.shape) for one in tensors]
        self._copy(zip(copies, tensors, strict=True)).synchronize()
        return copies

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        self._read = [(end, read) for end, read in self._read if not end.query()]
        copies = [self._streams.like(one) for one in tensors]
        end = self._copy(zip(copies, tensors, strict=True))
        self._streams.current().wait_event(end)
        self._read.append((end, tensors))
        return copies

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Queue copies; returns the event of their end."""
        begin, end = self._streams.event(), self._streams.event()
        begin.record(self._streams.current())
        self._side.wait_event(begin)
        with self._streams.entered(self._side):
            for target, source in pairs:
                self._streams.copy(target, source)
        end.record(self._side)
        return end
