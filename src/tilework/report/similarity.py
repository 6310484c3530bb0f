"""How much two pictures differ: PSNR and SSIM of pixels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_PEAK = 255.0
_WINDOW = 8
_C1, _C2 = (0.01 * _PEAK) ** 2, (0.03 * _PEAK) ** 2


def psnr_db(picture: np.ndarray, reference: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two pictures (rows, columns, 3) of 8 bits; infinite if they are equal."""
    square = float(np.mean(np.square(picture.astype(np.float64) - reference.astype(np.float64))))
    return 10 * math.log10(_PEAK**2 / square) if square else math.inf


def ssim(picture: np.ndarray, reference: np.ndarray) -> float:
    """Structural similarity of two pictures (rows, columns, 3) of 8 bits with sides of 8 px or more; 1 if equal.

    Source: Wang et al. 2004, with its constants; the mean over channels and all windows of 8 x 8, which count evenly.
    """
    first, second = picture.astype(np.float64), reference.astype(np.float64)
    mean, other = _means(first), _means(second)
    variances = _means(first**2) - mean**2 + _means(second**2) - other**2
    covariance = _means(first * second) - mean * other
    likeness = (2 * mean * other + _C1) * (2 * covariance + _C2) / ((mean**2 + other**2 + _C1) * (variances + _C2))
    return float(likeness.mean())


def _means(values: np.ndarray) -> Any:
    windows = np.lib.stride_tricks.sliding_window_view(values, (_WINDOW, _WINDOW), axis=(0, 1))
    return windows.mean(axis=(-2, -1))
