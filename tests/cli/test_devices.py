"""`--device auto`: what it takes, what it says, and what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cards import card, with_cards
from tilework.cli.console import UserError
from tilework.cli.devices import FoundDevices, found_devices
from tilework.pipelines.cuda.state import CudaState

BUSY = "CUDA-capable device(s) is/are busy or unavailable"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[CudaState, str], FoundDevices]:
    """What `--device` finds on a machine in this state."""

    def found(state: CudaState, asked: str) -> FoundDevices:
        monkeypatch.setattr("tilework.pipelines.cuda.look.cuda_state", lambda: state)
        return found_devices(asked)

    return found


Found = Callable[[CudaState, str], FoundDevices]


def test_auto_takes_cuda_if_there_is_any_and_says_so(on: Found, capsys: pytest.CaptureFixture[str]) -> None:
    found = on(with_cards(card(), card()), "auto")
    found.show()
    assert (found.device, found.number(None), found.dtype("auto")) == ("cuda", 2, "bfloat16")
    assert capsys.readouterr().err == "device: cuda (a card, a card)\n"
    on(with_cards(card()), "cuda").show()
    assert capsys.readouterr().err == "", "it was asked for"


def test_auto_takes_cpus_elsewhere_and_says_why(on: Found, capsys: pytest.CaptureFixture[str]) -> None:
    found = on(replace(with_cards(), problem="no driver found", driver="none is loaded"), "auto")
    found.show()
    assert (found.device, found.number(None), found.dtype("auto")) == ("cpu", 2, "float32")
    assert capsys.readouterr().err == (
        "device: cpu, since torch 2.11.0, built for CUDA 13.0, sees no card (no driver found); the driver: none is "
        "loaded\n"
    )


def test_cuda_that_there_is_not_names_build_driver_and_remedy(on: Found) -> None:
    with pytest.raises(UserError) as error:
        on(replace(with_cards(), problem="the driver is too old (found version 12040)"), "cuda")
    for part in ("torch 2.11.0", "CUDA 13.0", "too old", "the driver: 580.65", "install a driver for CUDA 13.0"):
        assert part in str(error.value)
    with pytest.raises(UserError, match="built for CPUs; install a CUDA build of torch"):
        on(replace(with_cards(), built_for=None), "cuda")


def test_a_card_that_is_taken_is_named_with_what_leaves_it_out(on: Found) -> None:
    found = on(with_cards(card(problem=BUSY), card()), "auto")
    with pytest.raises(UserError) as error:
        found.number(None)
    assert f"device 0 (a card) cannot be used: {BUSY}" in str(error.value)
    assert "CUDA_VISIBLE_DEVICES=1" in str(error.value)
    assert on(with_cards(card(), card(problem=BUSY)), "auto").number(1) == 1, "the other one is not asked for"


def test_more_devices_than_cards_are_refused(on: Found) -> None:
    with pytest.raises(UserError, match=r"devices is 3, and torch sees 2 .*; give --devices 2"):
        on(with_cards(card(), card()), "cuda").number(3)


def test_cards_of_this_machine_say_nothing_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.pipelines.cuda.look.cuda_state", lambda: with_cards(card()))
    for asked in ("auto", "cuda"):
        found = found_devices(asked, elsewhere=True)
        assert (found.device, found.number(8), found.dtype("auto")) == ("cuda", 8, "bfloat16")


def test_a_machine_without_cards_may_have_nodes_with_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.pipelines.cuda.look.cuda_state", lambda: replace(with_cards(), built_for=None))
    assert found_devices("cuda", elsewhere=True) == FoundDevices("cuda")


def test_older_cards_compute_in_float16(on: Found) -> None:
    found = on(with_cards(card(), card(capability=(7, 5))), "cuda")
    assert found.dtype("auto") == "float16"
    assert found.dtype("float32") == "float32"
