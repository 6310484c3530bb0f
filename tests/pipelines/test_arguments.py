"""Arguments of the stock pipelines' calls: what a request may give has the effect that it has in stock, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import tiny
from tilework.core.model import ArgumentKind, ArgumentValue, ModelInfo
from tilework.core.wire.spec import Spec
from tilework.patches.layout import pack
from tilework.pipelines.families.flux import Flux
from tilework.pipelines.families.sd import StableDiffusion
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.families.sdxl import StableDiffusionXL
from tilework.pipelines.staged import StagedPipeline

FAMILIES: dict[str, tuple[Callable[[], Any], type[StagedPipeline], dict[str, Any]]] = {
    "sd": (tiny.build_sd, StableDiffusion, {}),
    "sdxl": (tiny.build_sdxl, StableDiffusionXL, {}),
    "sd3": (partial(tiny.build_sd3, dual=True), StableDiffusion3, {"max_sequence_length": tiny.TEXT_LENGTH}),
    "sd3-shifting": (partial(tiny.build_sd3, "shifting"), StableDiffusion3, {"max_sequence_length": tiny.TEXT_LENGTH}),
    "flux": (tiny.build_flux, Flux, {"max_sequence_length": tiny.TEXT_LENGTH, "height": 64, "width": 64}),
}
SIGMAS = (1.0, 0.6, 0.3, 0.1)
CASES: list[tuple[str, dict[str, ArgumentValue], dict[str, Any]]] = [
    ("sd", {"guidance_rescale": 0.7}, {}),
    ("sd", {"timesteps": (900, 600, 300, 100)}, {}),
    ("sd", {"timesteps": (900.5, 600.25, 300, 100)}, {}),
    ("sd", {"sigmas": (14.0, 3.0, 1.0, 0.2, 0.0)}, {}),
    ("sdxl", {"prompt_2": "a green square"}, {}),
    ("sdxl", {"negative_prompt_2": "a green square"}, {"negative_prompt": "a cross"}),
    ("sdxl", {"original_size": (32, 48)}, {}),
    ("sdxl", {"crops_coords_top_left": (8, 16)}, {}),
    ("sdxl", {"target_size": (32, 48)}, {}),
    ("sdxl", {"negative_original_size": (16, 16), "negative_target_size": (32, 32)}, {}),
    (
        "sdxl",
        {
            "negative_original_size": (16, 16),
            "negative_target_size": (32, 32),
            "negative_crops_coords_top_left": (4, 4),
        },
        {},
    ),
    ("sdxl", {"guidance_rescale": 0.7}, {}),
    ("sdxl", {"clip_skip": 1}, {}),
    ("sdxl", {"timesteps": (900, 600, 300, 100)}, {}),
    ("sd3", {"prompt_2": "a green square"}, {}),
    ("sd3", {"prompt_3": "a green square"}, {}),
    ("sd3", {"negative_prompt_2": "a green square"}, {"negative_prompt": "a cross"}),
    ("sd3", {"negative_prompt_3": "a green square"}, {}),
    ("sd3", {"clip_skip": 1}, {}),
    ("sd3", {"max_sequence_length": 24}, {}),
    ("sd3", {"sigmas": SIGMAS}, {}),
    ("sd3", {"skip_guidance_layers": (1,), "skip_layer_guidance_stop": 0.9}, {}),
    (
        "sd3",
        {"skip_guidance_layers": (0, 1), "skip_layer_guidance_start": 0.2, "skip_layer_guidance_stop": 1.0}
        | {"skip_layer_guidance_scale": 1.5},
        {},
    ),
    ("sd3", {"skip_guidance_layers": (1,), "skip_layer_guidance_stop": 0.9, "sigmas": SIGMAS}, {}),
    ("sd3-shifting", {"mu": 0.3}, {}),
    ("flux", {"prompt_2": "a green square"}, {}),
    ("flux", {"true_cfg_scale": 3.0}, {"negative_prompt": "a cross"}),
    ("flux", {"true_cfg_scale": 3.0, "negative_prompt_2": "a green square"}, {"negative_prompt": "a cross"}),
    ("flux", {"max_sequence_length": 24}, {}),
    ("flux", {"sigmas": SIGMAS}, {}),
]
every_case = pytest.mark.parametrize(
    ("name", "arguments", "changes"), CASES, ids=[f"{name}-{'-'.join(given)}" for name, given, _ in CASES]
)


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@cache
def pipeline(name: str) -> Any:
    return FAMILIES[name][0]()


@cache
def family(name: str, place: int = 0) -> StagedPipeline:
    build, kind, overrides = FAMILIES[name]
    return kind(build(), "tiny", overrides, "")


def run_stock(name: str, spec: Spec) -> tiny.Stock:
    lists = ("sigmas", "timesteps", "skip_guidance_layers")
    arguments = {key: list(value) if key in lists else value for key, value in spec.arguments.items()}
    if "true_cfg_scale" in arguments:
        arguments["negative_prompt"] = spec.negative_prompt
    return tiny.run_stock(pipeline(name), spec, arguments=arguments)


@every_case
def test_an_argument_does_what_it_does_in_stock(
    name: str, arguments: dict[str, ArgumentValue], changes: dict[str, Any]
) -> None:
    plain, spec = tiny.spec(**changes), tiny.spec(**changes, arguments=arguments)
    stock = run_stock(name, spec)
    state = tiny.begin(family(name), spec)
    for latents in stock.latents:
        tiny.iterate(family(name), state)
        state = tiny.move(family(name), family(name, 1), state)
        assert torch.equal(state.latents, latents)
    assert state.steps_done == spec.steps
    assert np.array_equal(tiny.pixels(tiny.decode(family(name), state)), stock.pixels)
    without = tiny.begin(family(name), plain)
    tiny.finish(family(name), without)
    assert not torch.equal(without.latents, state.latents), "it has no effect, so this test would prove nothing"


@pytest.mark.parametrize("name", ["sdxl", "sd", "flux"])
def test_an_empty_negative_prompt_is_one(name: str) -> None:
    """In Stable Diffusion XL and in Flux it draws otherwise than none; so a request without one gives none."""
    more: dict[str, ArgumentValue] = {"true_cfg_scale": 3.0} if name == "flux" else {}
    without, empty = (tiny.spec(negative_prompt=text, arguments=more) for text in (None, ""))
    latents = []
    for spec in (without, empty):
        state = tiny.begin(family(name), spec)
        tiny.finish(family(name), state)
        latents.append(state.latents)
        assert torch.equal(state.latents, run_stock(name, spec).latents[-1])
    assert torch.equal(*latents) == (name == "sd")


@every_case
def test_an_argument_is_offered(name: str, arguments: dict[str, ArgumentValue], changes: dict[str, Any]) -> None:
    offered = {one.name: one for one in family(name).info.arguments}
    for key, value in arguments.items():
        numbers = value if isinstance(value, tuple) else () if isinstance(value, str) else (value,)
        assert all(offered[key].low <= number <= offered[key].high for number in numbers)


def test_eta_is_offered_where_the_sampler_takes_it() -> None:
    stock = tiny.build_sdxl()
    assert "eta" not in names(family("sdxl").info)
    stock.scheduler = diffusers.DDIMScheduler.from_config(stock.scheduler.config)
    model = StableDiffusionXL(copy.copy(stock), "tiny", {}, "")
    assert "eta" in names(model.info)
    spec = tiny.spec(arguments={"eta": 0.8})
    expected = tiny.run_stock(stock, spec, arguments={"eta": 0.8})
    state = tiny.begin(model, spec)
    tiny.finish(model, state)
    assert torch.equal(state.latents, expected.latents[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_limits_are_those_beyond_which_the_model_fails(name: str) -> None:
    """The highest value of each integer runs."""
    model = family(name)
    for one in model.info.arguments:
        if one.kind is ArgumentKind.INTEGER:
            tiny.begin(model, tiny.spec(arguments={one.name: int(one.high)}))


def test_a_schedule_has_as_many_values_as_the_sampler_needs() -> None:
    more = {one.name: one.more for one in family("sd").info.arguments if one.kind is ArgumentKind.SCHEDULE}
    assert more == {"sigmas": 1, "timesteps": 0}


@pytest.mark.parametrize("sampler", ["heun", "dpm"])
def test_schedules_are_not_offered_where_the_sampler_takes_none_or_ignores_them(sampler: str) -> None:
    model = StableDiffusion3(tiny.build_sd3(sampler), "tiny", {"max_sequence_length": 16}, "")
    assert names(model.info).isdisjoint({"sigmas", "timesteps"})


def test_what_the_model_has_no_part_for_is_not_offered() -> None:
    stock = tiny.build_sd3()
    stock.text_encoder_3 = stock.tokenizer_3 = None
    model = StableDiffusion3(stock, "tiny", {"max_sequence_length": 0}, "")
    assert names(model.info).isdisjoint({"prompt_3", "negative_prompt_3", "max_sequence_length", "mu"})


def names(info: ModelInfo) -> set[str]:
    return {one.name for one in info.arguments}


@pytest.mark.parametrize("name", ["sdxl", "sd3", "flux"])
def test_requests_with_and_without_arguments_share_a_pass(name: str) -> None:
    """As far as they can: predictions are those of each request alone, up to rounding."""
    model = family(name)
    given = [arguments for case, arguments, _ in CASES if case == name]
    states = [tiny.begin(model, tiny.spec(arguments=arguments, seed=seed)) for seed, arguments in enumerate(given)]
    states = [state for state in states if len(state.sampler.timesteps) == 4]
    tiny.iterate(model, *states)
    alone = model.predict(states)
    for mine, shared in zip(alone, model.predict(states, pack), strict=True):
        assert (mine - shared).abs().max() <= 1e-5 * mine.abs().max()


def test_clip_skip_is_offered_where_the_stock_call_does_not_fail_on_it() -> None:
    spec = tiny.spec(arguments={"clip_skip": 1})
    if "clip_skip" in names(family("sd").info):
        state = tiny.begin(family("sd"), spec)
        tiny.finish(family("sd"), state)
        assert torch.equal(state.latents, run_stock("sd", spec).latents[-1])
    else:
        with pytest.raises(AttributeError, match="text_model"):
            run_stock("sd", spec)
