"""Decoding of a clip to pixels of 8 bits, with only a part of it in full precision at a time.

diffusers decodes a causal clip latent by latent, but joins all frames before it makes pixels of them; with tiles it
keeps all of these, too, until the last one is decoded. Both grow with the number of frames. Pixels depend on each
value alone, and the seams of tiles on the edges of two. So here frames become pixels as soon as they are decoded, and
of a tile only its edges stay. All numbers are those of the stock call, bit for bit.

Rejected: all tiles of a frame first, which would keep what a causal decoder keeps from frame to frame for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tilework.core.comm import Comm
from tilework.pipelines.bands.bands import in_bands
from tilework.pipelines.bands.decoders import draws_noise
from tilework.pipelines.bands.group import DecodeGroup
from tilework.pipelines.clips.decoders import Decoder, Tiles

Pixels = Callable[[Tensor], Tensor]
"""Makes pixels (frames, rows, columns, 3) of 8 bits from decoded frames (1, 3, frames, rows, columns)."""


def decode(
    decoder: Decoder, vae: Any, pixels: Pixels, latents: Tensor, *given: Any, comm: Comm | None = None, **named: Any
) -> Tensor:
    """Decode latents (1, channels, t, h, w) to pixels (frames, rows, columns, 3) of 8 bits, on the CPU.

    `given` and `named` are the further arguments of the autoencoder's `decode`. The clip is cut into tiles if `vae` is
    set to that (`enable_tiling`) and its frames are larger than one.

    The ranks of a `comm` share the work, and each gets the whole clip: tiles are dealt out among them, which changes no
    bit; without tiles each has a band of rows (`bands`). Clips that a group cannot share are decoded whole by each
    rank.

    Raises:
        GroupBroken: a rank is lost.
    """
    if vae.use_tiling and decoder.tiles(vae).cut(latents):
        group = DecodeGroup(None if draws_noise(vae) else comm, latents.device)
        return _tiled(decoder, vae, pixels, group, latents, *given, **named)
    with in_bands(vae, comm, latents) as bands:
        chunks = decoder.whole(vae, bands.own(latents), *given, **named)
        frames = torch.cat([one for chunk in chunks for one in _frames(decoder, vae, pixels, chunk)])
        return bands.joined(frames, dim=1)


def _tiled(
    decoder: Decoder, vae: Any, pixels: Pixels, group: DecodeGroup, latents: Tensor, *given: Any, **named: Any
) -> Tensor:
    """Decode tile by tile, each with all its frames: so what a decoder keeps between frames exists for one tile only.

    Ranks decode a tile each at the same time. The tiles are blended in order, one after another, as stock does.
    """
    tiles = decoder.tiles(vae)
    tops, lefts = (range(0, latents.shape[dim], stride) for dim, stride in zip((3, 4), tiles.stride, strict=True))
    places = [(top, left) for top in tops for left in lefts]
    above: list[Tensor | None] = [None] * len(lefts)
    beside: Tensor | None = None
    rows: list[Tensor] = []
    row: list[Tensor] = []
    for first in range(0, len(places), group.size):
        turn = places[first : first + group.size]
        tile: Tensor | None = None
        if group.rank < len(turn):
            top, left = turn[group.rank]
            part = latents[:, :, :, top : top + tiles.size[0], left : left + tiles.size[1]]
            tile = _joined(decoder.tile(vae, part, *given, **named))
        for root in range(len(turn)):
            column = (first + root) % len(lefts)
            blended = None
            if tile is not None and root == group.rank:
                blended = tile = _blended(vae, tiles, tile, above[column], beside if column else None)
            beside = group.of(root, None if blended is None else _edge(blended, 4, tiles.blend[1]))
            above[column] = group.of(root, None if blended is None else _edge(blended, 3, tiles.blend[0]))
        kept = None if tile is None else tile[:, :, :, : tiles.kept[0], : tiles.kept[1]]
        made = None if kept is None else torch.cat(list(_frames(decoder, vae, pixels, kept)))
        tile = blended = kept = None  # Freed before the next one is decoded.
        for root in range(len(turn)):
            row.append(group.of(root, made if root == group.rank else None))
            if len(row) == len(lefts):
                rows.append(torch.cat(row, dim=2))
                row.clear()
    return torch.cat(rows, dim=1)


def _edge(tile: Tensor, dim: int, width: int) -> Tensor:
    """Return the last rows or columns of a tile, in memory of their own."""
    return tile.narrow(dim, max(0, tile.shape[dim] - width), min(width, tile.shape[dim])).clone()


def _blended(vae: Any, tiles: Tiles, tile: Tensor, above: Tensor | None, beside: Tensor | None) -> Tensor:
    """Blend the edges of the neighbours into a tile, in place."""
    if above is not None:
        tile = vae.blend_v(above, tile, tiles.blend[0])
    if beside is not None:
        tile = vae.blend_h(beside, tile, tiles.blend[1])
    return tile


def _frames(decoder: Decoder, vae: Any, pixels: Pixels, chunk: Tensor) -> Iterator[Tensor]:
    """Return the pixels of a chunk, frame by frame, so that only one frame takes memory on the way."""
    return (pixels(decoder.finish(vae, frame)) for frame in torch.split(chunk, 1, dim=2))


def _joined(chunks: Iterable[Tensor]) -> Tensor:
    whole = list(chunks)
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim=2)
