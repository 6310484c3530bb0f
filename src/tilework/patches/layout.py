"""A packed batch, as `core.packing.Layout` promises it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from tilework.core.packing import Size, choose_patch
from tilework.patches import operators, stitcher
from tilework.patches.csp import Csp

_MAX_CACHED = 64  # Layouts; a mix stays the same until a request joins or leaves.


class PatchLayout:
    """The operators of a packed batch over its `csp`."""

    def __init__(self, sizes: tuple[Size, ...], csp: Csp) -> None:
        self.sizes = sizes
        self.csp = csp
        self.is_plain = csp.is_plain

    def arrange(self, items: Sequence[Any]) -> list[Any]:
        return [items[index] for index in self.csp.order]

    def split(self, pictures: Sequence[Tensor]) -> Tensor:
        return self.csp.split(pictures)

    def assemble(self, patches: Tensor) -> list[Tensor]:
        return self.csp.assemble(patches)

    def per_patch(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.csp.owners)

    def convolve(self, convolution: nn.Conv2d, patches: Tensor) -> Tensor:
        return operators.convolve(convolution, patches, self.csp)

    def normalise(self, norm: nn.GroupNorm, patches: Tensor) -> Tensor:
        return operators.normalise(norm, patches, self.csp)

    def convolve_activated(self, convolution: nn.Conv2d, norm: nn.GroupNorm, patches: Tensor) -> Tensor:
        return stitcher.convolve_activated(convolution, norm, patches, self.csp)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        queries: Mapping[str, int],
        keys: Mapping[str, int],
    ) -> Tensor:
        return operators.attend(query, key, value, scale, self.csp, queries, keys)


@lru_cache(maxsize=_MAX_CACHED)
def pack(sizes: tuple[Size, ...], multiple: int, device: torch.device, cap: int | None = None) -> PatchLayout:
    """See `core.packing.Pack`; patches are as large as the sizes and `cap` allow (`choose_patch`).

    Raises:
        ValueError: the pictures differ in size, and a side is not a multiple of `multiple`.
    """
    return PatchLayout(sizes, Csp.of(sizes, choose_patch(sizes, multiple, cap), device))
