"""Decoding in slices: the same picture as from the whole, for the autoencoder of each family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from tilework.core.model import ModelSource
from tilework.pipelines import slices
from tilework.pipelines.loading import load

BUILDERS = {"sd3": tiny.build_sd3, "flux": tiny.build_flux, "sdxl": tiny.build_sdxl}


@pytest.fixture(scope="module", params=BUILDERS)
def pipeline(request: pytest.FixtureRequest) -> Any:
    tiny.prepare()
    pipeline = BUILDERS[request.param]()
    torch.manual_seed(1)
    for module in pipeline.vae.modules():  # New ones have no effect beyond the statistics.
        if isinstance(module, torch.nn.GroupNorm):
            torch.nn.init.normal_(module.weight, 1.0, 0.3)
            torch.nn.init.normal_(module.bias, 0.0, 0.3)
    return pipeline


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of three rows."""
    monkeypatch.setattr(slices, "_BAND_PIXELS", 1)
    monkeypatch.setattr(slices, "_LEAST_ROWS", 3)


def decoded(vae: Any, latents: torch.Tensor, sliced: bool) -> torch.Tensor:
    with torch.no_grad():
        return slices.decode(vae, latents, sliced)


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (9, 5), (7, 12), (1, 3), (10, 1)])
@pytest.mark.usefixtures("narrow")
def test_bands_make_the_whole_picture(pipeline: Any, rows: int, columns: int) -> None:
    torch.manual_seed(2)
    latents = torch.randn(1, pipeline.vae.config.latent_channels, rows, columns)
    latents[:, :, : rows // 2] += 3  # The bands differ in mean and variance.
    before = latents.clone()
    whole, sliced = (decoded(pipeline.vae, latents, sliced) for sliced in (False, True))
    assert sliced.shape == whole.shape
    assert (sliced - whole).abs().max() <= 1e-5 * max(1.0, float(whole.abs().max()))
    assert torch.equal(latents, before)


def test_bands_of_their_ordinary_size_make_the_whole_picture(pipeline: Any) -> None:
    latents = torch.randn(1, pipeline.vae.config.latent_channels, 40, 24)
    whole, sliced = (decoded(pipeline.vae, latents, sliced) for sliced in (False, True))
    assert (sliced - whole).abs().max() <= 1e-5 * max(1.0, float(whole.abs().max()))


def test_slices_keep_no_earlier_layers(pipeline: Any) -> None:
    latents = torch.randn(1, pipeline.vae.config.latent_channels, 8, 8)
    picture = decoded(pipeline.vae, latents, True)
    assert picture.untyped_storage().nbytes() == picture.numel() * picture.element_size()


@pytest.mark.usefixtures("narrow")
def test_every_family_decodes_in_slices(pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save(pipeline, tmp_path, "tiny")
    family = load(ModelSource(path=str(tmp_path)))
    state = tiny.begin(family, tiny.spec(height=80, width=48))
    tiny.finish(family, state)
    whole = tiny.pixels(tiny.decode(family, state)).astype(int)
    seen = counted(monkeypatch)
    sliced = tiny.pixels(tiny.decode(family, state, sliced=True)).astype(int)
    assert len(seen) > 10
    assert np.abs(sliced - whole).max() <= 1
    assert (sliced != whole).mean() < 1e-3, "but for rounding they are the same"


def test_a_decoder_that_is_built_otherwise_decodes_as_a_whole(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(type(pipeline.vae.decoder.up_blocks[0].resnets[0])):  # type: ignore[misc]
        pass

    latents = torch.randn(1, pipeline.vae.config.latent_channels, 4, 4)
    whole = decoded(pipeline.vae, latents, False)
    monkeypatch.setattr(pipeline.vae.decoder.up_blocks[0].resnets[0], "__class__", Other)
    seen = counted(monkeypatch)
    assert torch.equal(decoded(pipeline.vae, latents, True), whole)
    assert not seen


def counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one for each band that is written."""
    seen: list[None] = []
    write: Callable[..., None] = slices._write
    monkeypatch.setattr(slices, "_write", lambda *args: (seen.append(None), write(*args)))
    return seen
