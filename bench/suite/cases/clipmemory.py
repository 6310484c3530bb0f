"""The memory of a clip's decode: as planned, as allocated, and as the stock call takes it; and the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers.video_processor import VideoProcessor
from torch import Tensor

from suite.allocated import peak_bytes
from suite.case import Check, Finding, Note, Table
from suite.stats import exact, extremes
from tilework.pipelines.clips.decoders import decoder_of
from tilework.pipelines.clips.decoding import decode
from tilework.pipelines.clips.memory import decode_bytes
from tilework.pipelines.clips.undecoded import pixels_of
from tilework.pipelines.loading import quiet

_MB = 1e6
_PIXEL = 3  # Bytes.
LARGE = 1280, 720


def _wan() -> Any:
    return diffusers.AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def _cogvideox() -> Any:
    return diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )


def _ltx() -> Any:
    sizes = {"block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}
    layers = {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5}
    return diffusers.AutoencoderKLLTXVideo(latent_channels=8, **sizes, **layers)


def _hunyuan() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=(8,) * 5, layers_per_block=1)


BUILDERS: dict[str, Callable[[], Any]] = {
    "Wan": _wan,
    "CogVideoX": _cogvideox,
    "LTX": _ltx,
    "HunyuanVideo 1.5": _hunyuan,
}
_CAUSAL = "Wan"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipMemory:
    """Autoencoders with eight channels and random weights, float32, one thread.

    A clip has frames of `rows` by `columns` latents. Tiles have sides of `tile`, and overlap by a quarter.
    """

    frames: tuple[int, ...] = (17, 49, 81)
    rows: int = 4
    columns: int = 6
    tile: int = 4
    pairs: int = 3

    @classmethod
    def make(cls, quick: bool) -> ClipMemory:
        return cls(frames=(5, 17), rows=2, columns=5, pairs=1) if quick else cls()

    @torch.no_grad()
    def measure(self, note: Note) -> Finding:
        torch.set_num_threads(1)
        quiet()
        rows, worst, smaller = list[tuple[str, ...]](), list[float](), list[float]()
        for name in BUILDERS:
            for is_tiled in (False, True):
                for frames in self.frames:
                    note(f"{name}, {frames} frames{', in tiles' if is_tiled else ''}")
                    planned, taken, stock = self._bytes(name, is_tiled, frames)
                    worst.append(taken / planned)
                    smaller.append(taken / stock)
                    how = "tiles" if is_tiled else "whole"
                    amounts = [f"{one / _MB:.2f}" for one in (planned, taken, stock)]
                    rows.append((name, how, str(frames), *amounts, f"{taken / stock:.2f}"))
        ratios = [self._times(is_tiled, note) for is_tiled in (False, True)]
        return Finding(
            checks=(
                Check(what="allocated, over planned: the worst", measured=extremes(worst, max), high=1),
                Check(what="allocated, over stock: the worst", measured=extremes(smaller, max), high=1.001),
                Check(
                    what="bytes planned for a further frame of Wan, over those of its pixels",
                    measured=exact(self._growth()),
                    high=3,
                ),
                Check(what="processor time of Wan as a whole, over stock", measured=extremes(ratios[0]), high=1.05),
                Check(
                    what="processor time of Wan in tiles, over stock in tiles", measured=extremes(ratios[1]), high=1.05
                ),
            ),
            method=(
                f"Frames of {self.rows} by {self.columns} latents, tiles of {self.tile}.",
                "Allocated: by torch's allocator, workspaces of kernels included; without what numpy and Pillow take.",
                "Stock: `decode`, then `postprocess_video` to tensors; its pictures would come on top.",
                f"Planned for Wan 2.1: its configuration alone, bfloat16, {LARGE[0]}x{LARGE[1]}.",
            ),
            tables=(self._table(rows), self._large(note)),
        )

    def _bytes(self, name: str, is_tiled: bool, frames: int) -> tuple[int, int, int]:
        """What a decode takes as planned, as allocated, and as the stock call takes it."""
        vae = self._built(name, is_tiled)
        latents, side = self._latents(vae, frames)
        planned = decode_bytes(vae, frames, self.rows * side, self.columns * side)
        assert planned is not None
        return planned, peak_bytes(lambda: in_parts(vae, latents)), peak_bytes(lambda: at_once(vae, latents))

    def _built(self, name: str, is_tiled: bool) -> Any:
        torch.manual_seed(0)
        vae = BUILDERS[name]().eval()
        if is_tiled:
            vae.enable_tiling()
            _, side = _decoder(vae).scales(vae)
            tile = self.tile
            for attribute in list(vars(vae)):
                sizes = {
                    "tile_latent_min": tile,
                    "tile_sample_min": tile * side,
                    "tile_sample_stride": tile * side * 3 // 4,
                    "tile_overlap_factor": 0.25,
                }
                prefix = next((one for one in sizes if attribute.startswith(one)), None)
                if prefix is not None and "frames" not in attribute:
                    setattr(vae, attribute, sizes[prefix])
        return vae

    def _latents(self, vae: Any, frames: int) -> tuple[Tensor, int]:
        """Latents of a clip, and how many pixels the side of one has."""
        temporal, side = _decoder(vae).scales(vae)
        shape = 1, _decoder(vae).latent_channels(vae), 1 + (frames - 1) // temporal, self.rows, self.columns
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)), side

    def _growth(self) -> float:
        vae, pixels = self._built(_CAUSAL, False), self.rows * self.columns * 64
        few, many = (decode_bytes(vae, one, self.rows * 8, self.columns * 8) for one in (17, 81))
        assert few is not None
        assert many is not None
        return (many - few) / (81 - 17) / (pixels * _PIXEL)

    def _times(self, is_tiled: bool, note: Note) -> list[float]:
        """The time of a decode over that of the stock call, pair by pair."""
        vae, ratios = self._built(_CAUSAL, is_tiled), list[float]()
        latents, _ = self._latents(vae, self.frames[-1])
        for pair in range(self.pairs):
            note(f"times{' in tiles' if is_tiled else ''}, {pair + 1} of {self.pairs}")
            taken = [_seconds(partial(run, vae, latents)) for run in (in_parts, _stock_pixels)]
            ratios.append(taken[0] / taken[1])
        return ratios

    def _table(self, rows: list[tuple[str, ...]]) -> Table:
        columns = ("autoencoder", "", "frames", "planned, MB", "allocated, MB", "stock, MB", "of stock")
        return Table(title="Memory", columns=columns, rows=tuple(rows))

    def _large(self, note: Note) -> Table:
        with torch.device("meta"):
            vae = diffusers.AutoencoderKLWan()
        vae = torch.nn.Module.to(vae, torch.bfloat16)
        note(f"plan of {LARGE[0]}x{LARGE[1]}")
        planned = list[str]()
        for vae.use_tiling in (False, True):
            planned.append(f"{(decode_bytes(vae, self.frames[-1], LARGE[1], LARGE[0]) or 0) / 1e9:.2f}")
        row = str(self.frames[-1]), *planned
        return Table(title="Planned for Wan 2.1", columns=("frames", "whole, GB", "in tiles, GB"), rows=(row,))


def in_parts(vae: Any, latents: Tensor) -> Tensor:
    """The pixels of a clip, of which no more than a part is there in full precision."""
    return decode(_decoder(vae), vae, pictures, latents)


def at_once(vae: Any, latents: Tensor) -> Any:
    """The clip of the stock calls, as a tensor."""
    return VideoProcessor().postprocess_video(vae.decode(latents, return_dict=False)[0], "pt")


def _stock_pixels(vae: Any, latents: Tensor) -> Tensor:
    return pictures(vae.decode(latents, return_dict=False)[0])


def pictures(frames: Tensor) -> Tensor:
    return pixels_of(VideoProcessor().postprocess_video(frames, "pil")[0])


def _decoder(vae: Any) -> Any:
    decoder = decoder_of(vae)
    assert decoder is not None
    return decoder


def _seconds(run: Callable[[], object]) -> float:
    begin = time.process_time()  # One thread, whatever else the machine does.
    run()
    return time.process_time() - begin
