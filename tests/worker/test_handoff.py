"""From run to run over workers: pictures of families that are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tiny
from quick import quick
from tilework.core.model import ModelSource
from tilework.pipelines.loading import load
from worker.handoff import check_all_ways

BY_HAND: dict[str, Callable[[], Any]] = {
    "sd3": tiny.build_sd3,
    "sd3-dpm": partial(tiny.build_sd3, "dpm"),
    "flux": tiny.build_flux,
    "schnell": partial(tiny.build_flux, "euler", guidance_embeds=False),
    "sdxl": tiny.build_sdxl,
    "sdxl-noisy": partial(tiny.build_sdxl, "sdxl-ancestral"),
    "sd": tiny.build_sd,
}
BY_HAND_QUICK = ("sd3-dpm",)


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@pytest.mark.parametrize("name", quick(BY_HAND_QUICK, BY_HAND))
def test_of_families_with_steps_of_their_own(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.save(BY_HAND[name](), model, f"tiny-{name}")
    here, there = (load(ModelSource(path=str(model))) for _ in range(2))
    check_all_ways(here, there, tiny.spec(), tmp_path)
