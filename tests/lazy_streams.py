"""Streams that do nothing until something waits for them, so that every wait that is missing is seen."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Event:
    """A place in the queue of a stream."""

    stream: LazyStream | None = None
    place: int = 0

    def record(self, stream: LazyStream) -> None:
        self.stream, self.place = stream, len(stream.queue)

    def synchronize(self) -> None:
        assert self.stream is not None, "an event that was not recorded is waited for"
        self.stream.run(self.place)

    def query(self) -> bool:
        return self.stream is None or self.stream.num_done >= self.place

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds: one for all that was queued between the two."""
        assert self.query(), "the time of what has not been done is asked for"
        assert other.query(), "the time of what has not been done is asked for"
        return float(other.place - self.place)


@dataclass(eq=False)
class LazyStream:
    """Runs what was queued only as far as somebody waits for it: every wait that is missing is seen."""

    queue: list[Callable[[], object]] = field(default_factory=list)
    num_done: int = 0

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.synchronize)

    def run(self, end: int) -> None:
        while self.num_done < end:
            self.num_done += 1
            run = self.queue[self.num_done - 1]
            self.queue[self.num_done - 1] = _nothing  # A device keeps nothing of what it has done.
            run()

    def synchronize(self) -> None:
        self.run(len(self.queue))


class LazyStreams:
    """A device whose memory is the host's. A copy does not keep what it reads, as on a device."""

    def __init__(self) -> None:
        self.computing = self._entered = LazyStream()
        self.side = LazyStream()

    def current(self) -> LazyStream:
        return self._entered

    def new(self) -> LazyStream:
        return self.side

    @contextmanager
    def entered(self, stream: LazyStream) -> Iterator[None]:
        before, self._entered = self._entered, stream
        yield
        self._entered = before

    def event(self) -> Event:
        return Event()

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 7, dtype=torch.uint8)

    def like(self, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, 7)

    def copy(self, target: Tensor, source: Tensor) -> None:
        read = weakref.ref(source)

        def copy() -> None:
            there = read()
            assert there is not None, "what is to be copied was let go"
            target.copy_(there)

        self._entered.queue.append(copy)
