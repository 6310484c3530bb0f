"""Random pictures for the tests of patches, and how close two results must be."""

from __future__ import annotations

import torch
from torch import Tensor

from tilework.core.packing import Size

TOLERANCE = 2e-6


def draw(sizes: tuple[Size, ...], seed: int, channels: int = 4) -> list[Tensor]:
    """Pictures whose means and variances differ, also between the parts of each."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(channels, *size, generator=generator) * (1 + index) + torch.linspace(-2, 2, size[1]) * index
        for index, size in enumerate(sizes)
    ]


def assert_all_close(results: list[Tensor], references: list[Tensor]) -> None:
    for result, reference in zip(results, references, strict=True):
        assert result.shape == reference.shape
        assert (result - reference).abs().max() <= TOLERANCE * max(1.0, float(reference.abs().max()))
