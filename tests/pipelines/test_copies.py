"""Copies by a stream of their own: what waits for what, on streams that do nothing until somebody waits for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tilework.pipelines import serialization
from tilework.pipelines.cuda.copies import SideCopies

CPU = torch.device("cpu")


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
            self.queue[self.num_done - 1]()

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


@pytest.fixture
def device() -> LazyStreams:
    return LazyStreams()


def test_what_is_still_being_computed_is_copied_when_it_is_done(device: LazyStreams) -> None:
    latents, sigmas = torch.zeros(2, 3), torch.zeros((), dtype=torch.bfloat16)
    device.computing.queue += [lambda: latents.fill_(2), lambda: sigmas.fill_(3)]
    on_host = SideCopies(device).to_host([latents, sigmas])
    assert torch.equal(on_host[0], torch.full((2, 3), 2.0))
    assert torch.equal(on_host[1], torch.tensor(3, dtype=torch.bfloat16))


def test_what_is_computed_next_waits_for_copies_to_the_device_and_the_host_does_not(device: LazyStreams) -> None:
    copies, seen = SideCopies(device), list[float]()
    (there,) = copies.to_device([torch.ones(4)], CPU)
    device.computing.queue.append(lambda: seen.extend(there.tolist()))
    assert there.tolist() == [7] * 4, "the host waited"
    device.computing.synchronize()
    assert seen == [1] * 4


def test_memory_that_is_still_in_use_is_not_overwritten(device: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator gives memory away in the order of the current stream, which may not have come so far."""
    memory, seen = torch.full((2,), 5.0), list[float]()
    monkeypatch.setattr(device, "like", lambda _: memory)
    device.computing.queue.append(lambda: seen.extend(memory.tolist()))
    copies = SideCopies(device)
    copies.to_device([torch.ones(2)], CPU)
    device.side.synchronize()  # The copies have nothing else to wait for.
    assert seen == [5] * 2
    assert memory.tolist() == [1] * 2


def test_what_is_read_stays_until_it_is_copied_and_no_longer(device: LazyStreams) -> None:
    copies, read = SideCopies(device), torch.ones(3)
    is_there = weakref.ref(read)
    copies.to_device([read], CPU)
    del read
    copies.to_device([torch.ones(1)], CPU)
    assert is_there() is not None
    device.computing.synchronize()
    copies.to_device([torch.ones(1)], CPU)
    assert is_there() is None


def test_a_state_comes_back_bit_for_bit(device: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors are as those of an accelerator."""
    monkeypatch.setattr(serialization, "_place", lambda where: "cpu" if where is serialization._CPU else "device")
    values = {
        "latents": torch.randn(1, 4, 8, 8).to(memory_format=torch.channels_last),
        "conditioning": {"texts": torch.randn(3, 2000, dtype=torch.float64), "none": torch.empty(0, 3)},
        "sigma": torch.tensor(0.5),
        "iteration_index": 3,
    }
    copies = SideCopies(device)
    written = serialization.serialize(values, copies)
    assert device.side.num_done == 1 + 4, "the stream waited, and copied every tensor"
    back = serialization.deserialize(written, CPU, copies)
    device.computing.synchronize()
    assert back["iteration_index"] == 3
    pairs = [(back[name], values[name]) for name in ("latents", "sigma")]
    pairs += [(back["conditioning"][name], tensor) for name, tensor in values["conditioning"].items()]  # type: ignore[attr-defined]
    for mine, given in pairs:
        assert torch.equal(mine, given)
        assert mine.stride() == given.stride()
