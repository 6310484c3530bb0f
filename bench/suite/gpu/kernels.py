"""Kernels that each save a pass over memory, beside what is used today."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from suite.case import Check, Finding, Note, Table
from suite.gpu.models import on_gpu
from suite.stats import bootstrap, median
from tilework.core.packing import Size
from tilework.patches.layout import pack

_EPSILON = 1e-6
_PASSES = 2  # Of guidance.

Ways = tuple[Callable[[], object], Callable[[], object]]
"""Today's, and the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Pictures with latents of `sizes` and `latent_channels`, guided, and tokens of four cells and `width`.

    All in bfloat16; `repeats` of `calls` each. On a CPU the kernels are interpreted, and nothing is compared.
    """

    device: str = "cuda"
    sizes: tuple[Size, ...] = ((64, 64), (96, 96), (128, 128))
    latent_channels: int = 16
    width: int = 3072
    repeats: int = 30
    calls: int = 10
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Kernels:
        if not on_gpu():
            return cls(device="cpu", sizes=((8, 8), (16, 16)), latent_channels=4, width=16, repeats=1, calls=1)
        return cls(repeats=5) if quick else cls()

    @torch.no_grad()
    def measure(self, note: Note) -> Finding:
        checks, rows = [], []
        for name, (usual, kernel) in self._ways().items():
            note(name)
            rounds = [(self._seconds(usual), self._seconds(kernel)) for _ in range(1 + self.repeats)][1:]
            ratios = bootstrap([one / other for one, other in rounds], self.seed)
            if self.device == "cuda":
                checks.append(Check(what=f"{name}: today / kernel", measured=ratios, low=1.0))
            rows.append((name, *(f"{1e6 * median(times):.1f}" for times in zip(*rounds, strict=True))))
        return Finding(
            checks=tuple(checks),
            method=(
                "Each by torch's operators, as today, and by one kernel of `bench/suite/kernels`, in turns, until the "
                "device is done. A kernel that passes is to be used; one that does not, to be dropped. On a CPU the "
                "kernels are interpreted: that is a rehearsal.",
            ),
            tables=(Table(title="In µs (median)", columns=("", "today", "kernel"), rows=tuple(rows)),),
            facts={"device": torch.cuda.get_device_name() if self.device == "cuda" else "CPU, interpreted"},
        )

    def _ways(self) -> dict[str, Ways]:
        if self.device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # Read when the kernels are imported.
        from suite.kernels import candidates

        device, dtype = torch.device(self.device), torch.bfloat16
        csp = pack(self.sizes * _PASSES, 4, device).csp
        pictures = [
            torch.randn(self.latent_channels, *size, device=device, dtype=dtype) for size in self.sizes * _PASSES
        ]
        patches = csp.split(pictures)
        places, _ = csp._pixels(csp.patch)
        height, width = csp.patch
        tokens = torch.randn(csp.num_patches, height * width // 4, self.width, device=device, dtype=dtype)
        shift, scale = torch.randn(2, len(pictures), self.width, device=device, dtype=dtype)

        def split() -> Tensor:
            pixels = torch.cat([pictures[index].flatten(1) for index in csp.order], dim=1)
            cut: Tensor = candidates.split(pixels, places, csp.num_patches)
            return cut

        def assemble() -> list[Tensor]:
            pixels = candidates.assemble(patches.flatten(2), places)
            areas = [pictures[index].shape[1] * pictures[index].shape[2] for index in csp.order]
            return [piece.clone() for piece in pixels.split_with_sizes(areas, dim=1)]

        def modulate() -> Tensor:
            of_patch = [rows.index_select(0, csp.owners)[:, None] for rows in (shift, scale)]
            modulated: Tensor = layer_norm(tokens, (self.width,), eps=_EPSILON) * (1 + of_patch[1]) + of_patch[0]
            return modulated

        return {
            "split": (lambda: csp.split(pictures), split),
            "assemble": (lambda: csp.assemble(patches), assemble),
            "modulation": (
                modulate,
                lambda: candidates.modulate(tokens, shift, scale, csp.owners, _EPSILON),
            ),
        }

    def _seconds(self, way: Callable[[], object]) -> float:
        """Of one call, of several that follow each other."""
        self._finish()
        start_s = time.perf_counter()
        for _ in range(self.calls):
            way()
        self._finish()
        return (time.perf_counter() - start_s) / self.calls

    def _finish(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
