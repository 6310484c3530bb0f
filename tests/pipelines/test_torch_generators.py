"""What a stock call draws from torch's own generators, on the device that computes; cards are emulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from tilework.core.model import ModelSource
from tilework.pipelines.loading import load_stock
from tilework.pipelines.stock.coroutine import StockCall

CPU, CARD = torch.device("cpu"), torch.device("cuda")
SEED = 5


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """The generators of two cards, of which the process uses the second. There are none before CUDA is initialised."""
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(
        torch.cuda, "init", lambda: monkeypatch.setattr(torch.cuda, "default_generators", tuple(generators))
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return generators


class Drawing:
    """A pipeline that draws from torch's own generator of the CPU and from one of another place."""

    components: dict[str, Any] = {}

    def __init__(self, device: torch.device, other: torch.Generator) -> None:
        self._execution_device, self._other = device, other

    def __call__(self, generator: torch.Generator) -> list[Tensor]:
        return [torch.randn(3), torch.randn(3, generator=self._other)]


def drawn_by(device: torch.device, other: torch.Generator) -> list[Tensor]:
    call = StockCall(Drawing(device, other), {"generator": torch.Generator().manual_seed(SEED)})
    assert call.resume(None) is None
    result: list[Tensor] = call.result
    return result


@pytest.mark.parametrize("device", [CARD, torch.device("cuda", 1)], ids=["current", "by index"])
def test_what_is_drawn_on_the_card_that_computes_follows_from_the_seed(
    cards: list[torch.Generator], device: torch.device
) -> None:
    before = [one.get_state() for one in (torch.default_generator, *cards)]
    expected = torch.randn(3, generator=torch.Generator().manual_seed(SEED))
    for _ in range(2):
        assert all(torch.equal(one, expected) for one in drawn_by(device, cards[1]))
    assert all(map(torch.equal, before, [one.get_state() for one in (torch.default_generator, *cards)]))


def test_a_machine_without_cards_is_asked_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("CUDA was touched")

    for name in ("init", "current_device", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, fail)
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    drawn_by(CPU, torch.Generator())


def test_a_pipeline_computes_where_its_layers_are_brought_to(cards: list[torch.Generator], tmp_path: Path) -> None:
    """Not where the weights of its components lie, of which some say the CPU then."""
    tiny.prepare()
    tiny.save(tiny.build_flux(), tmp_path, "flux")
    pipeline = load_stock(ModelSource(path=str(tmp_path)))
    assert len(StockCall(pipeline, {}).torch_states) == 1
    for name in ("text_encoder", "text_encoder_2"):  # As a pipeline whose denoiser stays on the CPU, or is of no hook.
        _bring_layers(pipeline.components[name])
    assert len(StockCall(pipeline, {}).torch_states) == 2


def _bring_layers(module: torch.nn.Module) -> None:
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(module, onload_device=CARD, offload_device=CPU, offload_type="leaf_level")
