"""Copies by a stream of their own: what waits for what, on streams that do nothing until somebody waits for them."""

from __future__ import annotations

import weakref

import pytest
import torch

from lazy_streams import LazyStreams
from tilework.pipelines import serialization
from tilework.pipelines.cuda import copies as of_cuda
from tilework.pipelines.cuda.copies import SideCopies

CPU = torch.device("cpu")


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


def test_what_is_sent_holds_up_nobody_until_it_is_waited_for_part_by_part(
    device: LazyStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_cuda, "_PART_BYTES", 8)
    tensors = [torch.full((1,), float(value)) for value in range(3)]
    there, sending = SideCopies(device).send(tensors)
    device.computing.queue.append(lambda: None)
    device.computing.synchronize()
    assert device.side.num_done == 0, "a run waited for it"
    arriving = sending.arriving()
    next(arriving)
    assert [one.item() for one in there] == [0, 1, 7], "the last one has not come yet"
    assert not sending.end.query(), "a part is two tensors"
    assert len(list(arriving)) == 1
    assert [one.item() for one in there] == [0, 1, 2]
    assert 0 < sending.beside_ns <= 3e6, "three copies, of a millisecond each"


def test_what_is_sent_to_memory_that_is_in_use_waits_for_that(
    device: LazyStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, seen = torch.full((2,), 5.0), list[float]()
    monkeypatch.setattr(device, "like", lambda _: memory)
    device.computing.queue.append(lambda: seen.extend(memory.tolist()))
    _, sending = SideCopies(device).send([torch.ones(2)])
    sending.end.synchronize()
    assert seen == [5] * 2


def test_what_is_sent_keeps_what_it_reads_and_not_what_it_writes(device: LazyStreams) -> None:
    copies, read = SideCopies(device), torch.ones(3)
    there, sending = copies.send([read])
    del read
    sending.end.synchronize()
    written = weakref.ref(there[0])
    del there, sending
    assert written() is None, "dropped weights would stay on the device"


def test_before_what_was_read_is_let_go_all_copies_are_waited_for(device: LazyStreams) -> None:
    copies = SideCopies(device)
    for _ in range(2):
        copies.send([torch.ones(3)])
    copies.finish()
    assert device.side.num_done == len(device.side.queue)


def test_without_memory_for_all_nothing_is_sent(device: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = iter([torch.empty(1)])

    def like(_: torch.Tensor) -> torch.Tensor:
        try:
            return next(rooms)
        except StopIteration:
            raise torch.OutOfMemoryError from None

    monkeypatch.setattr(device, "like", like)
    with pytest.raises(torch.OutOfMemoryError):
        SideCopies(device).send([torch.ones(1), torch.ones(1)])
    assert not device.side.queue


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
