"""What a worker asks of CUDA, and when, by notes of the calls."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuda_calls import CudaCalls
from lazy_streams import LazyStreams
from tilework.core.component import Component
from tilework.core.model import ModelSource
from tilework.core.wire.commands import Site
from tilework.pipelines.components import weights_of
from tilework.pipelines.cuda.copies import SideCopies
from tilework.worker import memory, process
from tilework.worker.calibrate import _Clock
from tilework.worker.hardware import describe_hardware, memory_in_use
from tilework.worker.memory import Budget
from tilework.worker.models.describe import _decode_memory
from tilework.worker.models.pinned import PinnedFiles, register, unregister
from tilework.worker.models.shared_weights import Form, SharedWeights, laid_out
from zoo.autoencoders import kl_wan

GB = 10**9
CPU, CARD = torch.device("cpu"), torch.device("cuda", 1)
SOURCE = ModelSource(path="/", device="cuda")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaCalls:
    calls = CudaCalls(monkeypatch)
    calls.answer(
        get_device_properties=SimpleNamespace(total_memory=80 * GB),
        memory_allocated=6 * GB,
        set_per_process_memory_fraction=None,
        empty_cache=None,
    )
    return calls


# Memory.


@pytest.mark.parametrize(("budget_gb", "fraction"), [(10, 0.2), (75, 1.0)])
def test_a_run_may_take_its_budget_beside_what_lies_on_the_card(
    cuda: CudaCalls, budget_gb: int, fraction: float
) -> None:
    with suppress(torch.OutOfMemoryError), Budget(CARD, budget_gb * GB).hold():
        assert cuda.noted.pop() == ("set_per_process_memory_fraction", fraction, CARD)
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert cuda.noted.pop() == ("set_per_process_memory_fraction", 1.0, CARD)
    assert cuda.noted == [("memory_allocated", CARD), ("get_device_properties", CARD)]


def test_without_a_budget_the_card_has_no_limit(cuda: CudaCalls) -> None:
    with Budget(CARD, None).hold():
        assert cuda.noted == []


def test_what_ran_out_of_memory_leaves_none_in_the_allocator(cuda: CudaCalls) -> None:
    Budget(CARD, None).release()
    assert cuda.noted == [("empty_cache",)]
    Budget(CPU, None).release()
    assert cuda.noted == [("empty_cache",)]


def test_a_budget_on_a_card_leaves_the_hosts_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STATUS", memory.Path("/nowhere"))
    budget = Budget(CARD, GB)
    assert not budget.is_exceeded_by(RuntimeError("could not create a primitive")), "oneDNN runs on the host alone"
    assert budget.is_exceeded_by(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OSError, match="needs Linux"):
        Budget(CPU, GB)


def test_what_a_card_is_called_and_what_all_have_taken_of_it(cuda: CudaCalls) -> None:
    cuda.answer(get_device_name="NVIDIA L20", mem_get_info=(50 * GB, 80 * GB))
    assert describe_hardware(CARD) == "NVIDIA L20"
    assert memory_in_use(CARD) == 30 * GB
    assert cuda.noted == [("get_device_name", CARD), ("mem_get_info", CARD)]
    assert memory_in_use(CPU) is None


# Time.


@pytest.mark.parametrize(("num_runs", "num_warmups"), [(4, 3), (None, 2)])
def test_a_step_is_timed_when_it_has_been_recorded_with_the_most_memory_of_all_its_runs(
    cuda: CudaCalls, num_runs: int | None, num_warmups: int
) -> None:
    cuda.answer(
        reset_peak_memory_stats=None,
        max_memory_allocated=7 * GB,
        current_stream=SimpleNamespace(synchronize=lambda: cuda.note("waited")),
    )
    timing = _Clock(CARD, None, num_runs).time(lambda: cuda.note("run"))
    names = [name for name in cuda.names if name != "current_stream"]
    runs = ["run", "waited"] * (num_warmups + timing.num_runs)
    assert names == ["reset_peak_memory_stats", *runs, "max_memory_allocated"]
    assert timing.peak_bytes == 7 * GB
    assert cuda.noted[0] == ("reset_peak_memory_stats", CARD)
    assert cuda.noted[-1] == ("max_memory_allocated", CARD)


# Files that the card reads by itself.


@pytest.mark.parametrize("status", [0, 801])
def test_files_are_registered_by_the_runtime_of_cuda(
    cuda: CudaCalls, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The error of one that cannot be is taken by a kernel of its own, or the next would be thought to have failed."""

    def takes_error(value: int) -> None:
        cuda.note("kernel", value)
        raise RuntimeError("CUDA error: operation not supported")

    cuda.answer(
        cudart=SimpleNamespace(
            cudaHostRegister=lambda *given: (cuda.note("registered", *given), status)[1],
            cudaHostUnregister=lambda address: cuda.note("unregistered", address),
        )
    )
    on_device = {"cuda": SimpleNamespace(add_=takes_error)}
    monkeypatch.setattr(torch, "zeros", lambda _size, device: on_device[device])
    assert register(4096, 100) == (status == 0)
    unregister(4096)
    read_only = 8
    kernels = [] if status == 0 else [("kernel", 1)]
    expected = [("cudart",), ("registered", 4096, 100, read_only), *kernels, ("cudart",), ("unregistered", 4096)]
    assert cuda.noted == expected
    assert (PinnedFiles().register, PinnedFiles().unregister) == (register, unregister)


def test_only_files_that_a_card_loads_from_are_registered(tmp_path: Path) -> None:
    registered: list[int] = []
    pinned = PinnedFiles(lambda _address, num_bytes: not registered.append(num_bytes), lambda _address: None)
    weights, shared = [torch.ones(3)], SharedWeights(tmp_path, pinned=pinned)
    shared.keep("weights", weights)
    forms = [Form.of(one) for one in weights]
    shared.open("weights", forms)
    assert registered == []
    shared.open("weights", [replace(one, device=CARD) for one in forms])
    assert registered == [laid_out(forms)[1]]


# What decodes may take.


def test_a_decode_may_take_what_weights_leave_of_the_card(cuda: CudaCalls) -> None:
    vae = kl_wan()
    num_bytes = sum(one.nbytes for one in weights_of(vae))
    modules = {"vae": vae, "transformer": torch.nn.Linear(10**4, 10)}
    whole = num_bytes + 4 * 10 * (10**4 + 1)
    family: Any = SimpleNamespace(modules=modules, device=CARD)
    comes_and_goes = {"vae": Component("digest", num_bytes)}

    def left(source: ModelSource, components: Mapping[str, Component]) -> int | None:
        memory = _decode_memory(family, source, components)
        return None if memory is None else 80 * GB - memory.most_bytes

    assert left(SOURCE, {}) == whole
    assert left(SOURCE, comes_and_goes) == num_bytes, "it is there alone"
    assert left(replace(SOURCE, offload="layers"), {}) == 0, "layers come and go"
    assert left(replace(SOURCE, memory_bytes=30 * GB), {}) == 50 * GB, "the budget of a run"
    family.device = CPU
    assert left(SOURCE, {}) is None


# The start of the process.


class Reached(Exception):
    """What the process comes to."""


def raising(*given: Any, **_: Any) -> Any:
    raise Reached(*given)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, ModelSource], tuple[Any, ...]]:
    """What a worker of device 3 does first, where its parent has used CUDA or not."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(process, "begin_anew", raising)
    monkeypatch.setattr(process, "setproctitle", raising)
    ours, _ = socket.socketpair()

    def started(parent_used_cuda: bool, source: ModelSource) -> tuple[Any, ...]:
        monkeypatch.setattr(process, "was_born_with_cuda", lambda: parent_used_cuda)
        with pytest.raises(Reached) as reached:
            process.serve(ours, (source,), Site(device_id=3, blobs=""))
        return reached.value.args

    return started


def test_a_worker_of_a_card_begins_anew_where_its_parent_has_used_cuda(
    start: Callable[[bool, ModelSource], tuple[Any, ...]],
) -> None:
    assert start(True, SOURCE)[1:] == ((SOURCE,), Site(device_id=3, blobs=""))
    assert start(False, SOURCE) == ("tilework: worker 3 (cuda:3)",)
    assert start(True, replace(SOURCE, device="cpu")) == ("tilework: worker 3 (cpu)",)


@pytest.mark.parametrize(("device", "is_there", "used"), [("cuda", True, [3]), ("cuda", False, []), ("cpu", True, [])])
def test_a_worker_uses_its_own_card(
    cuda: CudaCalls, monkeypatch: pytest.MonkeyPatch, device: str, is_there: bool, used: list[int]
) -> None:
    cuda.answer(is_available=is_there, set_device=None)
    monkeypatch.setattr(process, "pin_numerics", lambda *_: None)
    process._prepare(replace(SOURCE, device=device), 3)
    assert [given for name, *given in cuda.noted if name == "set_device"] == [[one] for one in used]


def test_copies_beside_runs_are_those_of_its_own_card_where_they_are_asked_for(
    cuda: CudaCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(process, "CudaStreams", lambda device: (devices.append(device), LazyStreams())[1])
    cuda.answer(is_available=True)
    asking = replace(SOURCE, copy_stream=True)
    assert isinstance(process._side_copies(asking, 3), SideCopies)
    assert devices == [torch.device("cuda", 3)]
    assert process._side_copies(SOURCE, 3) is None
    assert process._side_copies(replace(asking, device="cpu"), 3) is None
    cuda.answer(is_available=False)
    assert process._side_copies(asking, 3) is None
