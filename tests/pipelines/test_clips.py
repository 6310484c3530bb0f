"""Clips decoded part by part and tile by tile are those of the stock call, within the memory that was planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.video_processor import VideoProcessor
from suite.allocated import peak_bytes
from torch import Tensor

import tiny
from quick import quick
from tilework.pipelines.clips.decoders import ROWS, Decoder, decoder_of
from tilework.pipelines.clips.decoding import decode
from tilework.pipelines.clips.memory import decode_bytes
from tilework.pipelines.clips.undecoded import Undecoded, pixels_of
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from zoo import requests
from zoo.autoencoders import kl_wan
from zoo.cogvideox import kl_cogvideox
from zoo.hunyuan import kl_hunyuan
from zoo.ltx import kl_ltx
from zoo.ltx2 import kl_ltx2
from zoo.registry import ZOO, build


def kl_wan_patched() -> Any:
    """That of Wan 2.2 with five thousand million weights, which halves once more."""
    sizes = {"z_dim": 16, "in_channels": 12, "out_channels": 12, "is_residual": True}
    return kl_wan(**sizes, patch_size=2, scale_factor_spatial=16)


def kl_hunyuan15() -> Any:
    sizes = {"block_out_channels": (8, 8, 8, 8, 8), "layers_per_block": 1}
    return diffusers.AutoencoderKLHunyuanVideo15(latent_channels=4, **sizes)


BUILDERS: dict[str, Callable[[], Any]] = {
    "wan": kl_wan,
    "wan-patched": kl_wan_patched,
    "cogvideox": kl_cogvideox,
    "ltx": kl_ltx,
    "ltx-timed": lambda: kl_ltx(timed=True),
    "ltx2": kl_ltx2,
    "hunyuan-video15": kl_hunyuan15,
}


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> Iterator[None]:
    tiny.prepare()
    with torch.no_grad():
        yield


def built(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
    torch.manual_seed(0)
    vae = BUILDERS[name]().eval().to(dtype)
    decoder = decoder_of(vae)
    assert decoder is not None
    return vae, decoder


def with_tiles(vae: Any, latents: int) -> None:
    """Let it decode in tiles of so many latents; they overlap by a quarter or more."""
    vae.enable_tiling()
    _, side = decoder_of(vae).scales(vae)  # type: ignore[union-attr]
    for name in ("height", "width"):
        setattr(vae, f"tile_sample_min_{name}", latents * side)
        if hasattr(vae, f"tile_latent_min_{name}"):
            setattr(vae, f"tile_latent_min_{name}", latents)
        if hasattr(vae, f"tile_sample_stride_{name}"):
            setattr(vae, f"tile_sample_stride_{name}", latents * side * 3 // 4)
        if hasattr(vae, f"tile_overlap_factor_{name}"):
            setattr(vae, f"tile_overlap_factor_{name}", 0.25)


def latents_of(vae: Any, decoder: Decoder, frames: int, rows: int, columns: int) -> Tensor:
    temporal, _ = decoder.scales(vae)
    shape = 1, decoder.latent_channels(vae), 1 + (frames - 1) // temporal, rows, columns
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(vae.dtype)


def told(vae: Any) -> tuple[Tensor, ...]:
    return (torch.tensor([0.05]),) if vae.config.get("timestep_conditioning") else ()


def pictures(frames: Tensor) -> Tensor:
    return pixels_of(VideoProcessor().postprocess_video(frames, "pil")[0])


def stock(vae: Any, latents: Tensor) -> Tensor:
    torch.manual_seed(2)  # Some decoders draw noise.
    return pictures(vae.decode(latents, *told(vae), return_dict=False)[0])


def in_parts(vae: Any, latents: Tensor, *given: Tensor) -> Tensor:
    torch.manual_seed(2)
    decoder = decoder_of(vae)
    assert decoder is not None
    return decode(decoder, vae, pictures, latents, *(given or told(vae)))


def test_there_is_a_model_for_each_row() -> None:
    assert {type(build()).__name__ for build in BUILDERS.values()} == ROWS.keys()


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("more", [0, 2])
def test_a_clip_in_parts_is_the_stock_clip(name: str, more: int) -> None:
    vae, decoder = built(name)
    latents = latents_of(vae, decoder, 1 + more * decoder.scales(vae)[0], 3, 2)
    assert torch.equal(in_parts(vae, latents), stock(vae, latents))


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("wan", (4, 5)),
        ("wan", (7, 4)),
        *(pytest.param(name, (5, 6), marks=pytest.mark.exhaustive) for name in BUILDERS),
    ],
)
def test_a_clip_in_tiles_is_the_stock_clip_in_tiles(name: str, sides: tuple[int, int]) -> None:
    """Also where the last tile is no wider than a seam, and where one side needs no tiles."""
    vae, decoder = built(name)
    latents = latents_of(vae, decoder, 1 + decoder.scales(vae)[0], *sides)
    whole = stock(vae, latents)
    with_tiles(vae, 4)
    expected = stock(vae, latents)
    assert not torch.equal(expected, whole), "the tiles show"
    assert torch.equal(in_parts(vae, latents), expected)


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_half_precision_is_the_same(name: str) -> None:
    vae, decoder = built(name, torch.bfloat16)
    latents = latents_of(vae, decoder, 5, 2, 5)
    assert torch.equal(in_parts(vae, latents), stock(vae, latents))
    with_tiles(vae, 4)
    assert torch.equal(in_parts(vae, latents), stock(vae, latents))


def test_small_frames_are_not_cut() -> None:
    vae, decoder = built("wan")
    latents = latents_of(vae, decoder, 5, 4, 4)
    whole = stock(vae, latents)
    with_tiles(vae, 4)
    assert torch.equal(in_parts(vae, latents), whole)


def test_an_interrupted_decode_keeps_no_frames_of_the_last_one() -> None:
    vae, decoder = built("wan")
    chunks = decoder.whole(vae, latents_of(vae, decoder, 9, 2, 2))
    next(chunks)
    assert any(isinstance(one, Tensor) for one in vae._feat_map)
    chunks.close()
    assert not any(isinstance(one, Tensor) for one in vae._feat_map)


@pytest.mark.parametrize("name", ["wan21", "cosmos25", pytest.param("cosmos2-image", marks=pytest.mark.exhaustive)])
def test_a_stock_call_gets_its_clip_as_it_wants_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clip that the stock call changes, or makes no pictures of, is decoded as a whole; no frame is made twice."""
    model, made = ZOO[name], StockPipeline(build(ZOO[name]), name, {}, "")
    asked: list[Undecoded] = []
    pixels = Undecoded.pixels
    monkeypatch.setattr(Undecoded, "pixels", lambda one, *args: (asked.append(one), pixels(one, *args))[1])
    spec = requests.spec_of(model, made, 1)
    found = requests.alone(made, spec)
    assert np.array_equal(found, requests.stock_pixels(model, build(model), 1))
    assert len(asked) == (name == "wan21")


def measured(vae: Any, frames: int, rows: int, columns: int) -> tuple[int, int]:
    """The bytes that a decode takes, as planned and as allocated."""
    decoder = decoder_of(vae)
    assert decoder is not None
    latents, side = latents_of(vae, decoder, frames, rows, columns), decoder.scales(vae)[1]
    planned = decode_bytes(vae, frames, rows * side, columns * side)
    assert planned is not None
    given = told(vae)
    return planned, peak_bytes(lambda: in_parts(vae, latents, *given))


_HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Other CPUs compute in float32 what is in bfloat16, and take memory for both."""


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not _HAS_BF16, reason="computes in float32")),
    ],
)
@pytest.mark.parametrize("name", quick(("ltx",), BUILDERS))
def test_a_decode_takes_no_more_memory_than_planned(name: str, dtype: torch.dtype) -> None:
    vae, _ = built(name, dtype)
    planned, taken = measured(vae, 9, 2, 5)
    assert 0.3 * planned <= taken <= planned
    with_tiles(vae, 4)
    planned, taken = measured(vae, 9, 2, 5)
    assert 0.3 * planned <= taken <= planned


def test_more_frames_take_no_more_than_their_pixels() -> None:
    vae, _ = built("wan")
    few, many = (decode_bytes(vae, frames, 16, 16) for frames in (17, 81))
    assert few is not None
    assert many is not None
    assert 0 < many - few <= 3 * (81 - 17) * 16 * 16 * 3, "8 bits twice, and the latents"


@pytest.mark.exhaustive
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("name", ["wan", "cogvideox", "ltx", "hunyuan-video15"])
def test_long_clips_stay_within_their_plan(name: str, tiled: bool) -> None:
    vae, _ = built(name)
    if tiled:
        with_tiles(vae, 4)
    for frames in (17, 49, 81):
        planned, taken = measured(vae, frames, 4, 6)
        assert 0.3 * planned <= taken <= planned


def test_a_class_without_a_row_has_no_plan() -> None:
    assert decode_bytes(kl_hunyuan(), 9, 64, 64) is None
