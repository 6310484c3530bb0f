"""PatchedServe's figure 5, measured on `shapes`: how much of each block hardly changes from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from suite.case import Check, Table
from suite.pictures import panels_png
from torch import Tensor

from figures.cached_runs import CachedRuns, RemadeFigure, least
from tilework.cli.models import checked_spec
from tilework.core.cache import DEFAULT_THRESHOLD, CacheChoice, CacheKind
from tilework.core.model import ModelSource
from tilework.core.wire.commands import CACHE_BYTES
from tilework.patches.cache import PatchCache
from tilework.pipelines.draw import draw
from tilework.pipelines.family import Family, StepState
from tilework.pipelines.loading import load, quiet
from tilework.report.panels import Curve, CurvePanel

CAPTIONS = Path(__file__).parents[3] / "training" / "shapes" / "held_out.txt"
SIDES = (128, 192, 256)  # In the proportions of the paper's 512, 768 and 1024 px.
STEPS = 50  # The paper's number.
Shares = list[float]


def figure_5(cached: CachedRuns) -> RemadeFigure:
    """The share of patches of each block whose input has changed by less than the default threshold, by size.

    All is computed, so errors do not add up, as in the paper's figure.
    """
    torch.set_num_threads(1)
    quiet()
    family = load(ModelSource(path="shapes"))
    prompts = cached.points(CAPTIONS.read_text("utf-8").splitlines())
    found = {side: _unchanged(family, side, prompts) for side in cached.points(SIDES)}
    blocks = range(len(next(iter(found.values()))))
    spread = max(
        abs(one - other) for shares in found.values() for one, other in zip(shares, found[SIDES[0]], strict=True)
    )
    return RemadeFigure(
        tables=(
            Table(
                title=f"Patches of each block that change by less than {DEFAULT_THRESHOLD:g} from step to step, %",
                columns=("size", *(f"block {index}" for index in blocks), "all"),
                rows=tuple(
                    (f"{side}x{side}", *(f"{100 * share:.1f}" for share in shares), f"{100 * fmean(shares):.1f}")
                    for side, shares in found.items()
                ),
            ),
        ),
        checks=(
            Check(
                what="difference of a block between sizes, most: no list of blocks suits all sizes",
                measured=least([spread]),
                low=0.05,
            ),
        ),
        png=panels_png(
            [
                CurvePanel(
                    title=f"shapes, {STEPS} steps",
                    x_label="block",
                    y_label="patches that hardly change",
                    curves={
                        f"{side} px": Curve(xs=tuple(map(float, blocks)), ys=tuple(shares))
                        for side, shares in found.items()
                    },
                )
            ],
            [f"{side} px" for side in found],
            "PatchedServe, figure 5, measured on shapes",
        ),
    )


def _unchanged(family: Family, side: int, prompts: Sequence[str]) -> Shares:
    """Return shares by block, of all patches of all steps. Those of the first step have changed."""
    changes: dict[int, list[Tensor]] = {}

    def observe(index: int, change: Tensor, of_outputs: Tensor) -> None:
        changes.setdefault(index, []).append(change)

    for seed, prompt in enumerate(prompts):
        cache = PatchCache(CACHE_BYTES, observe)
        asked = {"prompt": prompt, "size": f"{side}x{side}", "seed": seed, "num_inference_steps": STEPS}
        spec = checked_spec({**asked, "cache": CacheKind.PATCH, "cache_threshold": 0.0}, family.info)
        assert spec.cache == CacheChoice(CacheKind.PATCH, 0.0)

        def step(state: StepState, cache: PatchCache = cache) -> None:
            family.step([state], cache)

        draw(family, spec, step=step)
    later = (STEPS - 1) / STEPS
    return [later * float((torch.cat(changes[index]) < DEFAULT_THRESHOLD).float().mean()) for index in sorted(changes)]


FIGURES = {"patchedserve-5": figure_5}
