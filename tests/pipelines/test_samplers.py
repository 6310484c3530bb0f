"""Every sampler that diffusers ships for a family: equal to stock, bit for bit, and wherever the request moves."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import diffusers
import pytest
import torch

import tiny
from tilework.core.model import StepRange
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.families.flux import Flux
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.families.sdxl import StableDiffusionXL
from tilework.pipelines.family import Family
from tilework.pipelines.staged import StagedPipeline

BUILD = {"sd3": tiny.build_sd3, "flux": tiny.build_flux, "sdxl": tiny.build_sdxl}
ADAPTERS: dict[str, type[StagedPipeline]] = {"sd3": StableDiffusion3, "flux": Flux, "sdxl": StableDiffusionXL}
TEXT = {"sd3": {"max_sequence_length": 16}, "flux": {"max_sequence_length": 16}, "sdxl": {}}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
# The last value says whether a step draws noise.
FLOW_SAMPLERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "euler": ("FlowMatchEulerDiscreteScheduler", {}, False),
    "euler-stochastic": ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, True),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}, False),
    "lcm": ("FlowMatchLCMScheduler", {}, True),
    "dpm": ("DPMSolverMultistepScheduler", FLOW, False),
    "dpm-sde": ("DPMSolverMultistepScheduler", {**FLOW, "algorithm_type": "sde-dpmsolver++"}, True),
    "dpm-single": ("DPMSolverSinglestepScheduler", FLOW, False),
    "deis": ("DEISMultistepScheduler", FLOW, False),
    "unipc": ("UniPCMultistepScheduler", FLOW, False),
    "sa": ("SASolverScheduler", FLOW, True),
}
# SASolver and Heun take neither sigmas nor mu, so stock FLUX cannot run them.
# The others get mu there, which all but the flow-matching ones take with dynamic shifting only.
FLUX_SAMPLERS = [name for name in FLOW_SAMPLERS if name not in ("sa", "heun")]
XL_EXTRA: dict[str, tuple[str, dict[str, Any]]] = {
    "dpm-sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "dpm-karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "single-sde": ("DPMSolverSinglestepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "lcm": ("LCMScheduler", {}),
    "tcd": ("TCDScheduler", {}),
    "sa": ("SASolverScheduler", {}),
}
XL_COMPATIBLE = [
    kind.__name__ for kind in diffusers.EulerDiscreteScheduler().compatibles if hasattr(kind, "from_config")
]
Build = Callable[[], Any]


def flow_sampler(name: str, shifting: bool) -> Any:
    kind, options, _ = FLOW_SAMPLERS[name]
    return getattr(diffusers, kind)(**options, **({"use_dynamic_shifting": True} if shifting else {}))


def xl_sampler(name: str) -> Any:
    """Configured as the model's own sampler is, as users swap them. Skips where an optional package is missing."""
    kind, options = XL_EXTRA.get(name, (name, {}))
    try:
        return getattr(diffusers, kind).from_config(tiny.build_sdxl().scheduler.config, **options)
    except ImportError as error:
        pytest.skip(str(error).strip())


CASES = [
    *(("sd3", name) for name in FLOW_SAMPLERS),
    *(("flux", name) for name in FLUX_SAMPLERS),
    *(("sdxl", name) for name in sorted(XL_COMPATIBLE) if name != "DPMSolverSDEScheduler"),
    *(("sdxl", name) for name in XL_EXTRA),
]
QUICK = (
    *(("sd3", name) for name in ("euler-stochastic", "heun", "dpm-sde")),
    *(("flux", name) for name in ("lcm", "unipc")),
    *(("sdxl", name) for name in ("EulerAncestralDiscreteScheduler", "PNDMScheduler", "dpm-karras", "tcd")),
)
every_sampler = pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*one, id="-".join(one), marks=[] if one in QUICK else pytest.mark.exhaustive) for one in CASES],
)


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@cache
def pipeline(kind: str) -> Any:
    return BUILD[kind]()


def sampler(kind: str, name: str) -> Any:
    return xl_sampler(name) if kind == "sdxl" else flow_sampler(name, kind == "flux" and name in FLUX_SAMPLERS)


@cache
def family(kind: str, name: str) -> Family:
    stock = BUILD[kind]()
    stock.scheduler = sampler(kind, name)
    return ADAPTERS[kind](stock, "tiny", TEXT[kind], "")


def run_stock(kind: str, name: str, request: tiny.Spec) -> list[torch.Tensor]:
    """The latents after each iteration; SD3 and FLUX get what stock leaves out: the sampler draws from the seed."""
    stock = pipeline(kind)
    stock.scheduler = sampler(kind, name)
    generator = torch.Generator("cpu").manual_seed(request.seed)
    step = stock.scheduler.step
    if kind != "sdxl" and "generator" in inspect.signature(step).parameters:
        stock.scheduler.step = lambda *args, **options: step(*args, **options, generator=generator)
    return tiny.run_stock(stock, request, generator=generator).latents


@every_sampler
def test_every_iteration_equals_the_stock_pipeline(kind: str, name: str) -> None:
    request = tiny.spec()
    state = tiny.begin(family(kind, name), request)
    for latents in run_stock(kind, name, request):
        tiny.iterate(family(kind, name), state)
        assert torch.equal(state.latents, latents)
    assert state.steps_done == request.steps
    assert state.latents.isfinite().all()
    # Stock does not search for its first step by its time, of which there may be several.
    assert getattr(state.sampler, "begin_index", None) == getattr(pipeline(kind).scheduler, "begin_index", None)


@every_sampler
def test_a_request_that_moves_after_every_iteration_ends_alike(kind: str, name: str) -> None:
    """Whatever else the process draws in between."""
    model, request = family(kind, name), tiny.spec()
    staying, moving = tiny.begin(model, request), tiny.begin(model, request)
    tiny.finish(model, staying)
    while moving.steps_done < request.steps:
        torch.randn(5)
        moving = tiny.move(model, model, moving)
        tiny.iterate(model, moving)
    assert torch.equal(moving.latents, staying.latents)


@every_sampler
def test_asking_for_previews_changes_nothing(kind: str, name: str) -> None:
    model, request = family(kind, name), tiny.spec()
    alone, watched = tiny.begin(model, request), tiny.begin(model, request)
    tiny.finish(model, alone)
    while watched.steps_done < request.steps:
        prediction = model.predict([watched])[0]
        model.preview(watched, prediction)
        model.advance(watched, prediction)
    assert torch.equal(watched.latents, alone.latents)
    assert torch.equal(watched.generator.get_state(), alone.generator.get_state())


def own_estimate(model: Any, state: tiny.LatentState, prediction: torch.Tensor) -> torch.Tensor | None:
    """What the sampler itself takes for the clean latents, if it says so."""
    arguments = {"generator": torch.Generator()} if "generator" in model._step_arguments else {}
    sampler = copy.deepcopy(state.sampler)
    sampler.register_to_config(clip_sample=False)  # A habit of models that draw pixels; these draw latents.
    output = sampler.step(prediction, state.timestep, state.latents, **arguments)
    estimate: torch.Tensor | None = getattr(output, "pred_original_sample", None)
    return getattr(output, "denoised", estimate)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("DDIMScheduler", {}, 1e-5),
        ("DDPMScheduler", {}, 1e-5),
        ("EDMEulerScheduler", {}, 1e-5),
        ("EulerDiscreteScheduler", {}, 1e-5),
        ("EulerDiscreteScheduler", {"prediction_type": "v_prediction"}, 1e-5),
        ("EulerDiscreteScheduler", {"prediction_type": "sample"}, 1e-5),
        ("EulerDiscreteScheduler", {"use_karras_sigmas": True}, 2e-3),
        ("HeunDiscreteScheduler", {}, 1e-5),
        ("LCMScheduler", {}, 1e-5),
    ],
)
def test_the_estimate_is_that_of_the_samplers_that_have_one(
    name: str, options: dict[str, Any], tolerance: float
) -> None:
    stock = tiny.build_sdxl()
    stock.scheduler = getattr(diffusers, name).from_config(stock.scheduler.config, **options)
    model = StableDiffusionXL(stock, "tiny", {}, "")
    state = tiny.begin(model, tiny.spec())
    while state.steps_done < state.spec.steps:
        prediction = model.predict([state])[0]
        expected = own_estimate(model, state, prediction)
        assert expected is not None
        error = (model._estimate(state, prediction) - expected).abs().max() / expected.abs().max()
        assert error < tolerance
        model.advance(state, prediction)


@pytest.mark.parametrize("kind", ["sd3", "flux"])
@pytest.mark.parametrize("name", FLUX_SAMPLERS)
def test_the_seed_decides_what_a_step_draws(kind: str, name: str) -> None:
    model, request = family(kind, name), tiny.spec()
    state = tiny.begin(model, request)
    before = state.generator.get_state()
    tiny.iterate(model, state)
    drew = not torch.equal(state.generator.get_state(), before)
    assert drew == FLOW_SAMPLERS[name][2]


def test_a_sampler_that_stock_cannot_run_is_refused_when_the_model_is_loaded() -> None:
    for misfit in (diffusers.FlowMatchHeunDiscreteScheduler(), diffusers.DPMSolverMultistepScheduler(**FLOW)):
        stock = tiny.build_flux()
        stock.scheduler = misfit
        with pytest.raises(UnsupportedModel, match=f"{type(misfit).__name__} does not fit FluxPipeline"):
            Flux(stock, "tiny", {}, "")


@pytest.mark.parametrize(
    ("sampler", "ranges"),
    [
        (diffusers.PNDMScheduler(skip_prk_steps=False), ((4, None),)),
        (diffusers.LCMScheduler(original_inference_steps=40), ((1, 40),)),
        (diffusers.DDIMScheduler(), ((1, None),)),
    ],
    ids=["pndm-prk", "lcm", "ddim"],
)
def test_a_model_says_which_numbers_of_steps_its_sampler_runs(sampler: Any, ranges: tuple[StepRange, ...]) -> None:
    stock = tiny.build_sdxl()
    stock.scheduler = sampler
    model = StableDiffusionXL(stock, "tiny", {"steps": 5}, "")
    assert model.info.step_ranges == ranges
    edges = {steps for first, last in ranges for steps in (first, last) if steps is not None}
    for steps in sorted(edges):
        tiny.begin(model, tiny.spec(steps=steps))
    assert not any(model.info.can_run(steps) for steps in (0, min(edges) - 1))
