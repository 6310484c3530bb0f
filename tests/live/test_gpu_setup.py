"""On a CUDA device: quantised, offloaded, compiled, and with other kernels of attention, it is stock that is set up so.

Skipped where there is none. Quantised ones need the extra `quantize`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilework
import tiny
from tilework.core.model import ModelSource
from tilework.pipelines.components import weights_of
from tilework.pipelines.cuda.look import cuda_state
from tilework.pipelines.fits.plan import Planner
from tilework.pipelines.loading import load, load_component
from tilework.pipelines.numerics import pin_numerics
from tilework.pipelines.setup.quantize import SCHEMES, parse_schemes
from tilework.worker.models.shared_weights import SharedWeights
from tilework.worker.models.weights import Weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETUPS: dict[str, dict[str, Any]] = {
    "int8": {"quantize": "int8"},
    "fp8": {"quantize": "fp8,text_encoder_2=fp8"},
    "nf4": {"quantize": "nf4"},
    "nvfp4": {"quantize": "nvfp4"},
    "layers": {"offload": "layers"},
    "cudnn": {"attention": "cudnn"},
    "flash": {"attention": "flash"},
    "efficient": {"attention": "efficient"},
    "compiled": {"compiles": True},
}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("flux")
    tiny.save(tiny.build_flux(), directory, "flux")
    return directory


def source_of(directory: Path, **setup: Any) -> ModelSource:
    """The source of a model that is set up so; skips the test without the library that quantises, or such a card."""
    schemes = parse_schemes(setup.pop("quantize")) if "quantize" in setup else ()
    for _, scheme in schemes:
        pytest.importorskip(SCHEMES[scheme].package)
        if torch.cuda.get_device_capability() < (SCHEMES[scheme].capability or (0, 0)):
            pytest.skip(f"{scheme} needs a newer card")
    return ModelSource(path=str(directory), device="cuda", dtype="bfloat16", quantize=schemes, **setup)


def test_the_card_is_found_by_another_process() -> None:
    state = cuda_state()
    assert not state.reason_against
    assert len(state.cards) == torch.cuda.device_count()
    assert all(card.total_bytes >= card.free_bytes > 0 for card in state.cards)


@pytest.mark.parametrize("name", SETUPS)
def test_it_is_the_stock_pipeline_that_is_set_up_so(flux: Path, name: str) -> None:
    source = source_of(flux, **SETUPS[name])
    stock = tilework.reference(str(flux), device="cuda", dtype="bfloat16", **SETUPS[name])
    try:
        drawn = tiny.run_stock(stock, tiny.spec())
        family = load(source)
        state = tiny.begin(family, tiny.spec())
        for latents in drawn.latents:
            tiny.iterate(family, state)
            assert torch.equal(state.latents, latents)
            state = tiny.move(family, family, state)
        assert np.array_equal(tiny.pixels(tiny.decode(family, state)), drawn.pixels)
    finally:
        pin_numerics(1)


@pytest.mark.parametrize("quantize", SCHEMES)
def test_quantised_weights_take_what_is_planned_and_come_and_go(flux: Path, tmp_path: Path, quantize: str) -> None:
    source = source_of(flux, quantize=quantize)
    family = load(source)
    transformer = family.modules["transformer"]
    planned = {one.name: one.num_bytes for one in Planner.of(str(flux)).plan(source, 0).components}
    assert planned["transformer"] == pytest.approx(sum(one.nbytes for one in weights_of(transformer)), rel=0.02)
    expected = drawn_by(family)
    weights = Weights(SharedWeights(tmp_path))
    component = weights.add(transformer, lambda: load_component(source, "transformer"))
    assert sum(one.numel() for one in weights_of(transformer)) == 0
    for _ in weights.loading(component.digest):
        pass
    assert np.array_equal(drawn_by(family), expected)


def drawn_by(family: Any) -> Any:
    state = tiny.begin(family, tiny.spec())
    for _ in range(tiny.spec().steps):
        tiny.iterate(family, state)
    return tiny.pixels(tiny.decode(family, state))
