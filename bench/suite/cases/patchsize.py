"""What smaller patches than necessary cost a packed batch in throughput, and what they do to its pictures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from suite import denoisers
from suite.case import Check, Finding, Note, Table
from suite.similarity import psnr_db, ssim
from suite.stats import extremes, median
from tilework.core.packing import Pack, Reuse, Size
from tilework.patches.layout import PatchLayout, pack
from tilework.pipelines.families.latent_state import LatentState
from tilework.pipelines.loading import quiet
from tilework.pipelines.staged import StagedPipeline

GUIDANCE = 5.0
PASSES = 2  # Of guidance.
CELL_PX = 8  # Of a latent.
Step = Callable[[Sequence[LatentState]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSize:
    """Denoisers of half a million random weights on one thread, float32.

    Squares with the sides of each of `batches`, in pixels, are denoised in `steps`: one by one, and packed with the
    largest patch, half of it, and so on, `halvings` times.
    """

    families: tuple[str, ...] = ("sdxl", "sd3")
    batches: tuple[tuple[int, ...], ...] = ((512, 768, 1024), (1024, 1024))
    halvings: int = 3
    steps: int = 4

    @classmethod
    def make(cls, quick: bool) -> PatchSize:
        return cls(batches=((128, 192, 256), (256, 256)), halvings=1, steps=3) if quick else cls()

    def measure(self, note: Note) -> Finding:
        torch.set_num_threads(1)
        quiet()
        found = [self._batch(name, sides, note) for name in self.families for sides in self.batches]
        return Finding(
            checks=tuple(check for check, _ in found), method=self._method(), tables=tuple(table for _, table in found)
        )

    def _batch(self, name: str, sides: tuple[int, ...], note: Note) -> tuple[Check, Table]:
        family = denoisers.build(name)
        patches = [math.gcd(*sides) >> times for times in range(self.halvings + 1)]
        ways: list[Step] = [_one_by_one(family), *(_packed(family, patch // CELL_PX) for patch in patches)]
        listed = ", ".join(map(str, sides))
        note(f"{name}, {listed} px")
        seconds, pictures = self._denoise(family, sides, ways)
        stock, largest, rows, worst_db = pictures[0], seconds[1], [], []
        for index, (patch, latents) in enumerate(zip(patches, pictures[1:], strict=True), start=1):
            psnrs = [psnr_db(*pair) for pair in zip(latents, stock, strict=True)]
            ssims = [ssim(*pair) for pair in zip(latents, stock, strict=True)]
            worst_db.append(min(psnrs))
            rows.append(
                (
                    f"{patch} px",
                    str(PASSES * sum((side // patch) ** 2 for side in sides)),
                    f"{median(seconds[index]):.2f}",
                    _ratio(largest, seconds[index]),
                    _ratio(seconds[0], seconds[index]),
                    f"{min(psnrs):.1f}",
                    f"{min(ssims):.6f}",
                )
            )
        check = Check(
            what=f"{name}, {listed} px: PSNR at the worst patch size",
            measured=extremes(worst_db, min),
            low=90,
            unit="dB",
        )
        title = f"{name}, {listed} px together; one by one a step takes {median(seconds[0]):.2f} s"
        columns = ("patch", "patches", "step in s", "throughput", "over one by one", "PSNR in dB", "SSIM")
        return check, Table(title=title, columns=columns, rows=tuple(rows))

    def _denoise(
        self, family: StagedPipeline, sides: Sequence[int], ways: Sequence[Step]
    ) -> tuple[list[list[float]], list[list[torch.Tensor]]]:
        """Of each way the processor time of each step but the first, and each request's latents after the last."""
        batches = [
            [denoisers.begin(family, side, side, GUIDANCE, seed, self.steps) for seed, side in enumerate(sides)]
            for _ in ways
        ]
        seconds: list[list[float]] = [[] for _ in ways]
        for _ in range(self.steps):
            for way, states, taken in zip(ways, batches, seconds, strict=True):
                start_s = time.thread_time()
                predictions = way(states)
                taken.append(time.thread_time() - start_s)
                for state, prediction in zip(states, predictions, strict=True):
                    family.advance(state, prediction)
        return [taken[1:] for taken in seconds], [[state.latents for state in states] for states in batches]

    def _method(self) -> tuple[str, ...]:
        return (
            "Throughput: that of the largest patch is 1; medians of the ratios of neighbouring steps, with their "
            "extremes. The ways take turns step by step; the first step of each is not timed.",
            "Time is processor time of the one thread, so what else runs on the machine counts little.",
            "One by one: a forward pass for each request (for both halves of its guidance at once). The patches "
            "counted are those of both halves.",
            "PSNR and SSIM: of the latents after all steps, against those of one by one; the worst request. Peak: the "
            "range of the latter. Nothing is rounded to 8 bits, which would hide differences.",
            "With several pictures of one size the largest patch is the picture: the stock forward, with more rows.",
            "Weights are random, so this is about time and rounding, not about how pictures look.",
        )


def _one_by_one(family: StagedPipeline) -> Step:
    return lambda states: [family.predict([state])[0] for state in states]


def _packed(family: StagedPipeline, cells: int) -> Step:
    packed = _patches_of(cells)
    return lambda states: family.predict(states, packed)


def _patches_of(cells: int) -> Pack:
    """Patches with sides of so many latents, neither more nor less."""

    def packed(sizes: tuple[Size, ...], multiple: int, device: Any, reuses: tuple[Reuse, ...] = ()) -> PatchLayout:
        layout = pack(sizes, multiple, device, cap=cells)
        assert layout.csp.patch == (cells, cells)
        return layout

    return packed


def _ratio(reference_s: Sequence[float], seconds: Sequence[float]) -> str:
    ratios = [other / own for other, own in zip(reference_s, seconds, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
