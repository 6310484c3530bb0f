"""Decoding of clips by the autoencoders of diffusers: one row for each class, with the loop of its own `decode`.

Like `hooks`, `packing` and `slices`, this module relies on the internals of diffusers' models;
tests/pipelines/test_clips.py checks it bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor

Chunks = Callable[..., Iterator[Tensor]]
"""Decodes latents (1, channels, t, h, w) with an autoencoder; yields frames (1, channels, frames, rows, columns) in
their order, before `Decoder.finish`. Further inputs of a decoder follow the latents.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Cuts of an autoencoder; rows, then columns. Frames with sides of at most `size` are decoded whole.

    Attributes:
        size: of a tile, in latents.
        stride: from one tile to the next, in latents.
        kept: part of a tile that enters the clip, in the decoder's output; the rest is `blend`ed into the next tile.
        blend: width of that rest, in the decoder's output.
    """

    size: tuple[int, int]
    stride: tuple[int, int]
    kept: tuple[int, int]
    blend: tuple[int, int]

    def cut(self, latents: Tensor) -> bool:
        """Return whether the frames of a clip are larger than one tile."""
        rows, columns = latents.shape[-2:]
        return rows > self.size[0] or columns > self.size[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Decoding by the autoencoders of a class.

    Attributes:
        whole: decodes a clip without tiles.
        tile: decodes a tile of it.
        finish: the last operation, on chunks or parts of their frames; it looks at no neighbours.
        tiles: where it cuts, if it is told to.
        scales: frames beyond the first for each latent beyond the first, and pixels of a side for each latent.
        latent_channels: the channels of latents.
    """

    whole: Chunks
    tile: Chunks
    finish: Callable[[Any, Tensor], Tensor]
    tiles: Callable[[Any], Tiles]
    scales: Callable[[Any], tuple[int, int]]
    latent_channels: Callable[[Any], int]


def decoder_of(vae: Any) -> Decoder | None:
    """Return the row of an autoencoder; None if its class has no row, or it is set to cut clips in time."""
    return None if getattr(vae, "use_framewise_decoding", False) else ROWS.get(type(vae).__name__)


def _wan(vae: Any, latents: Tensor) -> Iterator[Tensor]:
    yield from _wan_frames(vae, vae.post_quant_conv(latents), lambda latent: latent)


def _wan_tile(vae: Any, latents: Tensor) -> Iterator[Tensor]:
    yield from _wan_frames(vae, latents, vae.post_quant_conv)


def _wan_frames(vae: Any, latents: Tensor, before: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Decode one latent after another; each convolution keeps the last frames that it has seen."""
    vae.clear_cache()
    try:
        for index in range(latents.shape[2]):
            vae._conv_idx = [0]
            latent = before(latents[:, :, index : index + 1])
            yield vae.decoder(latent, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=index == 0)
    finally:
        vae.clear_cache()


def _wan_finish(vae: Any, frames: Tensor) -> Tensor:
    if vae.config.patch_size is not None:
        frames = unpatchify(frames, patch_size=vae.config.patch_size)
    return torch.clamp(frames, min=-1.0, max=1.0)


def _wan_tiles(vae: Any) -> Tiles:
    patch = vae.config.patch_size or 1
    strides = vae.tile_sample_stride_height // patch, vae.tile_sample_stride_width // patch
    return _by_stride(vae, strides, patch)


def _cogvideox(vae: Any, latents: Tensor) -> Iterator[Tensor]:
    """Decode some latents at a time; the first part also takes the remainder."""
    size = vae.num_latent_frames_batch_size
    cache = None
    remaining = latents.shape[2] % size
    for index in range(max(latents.shape[2] // size, 1)):
        part = latents[:, :, size * index + (remaining if index else 0) : size * (index + 1) + remaining]
        if vae.post_quant_conv is not None:
            part = vae.post_quant_conv(part)
        frames, cache = vae.decoder(part, conv_cache=cache)
        yield frames


def _cogvideox_tiles(vae: Any) -> Tiles:
    return _by_overlap(vae, (vae.tile_overlap_factor_height, vae.tile_overlap_factor_width))


def _at_once(vae: Any, latents: Tensor, *given: Any, **named: Any) -> Iterator[Tensor]:
    yield vae.decoder(latents, *given, **named)


def _ltx(vae: Any, latents: Tensor, temb: Tensor | None = None) -> Iterator[Tensor]:
    return _at_once(vae, latents, temb)


def _ltx2(vae: Any, latents: Tensor, temb: Tensor | None = None, causal: bool | None = None) -> Iterator[Tensor]:
    return _at_once(vae, latents, temb, causal=causal)


def _ltx_tiles(vae: Any) -> Tiles:
    return _by_stride(vae, (vae.tile_sample_stride_height, vae.tile_sample_stride_width), 1)


def _hunyuan_tiles(vae: Any) -> Tiles:
    return _by_overlap(vae, (vae.tile_overlap_factor, vae.tile_overlap_factor))


def _by_stride(vae: Any, kept: tuple[int, int], patch: int) -> Tiles:
    ratio = vae.spatial_compression_ratio
    sizes = vae.tile_sample_min_height, vae.tile_sample_min_width
    return Tiles(
        size=(sizes[0] // ratio, sizes[1] // ratio),
        stride=(vae.tile_sample_stride_height // ratio, vae.tile_sample_stride_width // ratio),
        kept=kept,
        blend=(sizes[0] // patch - kept[0], sizes[1] // patch - kept[1]),
    )


def _by_overlap(vae: Any, overlaps: tuple[float, float]) -> Tiles:
    latents = vae.tile_latent_min_height, vae.tile_latent_min_width
    samples = vae.tile_sample_min_height, vae.tile_sample_min_width
    blend = int(samples[0] * overlaps[0]), int(samples[1] * overlaps[1])
    return Tiles(
        size=latents,
        stride=(int(latents[0] * (1 - overlaps[0])), int(latents[1] * (1 - overlaps[1]))),
        kept=(samples[0] - blend[0], samples[1] - blend[1]),
        blend=blend,
    )


def _unchanged(_vae: Any, frames: Tensor) -> Tensor:
    return frames


def _ratios(vae: Any) -> tuple[int, int]:
    return vae.temporal_compression_ratio, vae.spatial_compression_ratio


_WAN = Decoder(
    whole=_wan,
    tile=_wan_tile,
    finish=_wan_finish,
    tiles=_wan_tiles,
    scales=lambda vae: (vae.config.scale_factor_temporal, vae.spatial_compression_ratio),
    latent_channels=lambda vae: int(vae.config.z_dim),
)
_COGVIDEOX = Decoder(
    whole=_cogvideox,
    tile=_cogvideox,
    finish=_unchanged,
    tiles=_cogvideox_tiles,
    scales=lambda vae: (
        int(vae.config.temporal_compression_ratio),
        2 ** (len(vae.config.block_out_channels) - 1),
    ),
    latent_channels=lambda vae: int(vae.config.latent_channels),
)
_LTX = Decoder(
    whole=_ltx,
    tile=_ltx,
    finish=_unchanged,
    tiles=_ltx_tiles,
    scales=_ratios,
    latent_channels=lambda vae: int(vae.config.latent_channels),
)
_LTX_2 = replace(_LTX, whole=_ltx2, tile=_ltx2)
_HUNYUAN_VIDEO_1_5 = Decoder(
    whole=_at_once,
    tile=_at_once,
    finish=_unchanged,
    tiles=_hunyuan_tiles,
    scales=_ratios,
    latent_channels=lambda vae: int(vae.config.latent_channels),
)

ROWS: Mapping[str, Decoder] = {
    "AutoencoderKLCogVideoX": _COGVIDEOX,
    "AutoencoderKLHunyuanVideo15": _HUNYUAN_VIDEO_1_5,
    "AutoencoderKLLTX2Video": _LTX_2,
    "AutoencoderKLLTXVideo": _LTX,
    "AutoencoderKLWan": _WAN,
}
"""Decoders by class of the autoencoder. A class without a row decodes its whole clip at once by its own method."""
