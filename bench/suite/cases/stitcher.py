"""What comes before a convolution of patches, in one pass and in several, beside a copy of as many bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import silu

from suite.case import Check, Finding, Note, Table
from suite.stats import bootstrap, median
from tilework.core.packing import Size
from tilework.patches.layout import pack
from tilework.patches.operators import normalise, statistics, with_halo
from tilework.patches.stitcher import stitch

PASSES = 2  # Of guidance.
_ALONE = ("stitched alone / copy", "scattered alone / copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stitcher:
    """Pictures with latents of `sizes`, guided; `channels` at each halving of the sides, as SDXL's blocks have.

    On a GPU, in bfloat16, if there is one, otherwise on one thread in float32; `repeats` of `calls` each.
    """

    device: str
    sizes: tuple[Size, ...] = ((64, 64), (96, 96), (128, 128))
    channels: tuple[tuple[int, ...], ...] = ((320, 960), (640, 1920), (1280, 2560))
    groups: int = 32
    repeats: int = 30
    calls: int = 10
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Stitcher:
        if torch.cuda.is_available():
            return cls(device="cuda", repeats=5 if quick else 30)
        return cls(device="cpu", repeats=3 if quick else 20, calls=1)

    @property
    def on_device(self) -> bool:
        return self.device == "cuda"

    def measure(self, note: Note) -> Finding:
        torch.set_num_threads(1)
        checks, rows = [], []
        for level, several in enumerate(self.channels):
            for channels in several:
                note(f"level {level}, {channels} channels")
                check, row = self._shape(level, channels)
                checks.append(check)
                rows.append(row)
        title = "In ms (median); whole: with the statistics, which both ways need"
        columns = ("patches", "statistics", "whole, apart", "whole, stitched", "copy", *_ALONE)
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(Table(title=title, columns=columns, rows=tuple(rows)),),
            facts={"device": torch.cuda.get_device_name() if self.on_device else "CPU, where torch's operators stitch"},
        )

    @torch.no_grad()
    def _shape(self, level: int, channels: int) -> tuple[Check, tuple[str, ...]]:
        device, dtype = torch.device(self.device), torch.bfloat16 if self.on_device else torch.float32
        csp = pack(self.sizes * PASSES, 4, device).csp
        height, width = (side >> level for side in csp.patch)
        patches = torch.randn(csp.num_patches, channels, height, width, device=device, dtype=dtype)
        norm = nn.GroupNorm(self.groups, channels).to(device, dtype)
        stitched = stitch(norm, patches, csp, silu=True)
        target = torch.empty_like(stitched)
        ways: tuple[Callable[[], object], ...] = (
            lambda: statistics(norm, patches, csp),
            lambda: with_halo(silu(normalise(norm, patches, csp)), csp),
            lambda: stitch(norm, patches, csp, silu=True),
            lambda: target.copy_(stitched),
        )
        if self.on_device:
            from suite.kernels.candidates import stitch_scattered

            ways += (
                lambda: stitch_scattered(
                    patches, *statistics(norm, patches, csp), norm.weight, norm.bias, csp, silu=True
                ),
            )
        rounds = [[self._seconds(way) for way in ways] for _ in range(1 + self.repeats)][1:]
        moments_s, apart_s, whole_s, copy_s, *others_s = (median(times) for times in zip(*rounds, strict=True))
        alone = [(seconds - moments_s) / copy_s for seconds in (whole_s, *others_s)]
        shape = "x".join(map(str, patches.shape))
        check = Check(
            what=f"{shape}: apart / stitched, with statistics",
            measured=bootstrap([apart / whole for _, apart, whole, *_ in rounds], self.seed),
            low=1.0 if self.on_device else 0.95,
        )
        return check, (
            shape,
            *(f"{1e3 * value:.3f}" for value in (moments_s, apart_s, whole_s, copy_s)),
            *(f"{ratio:.2f}" for ratio in alone),
            *([] if others_s else ["needs a GPU"]),
        )

    def _seconds(self, way: Callable[[], object]) -> float:
        """Of one call, of several that follow each other."""
        self._finish()
        start_s = time.perf_counter()
        for _ in range(self.calls):
            way()
        self._finish()
        return (time.perf_counter() - start_s) / self.calls

    def _finish(self) -> None:
        if self.on_device:
            torch.cuda.synchronize()

    def _method(self) -> tuple[str, ...]:
        return (
            "Apart: group normalisation with the statistics of whole pictures, SiLU, and a copy with the pixels around "
            "each patch. Stitched: the same by `patches.stitcher.stitch`, which on a GPU is one kernel, and on a CPU "
            "the same operators with SiLU in place.",
            "Copy: of a tensor as large as the result; the least that a pass can take. Stitched alone: less the "
            "statistics, by medians. Scattered: by a kernel in which patches write their edges into the frames of "
            "their neighbours, as in the paper, instead of fetching theirs.",
            "The ways take turns, after one round of each. Interval: 95% bootstrap of the median of the ratios.",
        )
