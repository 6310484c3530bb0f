"""What is found out about CUDA, on machines that lack something of it. None of it was run on such a machine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from cards import card, with_cards
from tilework.core.model import ModelSource
from tilework.pipelines import loading
from tilework.pipelines.cuda import attention, look
from tilework.pipelines.cuda.state import CudaState
from tilework.pipelines.errors import InvalidSource

GB = 10**9


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A build of torch for CUDA, on a machine with a driver and two cards."""
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65\nGCC version: 12\n")
    properties = SimpleNamespace(name="a card", total_memory=80 * GB, major=9, minor=0)
    tensor = torch.ones
    for place, name, value in (
        (look, "_DRIVER", driver),
        (torch.version, "cuda", "13.0"),
        (torch.cuda, "init", lambda: None),
        (torch.cuda, "device_count", lambda: 2),
        (torch.cuda, "_device_count_nvml", lambda: 2),
        (torch.cuda, "get_device_properties", lambda index: properties),
        (torch.cuda, "mem_get_info", lambda index: (79 * GB, 80 * GB)),
        (torch, "ones", lambda *_, **__: tensor(1)),
    ):
        monkeypatch.setattr(place, name, value)
    return monkeypatch


def failing(message: str) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(message)

    return fail


@pytest.mark.usefixtures("cuda_build")
def test_cards_and_driver_are_found() -> None:
    found = look.look()
    assert found.cards == (card(), card())
    assert (found.driver, found.has_nvml) == ("NVIDIA UNIX x86_64 Kernel Module  580.65", True)
    assert not found.reason_against


def test_a_cuda_build_without_a_device_says_what_torch_says(cuda_build: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda_build.setattr(torch.cuda, "init", failing("Found no NVIDIA driver on your system.\nPlease check"))
    cuda_build.setattr(look, "_DRIVER", tmp_path / "absent")
    found = look.look()
    assert found.cards == ()
    assert "CUDA 13.0, sees no card (Found no NVIDIA driver on your system.)" in found.reason_against
    assert found.reason_against.endswith("the driver: none is loaded")


def test_one_of_two_cards_is_taken(cuda_build: pytest.MonkeyPatch) -> None:
    tensor = torch.ones

    def ones(*_: Any, device: str) -> Any:
        return failing("CUDA error: busy or unavailable\nand more")() if device == "cuda:1" else tensor(1)

    cuda_build.setattr(torch, "ones", ones)
    first, second = look.look().cards
    assert (first.problem, second.problem) == ("", "CUDA error: busy or unavailable")
    assert second.free_bytes == 0


def test_a_process_that_works_on_a_card_takes_memory_on_no_other(cuda_build: pytest.MonkeyPatch) -> None:
    tensor, touched = torch.ones, list[str]()

    def ones(*_: Any, device: str) -> Any:
        touched.append(device)
        return tensor(1)

    cuda_build.setattr(torch, "ones", ones)
    cuda_build.setattr(torch.cuda, "current_device", lambda: 1)
    assert look.look(all_cards=False).cards == (card(),)
    assert touched == ["cuda:1"]
    cuda_build.setattr(torch.cuda, "device_count", lambda: 0)
    assert "CUDA_VISIBLE_DEVICES hides all" in look.look(all_cards=False).reason_against


def test_a_device_without_nvml(cuda_build: pytest.MonkeyPatch) -> None:
    cuda_build.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    found = look.look()
    assert (len(found.cards), found.has_nvml) == (2, False)


def test_layers_are_brought_to_the_card_of_the_process_by_its_index(
    cuda_build: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without one, torch's allocator refuses to limit the memory of a run (`worker.memory`)."""
    tiny.prepare()
    tiny.save(tiny.build_flux(), tmp_path, "flux")
    cuda_build.setattr(torch.cuda, "current_device", lambda: 1)
    seen = list[torch.device]()
    cuda_build.setattr(loading, "offload_layers", lambda _, device: seen.append(device))
    loading.load_stock(ModelSource(path=str(tmp_path), device="cuda", offload="layers"))
    assert seen == [torch.device("cuda", 1)]


def test_all_cards_are_hidden(cuda_build: pytest.MonkeyPatch) -> None:
    cuda_build.setattr(torch.cuda, "device_count", lambda: 0)
    assert "CUDA_VISIBLE_DEVICES hides all" in look.look().reason_against


def test_kernels_of_attention_are_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(tokens: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """A device whose kernel for each call needs 16 bits, unless it is the plain one."""
        (active,) = (name for name, one in attention._BACKENDS.items() if one in active_backends())
        if active != "math" and (tokens.dtype == torch.float32 or active == "cudnn"):
            raise RuntimeError("No available kernel")
        return tokens

    monkeypatch.setattr(attention, "scaled_dot_product_attention", attend)
    of_16_bits = [(dtype, name) for dtype in ("bfloat16", "float16") for name in ("efficient", "flash", "math")]
    assert attention.kernels_on(torch.device("cpu")) == (("float32", "math"), *of_16_bits)


def active_backends() -> list[Any]:
    return torch.nn.attention._cur_sdpa_kernel_backends()


def test_a_kernel_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    kernels = attention.kernels_on(torch.device("cpu"))
    assert ("float32", "math") in kernels
    assert ("float32", "cudnn") not in kernels
    attention.check_attention("native", "float32", "this CPU", ())
    attention.check_attention("math", "float32", "this CPU", kernels)
    said = r"attention is 'cudnn', which a card does not have for float16 with torch .*; choose one of native, flash$"
    with pytest.raises(InvalidSource, match=said):
        attention.check_attention("cudnn", "float16", "a card", (("float16", "flash"), ("float32", "math")))


@pytest.mark.usefixtures("cuda_build")
def test_the_other_process_tries_them(cuda_build: pytest.MonkeyPatch) -> None:
    cuda_build.setattr(look, "kernels_on", lambda device: (("float32", f"that of {device}"),))
    assert [one.attentions for one in look.look(tries_attentions=True).cards] == [
        (("float32", "that of cuda:0"),),
        (("float32", "that of cuda:1"),),
    ]
    assert [one.attentions for one in look.look().cards] == [(), ()]


@pytest.mark.usefixtures("cuda_build")
class TestAnotherProcess:
    """The process that asks never touches CUDA; what another one finds, or how it fails, is the answer."""

    def with_program(self, monkeypatch: pytest.MonkeyPatch, program: str) -> CudaState:
        monkeypatch.setattr(look, "_COMMAND", (sys.executable, "-c", program))
        return look.cuda_state()

    def test_it_answers(self, cuda_build: pytest.MonkeyPatch) -> None:
        state = with_cards(replace(card(), attentions=(("float16", "flash"),)), card(problem="busy"))
        assert self.with_program(cuda_build, f"import json; print(json.dumps({asdict(state)!r}))") == state

    def test_it_crashes(self, cuda_build: pytest.MonkeyPatch) -> None:
        found = self.with_program(cuda_build, "import sys; print('the driver is broken', file=sys.stderr); sys.exit(7)")
        assert "ended with status 7: the driver is broken" in found.reason_against

    def test_it_hangs(self, cuda_build: pytest.MonkeyPatch) -> None:
        cuda_build.setattr(look, "_TIMEOUT_S", 0.2)
        assert (
            "does not answer within 0.2 s"
            in self.with_program(cuda_build, "import signal; signal.pause()").reason_against
        )


@pytest.mark.slow
def test_the_module_prints_what_it_finds() -> None:
    words = [sys.executable, "-m", look.__name__]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f'"torch": "{torch.__version__}"' in done.stdout
