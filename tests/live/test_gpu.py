"""The same exactness on a CUDA device, and its memory. Skipped where there is none; no such run is on record yet."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import tilework
import tiny
from tilework.core.model import ModelSource
from tilework.pipelines.loading import load
from tilework.worker.hardware import memory_in_use

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


BUILDERS = {"sd3": partial(tiny.build_sd3, "dpm"), "flux": tiny.build_flux, "sdxl": tiny.build_sdxl}


@pytest.fixture(scope="module", params=BUILDERS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp(request.param)
    tiny.save(BUILDERS[request.param](), directory, request.param)
    return directory


def test_memory_in_use_is_that_of_the_device() -> None:
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    before = memory_in_use(device)
    ballast = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    after = memory_in_use(device)
    assert before is not None
    assert after is not None
    assert after - before >= ballast.numel()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_and_moved_after_every_step_equals_the_stock_pipeline(directory: Path, dtype: str) -> None:
    family = load(ModelSource(path=str(directory), device="cuda", dtype=dtype))
    pipeline = tilework.reference(str(directory), device="cuda", dtype=dtype)
    stock = tiny.run_stock(pipeline, tiny.spec())
    state = tiny.begin(family, tiny.spec())
    for latents in stock.latents:
        tiny.iterate(family, state)
        assert torch.equal(state.latents, latents)
        state = tiny.move(family, family, state)
    assert np.array_equal(tiny.pixels(tiny.decode(family, state)), stock.pixels)
