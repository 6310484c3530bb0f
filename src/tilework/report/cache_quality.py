"""Savings and costs of a cache: numbers by setting, a curve, images side by side, and their PSNR and SSIM."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import numpy as np
from PIL import Image

from tilework.core.cache import CacheChoice
from tilework.report.contact_sheet import Frame, draw_contact_sheet
from tilework.report.palette import NEUTRAL

_HUES = {"patch": "#0B63CE", "image": "#B3541E", "fbcache": "#2E7D32", "taylorseer": "#7B3FA0"}
_MOST_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPicture:
    """An image (rows, columns, 3) of `prompt` with a cache, beside that without (`choice` None: it is that).

    `saving` is the part of the patches of blocks of steps that was skipped. `time_ratio` is the time of its steps over
    that without. `score` is how well it shows its prompt, 0 to 1, if something says so.
    """

    prompt: str
    steps: int
    choice: CacheChoice | None
    pixels: np.ndarray
    plain: np.ndarray
    saving: float
    time_ratio: float
    score: float | None
    off: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheQuality:
    """The means over all prompts for one number of steps and one choice (None: without a cache).

    `value` is the choice's threshold, or interval. `psnr_db` is the median, infinite if half of the images are equal;
    `least_psnr_db` the least. `saving_std` is the standard deviation of the saving over the prompts.
    """

    steps: int
    kind: str
    value: float
    pictures: int
    saving: float
    saving_std: float
    time_ratio: float
    psnr_db: float
    least_psnr_db: float
    ssim: float
    score: float | None
    off: str


def summarise(pictures: Sequence[CachedPicture]) -> list[CacheQuality]:
    """Return one row for each number of steps and choice, in the order in which they come."""
    groups: dict[tuple[int, CacheChoice | None], list[CachedPicture]] = {}
    for one in pictures:
        groups.setdefault((one.steps, one.choice), []).append(one)
    return [_summary(steps, choice, members) for (steps, choice), members in groups.items()]


def _summary(steps: int, choice: CacheChoice | None, members: Sequence[CachedPicture]) -> CacheQuality:
    ratios_db = [psnr_db(one.pixels, one.plain) for one in members]
    scores = [one.score for one in members if one.score is not None]
    return CacheQuality(
        steps=steps,
        kind="off" if choice is None else choice.kind.value,
        value=0.0 if choice is None else choice.value,
        pictures=len(members),
        saving=fmean(one.saving for one in members),
        saving_std=pstdev(one.saving for one in members),
        time_ratio=median(one.time_ratio for one in members),
        psnr_db=median(ratios_db),
        least_psnr_db=min(ratios_db),
        ssim=fmean(ssim(one.pixels, one.plain) for one in members),
        score=fmean(scores) if scores else None,
        off=next((one.off for one in members if one.off), ""),
    )


def draw_cache_sheet(path: Path | str, pictures: Sequence[CachedPicture], *, title: str = "") -> None:
    """Write a PNG with a row for each of the first prompts: without a cache, and with each choice."""
    (steps, *_) = sorted({one.steps for one in pictures}, reverse=True)
    shown = [one for one in pictures if one.steps == steps]
    prompts = list(dict.fromkeys(one.prompt for one in shown))[:_MOST_SHOWN]
    frames = [_frame(one) for prompt in prompts for one in shown if one.prompt == prompt]
    draw_contact_sheet(path, frames, columns=len(frames) // len(prompts), side=144, title=title)


def _frame(one: CachedPicture) -> Frame:
    buffer = io.BytesIO()
    Image.fromarray(one.pixels).save(buffer, "PNG")
    height, width, _ = one.pixels.shape
    choice = one.choice
    size = f"{width}x{height}"
    how = "no cache" if choice is None else f"{choice.kind.value} {choice.value:g}, {one.saving:.0%} saved"
    return Frame(image=buffer.getvalue(), caption=f"{how}: {one.prompt}", size=size)


def draw_cache_curve(path: Path | str, rows: Sequence[CacheQuality], *, title: str = "") -> None:
    """Write a PNG of similarity, and score if there is one, over saving: a line for each kind and number of steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    has_score = any(row.score is not None for row in rows)
    panels = (("psnr_db", "PSNR (dB), median"), ("ssim", "SSIM, mean"), *((("score", "score"),) if has_score else ()))
    figure = Figure(figsize=(4.6 * len(panels), 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title or "Saving and similarity", x=0.01, ha="left", fontsize=12, fontweight="bold")
    all_steps = sorted({row.steps for row in rows}, reverse=True)
    styles = dict(zip(all_steps, cycle(("-", "--", ":")), strict=False))
    for axes, (field, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_lines(axes, field, rows, styles)
        axes.set_xlabel("patches of blocks skipped (%)")
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
    keys = _keys([kind for kind in _HUES if any(row.kind == kind for row in rows)], styles)
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=8, frameon=False)
    figure.savefig(path)


def _keys(kinds: Sequence[str], styles: Mapping[int, str]) -> list[Any]:
    """Explain the colours and the styles of lines."""
    from matplotlib.lines import Line2D

    return [
        *(Line2D([], [], color=_HUES[kind], marker="o", label=kind) for kind in kinds),
        Line2D([], [], color=NEUTRAL, linewidth=1, label="no cache"),
        *(Line2D([], [], color="black", linestyle=style, label=f"{steps} steps") for steps, style in styles.items()),
    ]


def _draw_lines(axes: Any, field: str, rows: Sequence[CacheQuality], styles: Mapping[int, str]) -> None:
    """Draw a line whose points are in the order of thresholds or intervals."""
    for steps, style in styles.items():
        for kind, hue in _HUES.items():
            chosen = sorted((row for row in rows if (row.kind, row.steps) == (kind, steps)), key=lambda row: row.value)
            points = [(100 * row.saving, value) for row in chosen if math.isfinite(value := getattr(row, field))]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", color=hue, linestyle=style)
        if field == "score":
            (plain,) = [row.score for row in rows if (row.kind, row.steps) == ("off", steps)]
            axes.axhline(plain, color=NEUTRAL, linestyle=style, linewidth=1)


_PEAK = 255.0
_WINDOW = 8
_C1, _C2 = (0.01 * _PEAK) ** 2, (0.03 * _PEAK) ** 2


def psnr_db(picture: np.ndarray, reference: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio of two images (rows, columns, 3) of 8 bits; infinite if equal."""
    square = float(np.mean(np.square(picture.astype(np.float64) - reference.astype(np.float64))))
    return 10 * math.log10(_PEAK**2 / square) if square else math.inf


def ssim(picture: np.ndarray, reference: np.ndarray) -> float:
    """Return the structural similarity of two images (rows, columns, 3) of 8 bits, sides 8 px or more; 1 if equal.

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
