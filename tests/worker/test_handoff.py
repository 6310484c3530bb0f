"""From stage to stage: a picture is the same, bit for bit, wherever its runs are and whether they find its tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from quick import quick
from tilework.core.model import ModelSource
from tilework.core.wire.spec import Spec
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.pipelines.support.record import served_classes
from worker.handoff import Handoff
from worker.worker_bench import WorkerBench
from zoo import requests
from zoo.registry import ZOO

QUICK = ("z-image",)
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
PLENTY, NOTHING = 1 << 40, 0


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


def check_all_ways(here: Family, there: Family, spec: Spec, directory: Path) -> None:
    """Merged or not, on one worker or in turns on two, spilled between its runs or not."""

    def handoff(states_bytes: int) -> Handoff:
        benches = [WorkerBench(family, directory, states_bytes=states_bytes) for family in (here, there)]
        return Handoff(benches, spec)

    merged = handoff(NOTHING)
    merged.run_merged(0, merged.chunks)
    assert merged.num_spills == 0, "a job with a work that was received has spilled"
    for states_bytes in (PLENTY, NOTHING):
        for places in ((0,), (0, 1), (0, 1, 1)):
            one = handoff(states_bytes)
            for index, num_steps in enumerate(one.chunks):
                one.run(places[index % len(places)], num_steps)
            assert np.array_equal(one.picture, merged.picture), (states_bytes, places)
            assert bool(one.num_spills) == (states_bytes == NOTHING)
    assert np.array_equal(requests.alone(here, spec), merged.picture)


@pytest.mark.parametrize("name", quick(BY_HAND_QUICK, BY_HAND))
def test_of_families_with_steps_of_their_own(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.save(BY_HAND[name](), model, f"tiny-{name}")
    here, there = (load(ModelSource(path=str(model))) for _ in range(2))
    check_all_ways(here, there, tiny.spec(), tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, model in ZOO.items()
        if model.class_name in served_classes()
    ],
)
def test_of_stock_calls(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    here, there = (requests.family(ZOO[name], model) for _ in range(2))
    check_all_ways(here, there, requests.spec_of(ZOO[name], here, 1), tmp_path)
