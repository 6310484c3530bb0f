"""Copies between a GPU and the host by a separate stream, through memory that the GPU reaches by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

_PART_BYTES = 64 << 20
"""Least size of a part that is waited for at once: some milliseconds."""

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Targets, and the sources that are copied to them."""


class Streams(Protocol):
    """Streams, events with times and pinned memory of a device; streams and events are as those of `torch.cuda`."""

    def current(self) -> Any: ...
    def new(self) -> Any: ...
    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        """Send each `copy` to this stream while entered."""

    def event(self) -> Any: ...
    def pinned(self, num_bytes: int) -> Tensor:
        """Return bytes of host memory that the device reads and writes by itself."""

    def like(self, tensor: Tensor) -> Tensor:
        """Return memory of the device for the contents of a tensor."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy; the host does not wait for it."""


@dataclass(frozen=True, slots=True)
class CudaStreams:
    """Streams of a CUDA device. Nothing of it has run on one yet."""

    device: torch.device

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def new(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)


class Copies(Protocol):
    """Copies of a state's tensors from a device to the host and back. The tensors are contiguous."""

    def room(self, num_bytes: int) -> Tensor:
        """Return memory of the host, as bytes, for tensors that go `to_device`."""

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the contents of tensors on the host, ready to be read."""

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Return tensors of the host on a device, ready for what is queued on its current stream from now on."""


class DirectCopies:
    """Copies each tensor by itself, on the current stream; the host waits. Tensors already there are not copied."""

    def room(self, num_bytes: int) -> Tensor:
        # torch aligns its memory: unaligned inputs may round differently.
        return torch.empty(num_bytes, dtype=torch.uint8)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.cpu() for tensor in tensors]

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return [tensor.to(device) for tensor in tensors]


DIRECT = DirectCopies()


@dataclass(slots=True, eq=False)
class Sending:
    """Copies that may be under way, in parts, by the events at their beginning and at the end of each part.

    The tensors that they `read` are kept here. The tensors that they write must stay, and may not be used, until the
    copies are waited for.
    """

    begin: Any
    ends: Sequence[Any]
    read: Sequence[Tensor]
    _waited_ns: int = field(default=0, init=False)

    @property
    def end(self) -> Any:
        return self.ends[-1]

    def arriving(self) -> Iterator[None]:
        """Let the host wait for a part after each `next`."""
        for end in self.ends:
            start_ns = time.monotonic_ns()
            end.synchronize()
            self._waited_ns += time.monotonic_ns() - start_ns
            yield

    @property
    def beside_ns(self) -> int:
        """Time of finished copies while the host did not wait."""
        return max(0, int(1e6 * self.begin.elapsed_time(self.end)) - self._waited_ns)


class SideCopies:
    """Copies by a separate stream: all tensors of a state at once, and weights beside what runs.

    The stream begins when the current one has done what was queued before: it may be computing what is to be copied, or
    still be using the memory that is copied to. The memory belongs to the current stream and returns to it; so that
    stream must not use it before the copies have ended.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._side = streams.new()
        self._under_way: list[Sending] = []
        """Copies to the device that may be under way."""

    def room(self, num_bytes: int) -> Tensor:
        return self._streams.pinned(num_bytes)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies = [self.room(one.nbytes).view(one.dtype).view(one.shape) for one in tensors]
        self._copy(list(zip(copies, tensors, strict=True))).end.synchronize()
        return copies

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        copies, sending = self.send(tensors)
        self._streams.current().wait_event(sending.end)
        return copies

    def send(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Sending]:
        """Begin to copy tensors of the host to the device. Neither the host nor the current stream waits for it.

        If there is no memory for all of them, none is copied.
        """
        self._under_way = [one for one in self._under_way if not one.end.query()]
        copies = [self._streams.like(one) for one in tensors]
        sending = self._copy(list(zip(copies, tensors, strict=True)))
        self._under_way.append(sending)
        return copies, sending

    def finish(self) -> None:
        """Let the host wait for all copies to the device: their sources may be freed then."""
        for one in self._under_way:
            one.end.synchronize()
        self._under_way.clear()

    def _copy(self, pairs: Pairs) -> Sending:
        reached, begin = self._streams.event(), self._streams.event()
        reached.record(self._streams.current())
        self._side.wait_event(reached)
        begin.record(self._side)
        ends = []
        with self._streams.entered(self._side):
            for part in _parts(pairs):
                for target, source in part:
                    self._streams.copy(target, source)
                end = self._streams.event()
                end.record(self._side)
                ends.append(end)
        return Sending(begin, ends, [source for _, source in pairs])


def _parts(pairs: Pairs) -> list[Pairs]:
    """Return pairs in their order, in parts of at least `_PART_BYTES` except the last; at least one part."""
    parts: list[list[tuple[Tensor, Tensor]]] = [[]]
    num_bytes = 0
    for pair in pairs:
        if num_bytes >= _PART_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(pair)
        num_bytes += pair[1].nbytes
    return list(parts)
