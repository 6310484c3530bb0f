"""The decode of a clip: what memory it takes of what was planned, and its time, part by part and by the stock call."""

from __future__ import annotations

from dataclasses import dataclass

import diffusers
import torch

from suite.case import Check, Finding, Note, Table
from suite.cases.clipmemory import at_once, in_parts
from suite.gpu.fits import Meter
from suite.gpu.models import on_gpu
from suite.stats import extremes, median
from tilework.pipelines.clips.decoders import decoder_of
from tilework.pipelines.clips.memory import decode_bytes
from tilework.pipelines.loading import quiet
from tilework.pipelines.numerics import pin_numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipDecodes:
    """The autoencoder of Wan 2.1 with random weights, and clips of `width` by `height` with `frames` each."""

    device: str
    dtype: str
    width: int
    height: int
    frames: tuple[int, ...]
    rounds: int
    base_dim: int

    @classmethod
    def make(cls, quick: bool) -> ClipDecodes:
        if not on_gpu():
            return cls(device="cpu", dtype="float32", width=48, height=32, frames=(5,), rounds=1, base_dim=8)
        frames = (17,) if quick else (17, 49, 81)
        return cls(device="cuda", dtype="bfloat16", width=832, height=480, frames=frames, rounds=3, base_dim=96)

    @torch.no_grad()
    def measure(self, note: Note) -> Finding:
        pin_numerics(threads=1)
        quiet()
        device, dtype = torch.device(self.device), getattr(torch, self.dtype)
        vae = diffusers.AutoencoderKLWan(base_dim=self.base_dim).eval().to(device, dtype)
        decoder, meter = decoder_of(vae), Meter(torch, self.device)
        assert decoder is not None
        temporal, side = decoder.scales(vae)
        checks, rows = list[Check](), list[tuple[str, ...]]()
        for frames in self.frames:
            shape = 1, decoder.latent_channels(vae), 1 + (frames - 1) // temporal
            latents = torch.randn(*shape, self.height // side, self.width // side).to(device, dtype)
            planned = decode_bytes(vae, frames, self.height, self.width, tensors_alone=True)
            assert planned is not None
            ways = {"in parts": in_parts, "by the stock call": at_once}
            taken = {name: [meter.run(way, vae, latents)[1:] for _ in range(self.rounds)] for name, way in ways.items()}
            most = {name: max(peak for peak, _ in one) for name, one in taken.items()}
            seconds = {name: median([took for _, took in one]) for name, one in taken.items()}
            note(f"{frames} frames: {seconds['in parts']:.2f} s, stock {seconds['by the stock call']:.2f} s")
            if self.device == "cuda":
                ratio = extremes([planned / most["in parts"]])
                checks.append(Check(what=f"{frames} frames: planned / taken", measured=ratio, low=0.95, high=1.05))
            cells = [f"{most[name] / 1e9:.2f} GB, {seconds[name]:.2f} s" for name in ways]
            rows.append((str(frames), f"{planned / 1e9:.2f} GB", *cells))
        return Finding(
            checks=tuple(checks),
            method=(
                "Planned from shapes alone, tensors without what kernels take beside them. Taken: the most that the "
                "allocator has, less what it has before. On a CPU no memory is measured: that is a rehearsal.",
            ),
            tables=(
                Table(
                    title=f"Wan 2.1, {self.width}x{self.height}, {self.dtype}",
                    columns=("frames", "planned", "in parts", "by the stock call"),
                    rows=tuple(rows),
                ),
            ),
        )
