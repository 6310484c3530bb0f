"""A request taken apart equals the stock pipeline bit for bit, wherever it is cut and whatever runs beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilework
import tiny
from quick import quick
from tilework.core.model import ModelSource
from tilework.core.wire.spec import Spec
from tilework.pipelines.families.sd import StableDiffusion
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load

SPECS = {
    "guided": tiny.spec(),
    "unguided": tiny.spec(guidance_scale=1.0, negative_prompt="a green square"),
    "negative": tiny.spec(negative_prompt="a green square", guidance_scale=2.5, seed=3),
    "wide": tiny.spec(height=64, width=96, steps=3),
    "tall": tiny.spec(height=96, width=64, steps=1),
}


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


STOCK = {
    **{f"sd3-{sampler}": partial(tiny.build_sd3, sampler) for sampler in ("euler", "shifting", "heun", "dpm")},
    "sd3.5": partial(tiny.build_sd3, dual=True),
    "flux": tiny.build_flux,
    "schnell": partial(tiny.build_flux, "euler", guidance_embeds=False),
    "sdxl": tiny.build_sdxl,
    "sdxl-noisy": partial(tiny.build_sdxl, "sdxl-ancestral"),
    "sdxl-distilled": partial(tiny.build_sdxl, distilled=True),
    "sd": tiny.build_sd,
}
QUICK = ("sd3-dpm", "sd3.5", "flux", "sdxl-noisy", "sd", "shapes")


class Model:
    """The stock pipeline and two instances of the family, loaded one after the other from the same directory."""

    def __init__(self, source: ModelSource, max_sequence_length: int) -> None:
        self.stock = tilework.reference(source.path, dtype=source.dtype)
        self.here, self.there = load(source), load(source)
        self.max_sequence_length = max_sequence_length

    def run_stock(self, spec: Spec) -> tiny.Stock:
        return tiny.run_stock(self.stock, spec, self.max_sequence_length)


@pytest.fixture(scope="module", params=quick(QUICK, [*STOCK, "shapes", "shapes-dpm"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param in STOCK:
        tiny.save(STOCK[request.param](), directory, "tiny")
        return Model(ModelSource(path=str(directory)), tiny.TEXT_LENGTH)
    source = ModelSource(path="shapes") if request.param == "shapes" else tiny.shapes_with_sampler(directory, "dpm")
    return Model(source, 0)


def assert_same(family: Family, state: tiny.LatentState, stock: tiny.Stock) -> None:
    assert torch.equal(state.latents, stock.latents[-1])
    assert np.array_equal(tiny.pixels(tiny.decode(family, state)), stock.pixels)


@pytest.mark.parametrize("name", quick(("guided", "wide"), SPECS))
def test_every_iteration_and_the_picture_equal_the_stock_pipeline(model: Model, name: str) -> None:
    stock = model.run_stock(SPECS[name])
    state = tiny.begin(model.here, SPECS[name])
    for latents in stock.latents:
        tiny.iterate(model.here, state)
        assert torch.equal(state.latents, latents)
    assert state.steps_done == state.spec.steps
    assert_same(model.here, state, stock)
    assert len(np.unique(stock.pixels)) > 10, "a flat picture would prove nothing"


@pytest.mark.parametrize("name", ["guided", "unguided"])
def test_a_request_that_moves_after_every_iteration_ends_alike(model: Model, name: str) -> None:
    source, target = model.here, model.there
    state = tiny.move(source, target, tiny.begin(source, SPECS[name]))
    while state.steps_done < state.spec.steps:
        source, target = target, source
        tiny.iterate(source, state)
        state = tiny.move(source, target, state)
    assert_same(target, state, model.run_stock(SPECS[name]))


def test_requests_that_run_side_by_side_do_not_touch_each_other(model: Model) -> None:
    specs = [SPECS["guided"], SPECS["wide"], SPECS["unguided"]]
    states = [tiny.begin(model.here, spec) for spec in specs]
    tiny.finish(model.here, *states)
    for spec, state in zip(specs, states, strict=True):
        assert_same(model.here, state, model.run_stock(spec))


def test_a_moved_state_does_not_change_the_original(model: Model) -> None:
    state = tiny.begin(model.here, SPECS["guided"])
    tiny.iterate(model.here, state)
    tiny.finish(model.there, tiny.move(model.here, model.there, state))
    tiny.finish(model.here, state)
    assert_same(model.here, state, model.run_stock(SPECS["guided"]))


@pytest.mark.parametrize("dtype", quick(("bfloat16",), ("bfloat16", "float16")))
@pytest.mark.parametrize("name", quick(("flux", "sdxl-noisy"), ("sd3-dpm", "sd3.5", "flux", "sdxl-noisy", "sd")))
def test_in_half_precision_a_request_that_moves_equals_the_stock_pipeline(
    name: str, dtype: str, tmp_path: Path
) -> None:
    tiny.save(STOCK[name](), tmp_path, "tiny")
    model = Model(ModelSource(path=str(tmp_path), dtype=dtype), tiny.TEXT_LENGTH)
    stock = model.run_stock(tiny.spec())
    state = tiny.begin(model.here, tiny.spec())
    for latents in stock.latents:
        tiny.iterate(model.here, state)
        state = tiny.move(model.here, model.there, state)
        assert torch.equal(state.latents, latents)
    assert_same(model.there, state, stock)


def test_in_half_precision_the_autoencoder_of_sdxl_runs_in_float32_as_in_stock(tmp_path: Path) -> None:
    tiny.save(tiny.build_sdxl(), tmp_path, "tiny")
    model = Model(ModelSource(path=str(tmp_path), dtype="float16"), 0)
    assert model.stock.vae.config.force_upcast
    state = tiny.begin(model.here, tiny.spec())
    tiny.finish(model.here, state)
    assert state.latents.dtype == torch.float16
    assert_same(model.here, state, model.run_stock(tiny.spec()))


def test_pictures_rejected_by_the_safety_checker_are_black_as_in_stock() -> None:
    pipeline = tiny.build_sd()
    pipeline.run_safety_checker = lambda image, device, dtype: (torch.zeros_like(image), [True])
    family = StableDiffusion(pipeline, "tiny", {}, "")
    state = tiny.begin(family, tiny.spec())
    tiny.finish(family, state)
    stock = tiny.run_stock(pipeline, tiny.spec())
    assert not stock.pixels.any()
    assert_same(family, state, stock)


def test_of_pictures_that_are_decoded_together_only_the_rejected_ones_are_black() -> None:
    pipeline = tiny.build_sd()
    pipeline.run_safety_checker = lambda image, device, dtype: (image, [False, True][: len(image)])
    family = StableDiffusion(pipeline, "tiny", {}, "")
    kept, rejected = decoded_together(family, 2)[1]
    assert kept.any()
    assert not rejected.any()


def test_pictures_that_are_decoded_together_equal_those_alone_up_to_rounding(model: Model) -> None:
    calls: list[int] = []
    decoder = model.here._pipeline.vae.decoder  # type: ignore[attr-defined]
    hook = decoder.register_forward_hook(lambda *_: calls.append(1))
    alone, together = decoded_together(model.here, 3)
    hook.remove()
    assert len(calls) == 3 + 1
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one.astype(int) - other).max() <= 1
    assert not np.array_equal(alone[0], alone[1])


def decoded_together(family: Any, count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Pictures of several seeds, decoded one by one and together."""
    states = [tiny.begin(family, tiny.spec(seed=seed)) for seed in range(count)]
    tiny.finish(family, *states)
    latents = [family.finish(state) for state in states]
    specs = [state.spec for state in states]
    together = family.run(family.info.graph.stages[-1].name, specs, latents)
    images = [family.image(spec, values) for spec, values in zip(specs, together, strict=True)]
    return [tiny.pixels(tiny.decode(family, state)) for state in states], list(map(tiny.pixels, images))


def test_steps_are_counted_as_on_the_stock_progress_bar(model: Model) -> None:
    state = tiny.begin(model.here, SPECS["guided"])
    counts = [state.steps_done]
    while state.iteration_index < len(state.sampler.timesteps):
        tiny.iterate(model.here, state)
        counts.append(state.steps_done)
    twice_but_last = [0, 0, 1, 1, 2, 2, 3, 4]
    assert counts == (twice_but_last if state.sampler.order == 2 else [0, 1, 2, 3, 4])


def test_the_seed_decides_the_picture(model: Model) -> None:
    first, second = (tiny.begin(model.here, tiny.spec(seed=seed)).latents for seed in (1, 2))
    assert not torch.equal(first, second)
