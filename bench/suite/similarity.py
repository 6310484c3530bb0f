"""The similarity of two tensors of latents, measured as for pictures; values are floats of any range."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import avg_pool2d

_WINDOW = 8
_K1, _K2 = 0.01, 0.03


def psnr_db(latents: Tensor, reference: Tensor) -> float:
    """Peak signal-to-noise ratio; the peak is the range of the `reference`. Infinite if the two are equal."""
    peak, square = _range(reference), float((latents.double() - reference.double()).square().mean())
    return 10 * math.log10(peak**2 / square) if square else math.inf


def ssim(latents: Tensor, reference: Tensor) -> float:
    """Structural similarity, (1, channels, rows, columns) each; the mean over channels and windows of 8 x 8.

    Source: Wang et al. 2004, with its constants, by the range of the `reference`; windows count evenly.
    """
    first, second, peak = latents.double(), reference.double(), _range(reference)
    mean, other = _means(first), _means(second)
    variances = _means(first**2) - mean**2 + _means(second**2) - other**2
    covariance = _means(first * second) - mean * other
    c1, c2 = (_K1 * peak) ** 2, (_K2 * peak) ** 2
    likeness = (2 * mean * other + c1) * (2 * covariance + c2) / ((mean**2 + other**2 + c1) * (variances + c2))
    return float(likeness.mean())


def _means(values: Tensor) -> Tensor:
    return avg_pool2d(values, _WINDOW, stride=1)


def _range(reference: Tensor) -> float:
    return float(reference.max() - reference.min())
