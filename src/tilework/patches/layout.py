"""A packed batch, as `core.packing.Layout` promises it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from tilework.core.packing import Reuse, RunBlock, Size, choose_patch
from tilework.patches import operators, stitcher
from tilework.patches.csp import AttentionRun, Csp

_MAX_CACHED = 64  # Layouts; a mix stays the same until a request joins or leaves.


class PatchLayout:
    """The operators of a packed batch over its `csp`."""

    def __init__(self, sizes: tuple[Size, ...], csp: Csp) -> None:
        self.sizes = sizes
        self.csp = csp
        self.is_plain, self.leaves_out = csp.is_plain, False

    def arrange(self, items: Sequence[Any]) -> list[Any]:
        return [items[index] for index in self.csp.order]

    def split(self, pictures: Sequence[Tensor]) -> Tensor:
        return self.csp.split(pictures)

    def assemble(self, patches: Tensor) -> list[Tensor]:
        return self.csp.assemble(patches)

    def per_patch(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.csp.owners)

    def convolve(self, convolution: nn.Conv2d, patches: Tensor) -> Tensor:
        return operators.convolve_framed(convolution, operators.with_halo(patches, self.csp))

    def normalise(self, norm: nn.GroupNorm, patches: Tensor) -> Tensor:
        return operators.normalise(norm, patches, self.csp)

    def convolve_activated(self, convolution: nn.Conv2d, norm: nn.GroupNorm, patches: Tensor) -> Tensor:
        return operators.convolve_framed(convolution, stitcher.stitch(norm, patches, self.csp, silu=True))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        queries: Mapping[str, int],
        keys: Mapping[str, int],
    ) -> Tensor:
        known, values = (operators.parts_of(sequence, keys) for sequence in (key, value))
        return operators.attend(query, known, values, scale, self._runs, queries)

    def run_block(self, index: int, states: Sequence[Tensor], run: RunBlock, has_text: bool) -> list[Tensor]:
        return run(lambda rows: rows)

    def finish(self) -> None:
        """See `core.packing.Layout`; this one keeps nothing."""

    @cached_property
    def _runs(self) -> list[AttentionRun]:
        return self.csp.runs()


@lru_cache(maxsize=_MAX_CACHED)
def pack(
    sizes: tuple[Size, ...],
    multiple: int,
    device: torch.device,
    reuses: tuple[Reuse, ...] = (),
    cap: int | None = None,
) -> PatchLayout:
    """See `core.packing.Pack`; patches are as large as sizes and `cap` allow (`choose_patch`), and nothing is kept.

    Raises:
        ValueError: the pictures differ in size, and a side is not a multiple of `multiple`.
    """
    assert not reuses
    return PatchLayout(sizes, Csp.of(sizes, choose_patch(sizes, multiple, cap), device))
