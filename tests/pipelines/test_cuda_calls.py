"""What loading, copies and graphs ask of CUDA, by notes of the calls."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from cards import card, with_cards
from cuda_calls import CudaCalls
from pipelines.test_clips import built
from tilework.core.model import ModelSource
from tilework.pipelines import loading
from tilework.pipelines.clips.plan import decode_memory
from tilework.pipelines.cuda.copies import CudaStreams
from tilework.pipelines.cuda.graphs import CudaRecorder
from tilework.pipelines.errors import InvalidSource

CARD = torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaCalls:
    return CudaCalls(monkeypatch)


def test_streams_and_events_with_times_are_those_of_the_device(cuda: CudaCalls) -> None:
    cuda.answer(current_stream="usual", Stream="new", stream=nullcontext(), Event="an event")
    streams = CudaStreams(CARD)
    assert (streams.current(), streams.new(), streams.event()) == ("usual", "new", "an event")
    with streams.entered("new"):
        pass
    timed = True
    assert cuda.noted == [("current_stream", CARD), ("Stream", CARD), ("Event", timed), ("stream", "new")]


def test_copies_go_between_the_device_and_pinned_memory_and_the_host_does_not_wait(
    cuda: CudaCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", lambda size, **options: (size, options))
    assert CudaStreams(CARD).pinned(9) == (9, {"dtype": torch.uint8, "pin_memory": True})

    def noted(source: torch.Tensor, non_blocking: bool) -> None:
        cuda.note(source, non_blocking)

    target: Any = SimpleNamespace(copy_=noted)
    source = torch.zeros(2)
    CudaStreams(CARD).copy(target, source)
    assert cuda.noted == [(source, True)]
    there = CudaStreams(torch.device("meta")).like(source)
    assert (there.device.type, there.shape, there.dtype) == ("meta", source.shape, source.dtype)


def test_graphs_of_a_recorder_share_a_pool_and_let_other_threads_work(
    cuda: CudaCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.graphs._graph_pool_handle", lambda: (0, 7))
    graph = SimpleNamespace(replay=lambda: "again")
    cuda.answer(CUDAGraph=graph, current_stream="usual", stream=nullcontext(), graph=nullcontext())
    recorder = CudaRecorder()
    assert recorder.record(lambda: "made") == (graph.replay, "made")
    assert recorder.pool == (0, 7)
    assert cuda.noted[1:] == [("current_stream",), ("stream", "usual"), ("graph", graph, (0, 7), "thread_local")]


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("flux")
    tiny.save(tiny.build_flux(), directory, "flux")
    return str(directory)


@pytest.mark.parametrize(
    ("device", "asked", "is_recorded"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_steps_are_recorded_where_that_is_asked_for_on_cuda(
    flux: str, monkeypatch: pytest.MonkeyPatch, device: str, asked: bool, is_recorded: bool
) -> None:
    recorded: list[Any] = []
    monkeypatch.setattr(loading, "CudaRecorder", lambda: "a recorder")
    monkeypatch.setattr(loading, "record_steps", lambda *given: recorded.append(given))
    pipeline = loading.load_stock(ModelSource(path=flux))
    family = loading.family_of(ModelSource(path=flux, device=device, cuda_graphs=asked), pipeline)
    assert recorded == [(family, "a recorder")] * is_recorded


def test_weights_that_go_to_a_card_are_copied_nowhere_on_the_host(flux: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_module: torch.nn.Module) -> None:
        raise AssertionError("the host has them twice")

    monkeypatch.setattr(loading, "_copy_weights", fail)
    monkeypatch.setattr(loading, "device_of", lambda source: torch.device("meta"))
    assert loading.load_stock(ModelSource(path=flux)).device.type == "meta"


def test_a_card_that_lacks_a_scheme_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.pipelines.setup.quantize.find_spec", lambda name: "there")
    monkeypatch.setattr(loading, "look", lambda all_cards: with_cards(card(capability=(9, 0))))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    source = ModelSource(path="/nowhere", device="cuda", quantize=(("", "nvfp4"),))
    with pytest.raises(InvalidSource, match=r"needs cards of compute capability 10.0, and a card has 9.0"):
        loading.load_stock(source)


def test_the_plan_of_a_decode_counts_kernels_of_the_host_alone() -> None:
    vae, _ = built("wan")
    memory = decode_memory(vae, 10**9)
    assert memory is not None
    assert memory.counts_kernels
    elsewhere = decode_memory(vae.to("meta"), 10**9)
    assert elsewhere is not None
    assert not elsewhere.counts_kernels
