"""A clip from latents to pixels of 8 bits, of which no more than a part is ever there in full precision.

diffusers decodes a causal clip latent by latent, but joins all frames before it makes pixels of them; with tiles it
keeps all of these, too, until the last one is decoded. Both grow with the number of frames. Pixels are made of each
value alone, and the seams of tiles of the edges of two. So here frames become pixels as soon as they are decoded, and
of a tile its edges stay. All numbers are those of the stock call, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tilework.pipelines.clips.decoders import Decoder, Tiles

Pixels = Callable[[Tensor], Tensor]
"""Makes pixels (frames, rows, columns, 3) of 8 bits of decoded frames (1, 3, frames, rows, columns)."""


def decode(decoder: Decoder, vae: Any, pixels: Pixels, latents: Tensor, *given: Any, **named: Any) -> Tensor:
    """The clip of latents (1, channels, t, h, w) as pixels (frames, rows, columns, 3) of 8 bits, on the CPU.

    `given` and `named` are what the autoencoder's `decode` takes beside them. It is cut into tiles if `vae` is set to
    that (`enable_tiling`) and its frames are larger than one.
    """
    if vae.use_tiling and decoder.tiles(vae).cut(latents):
        return _tiled(decoder, vae, pixels, latents, *given, **named)
    chunks = decoder.whole(vae, latents, *given, **named)
    return torch.cat([one for chunk in chunks for one in _frames(decoder, vae, pixels, chunk)])


def _tiled(decoder: Decoder, vae: Any, pixels: Pixels, latents: Tensor, *given: Any, **named: Any) -> Tensor:
    """Tile by tile, each with all its frames: what a decoder keeps from frame to frame is there for one tile only."""
    tiles = decoder.tiles(vae)
    rows: list[Tensor] = []
    above: list[Tensor | None] = [None] * latents.shape[4]
    for top in range(0, latents.shape[3], tiles.stride[0]):
        row: list[Tensor] = []
        below: list[Tensor | None] = []
        beside: Tensor | None = None
        for index, left in enumerate(range(0, latents.shape[4], tiles.stride[1])):
            part = latents[:, :, :, top : top + tiles.size[0], left : left + tiles.size[1]]
            tile = _blended(vae, tiles, _joined(decoder.tile(vae, part, *given, **named)), above[index], beside)
            beside = tile[..., max(0, tile.shape[4] - tiles.blend[1]) :].clone()
            below.append(tile[:, :, :, max(0, tile.shape[3] - tiles.blend[0]) :].clone())
            tile = tile[:, :, :, : tiles.kept[0], : tiles.kept[1]]
            row.append(torch.cat(list(_frames(decoder, vae, pixels, tile))))
            del tile  # Before the next one is decoded.
        rows.append(torch.cat(row, dim=2))
        above = below
    return torch.cat(rows, dim=1)


def _blended(vae: Any, tiles: Tiles, tile: Tensor, above: Tensor | None, beside: Tensor | None) -> Tensor:
    """A tile, in its place, that goes over from the edges of its neighbours into its own."""
    if above is not None:
        tile = vae.blend_v(above, tile, tiles.blend[0])
    if beside is not None:
        tile = vae.blend_h(beside, tile, tiles.blend[1])
    return tile


def _frames(decoder: Decoder, vae: Any, pixels: Pixels, chunk: Tensor) -> Iterator[Tensor]:
    """The pixels of a chunk, frame by frame: what they take on the way is that of one."""
    return (pixels(decoder.finish(vae, frame)) for frame in torch.split(chunk, 1, dim=2))


def _joined(chunks: Iterable[Tensor]) -> Tensor:
    whole = list(chunks)
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim=2)
