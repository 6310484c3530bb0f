"""What a cache does to pictures: similarity, numbers by setting, the curve and the sheet."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tilework.core.cache import CacheChoice, CacheKind
from tilework.report.cache_quality import CachedPicture, draw_cache_curve, draw_cache_sheet, psnr_db, ssim, summarise

PATCH = CacheChoice(CacheKind.PATCH, 0.01)


def noise(seed: int, amount: float = 255.0) -> np.ndarray:
    values = np.random.default_rng(seed).uniform(0, amount, (24, 16, 3))
    return values.astype(np.uint8)


def test_psnr_is_that_of_the_mean_square() -> None:
    picture = np.full((16, 16, 3), 100, np.uint8)
    assert psnr_db(picture, picture) == math.inf
    assert psnr_db(picture + np.uint8(5), picture) == pytest.approx(10 * math.log10(255**2 / 25))
    assert psnr_db(picture, picture + np.uint8(150)) == pytest.approx(10 * math.log10(255**2 / 150**2))


def test_ssim_is_one_for_equals_and_falls_with_noise_and_structure() -> None:
    picture = noise(1)
    less, more = (np.clip(picture + noise(2, amount) - amount / 2, 0, 255).astype(np.uint8) for amount in (20, 120))
    assert ssim(picture, picture) == pytest.approx(1.0)
    assert 1 > ssim(less, picture) > ssim(more, picture) > 0
    assert ssim(noise(3), picture) < 0.2
    assert ssim(picture + np.uint8(0), picture) == ssim(picture, picture + np.uint8(0))


def drawn(prompt: str, choice: CacheChoice | None, pixels: np.ndarray, saving: float, score: float) -> CachedPicture:
    return CachedPicture(
        prompt=prompt,
        steps=8,
        choice=choice,
        pixels=pixels,
        plain=noise(1),
        saving=saving,
        time_ratio=1 - saving,
        score=score,
        off="it moved" if saving == 0.2 else "",
    )


PICTURES = [
    drawn("a", None, noise(1), 0.0, 1.0),
    drawn("a", PATCH, noise(2), 0.4, 0.5),
    drawn("b", None, noise(1), 0.0, 1.0),
    drawn("b", PATCH, noise(1), 0.2, 1.0),
]


def test_a_row_has_the_means_over_prompts() -> None:
    plain, patch = summarise(PICTURES)
    assert (plain.kind, plain.pictures, plain.saving, plain.psnr_db, plain.score) == ("off", 2, 0.0, math.inf, 1.0)
    assert (patch.kind, patch.value, patch.saving, patch.time_ratio) == ("patch", 0.01, pytest.approx(0.3), 0.7)
    assert (patch.score, patch.off) == (0.75, "it moved")
    assert patch.least_psnr_db == psnr_db(noise(2), noise(1)) < patch.psnr_db
    assert patch.ssim == pytest.approx((1 + ssim(noise(2), noise(1))) / 2)


def test_the_sheet_has_a_row_for_each_prompt_and_the_curve_is_drawn(tmp_path: Path) -> None:
    draw_cache_sheet(tmp_path / "sheet.png", PICTURES, title="x")
    draw_cache_curve(tmp_path / "curve.png", summarise(PICTURES), title="x")
    with Image.open(tmp_path / "sheet.png") as sheet, Image.open(tmp_path / "curve.png") as curve:
        assert sheet.width == 2 * 160 + 16
        assert sheet.height > 2 * 144
        assert curve.width > 1000
