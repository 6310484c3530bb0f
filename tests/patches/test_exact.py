"""Requests that share a forward pass get what each would get alone, whatever their sizes, times and guidance."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import group_norm, silu

import tiny
from quick import quick
from tilework.core.packing import IMAGE, Pack, Reuse, Size
from tilework.core.wire.spec import Spec
from tilework.patches.layout import PatchLayout, pack
from tilework.pipelines.families.latent_state import Conditioning, LatentState
from tilework.pipelines.families.sdxl import StableDiffusionXL
from tilework.pipelines.model_index import ADAPTERS
from tilework.pipelines.staged import StagedPipeline

# Relative to the largest value, as in test_parallel: guided predictions are several times as large as plain ones.
TOLERANCE = 1e-5
TRANSFORMERS = {
    "sd3": partial(tiny.build_sd3, max_side=256),
    "sd3.5": partial(tiny.build_sd3, max_side=256, num_heads=3, dual=True),
    "flux": partial(tiny.build_flux, "euler"),
    "schnell": partial(tiny.build_flux, "euler", guidance_embeds=False),
}
U_NETS = {
    "sdxl": tiny.build_sdxl,
    "sdxl-deep": partial(tiny.build_sdxl, deep=True),
    "sdxl-distilled": partial(tiny.build_sdxl, distilled=True),
    "sd": tiny.build_sd,
}
BUILD: dict[str, Callable[[], Any]] = {**TRANSFORMERS, **U_NETS}
FAMILIES = tuple(BUILD)


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


def build_family(name: str) -> StagedPipeline:
    pipeline = BUILD[name]()
    if name in U_NETS:
        torch.manual_seed(1)
        for module in pipeline.unet.modules():  # New ones have no effect beyond the statistics.
            if isinstance(module, nn.GroupNorm):
                nn.init.normal_(module.weight, 1.0, 0.3)
                nn.init.normal_(module.bias, 0.0, 0.3)
    text = {} if name in U_NETS else {"max_sequence_length": tiny.TEXT_LENGTH}
    adapter: Callable[..., StagedPipeline] = pkgutil.resolve_name(ADAPTERS[type(pipeline).__name__])
    return adapter(pipeline, name, text, "")


family = cache(build_family)


def denoiser(model: StagedPipeline) -> Any:
    return getattr(model._pipeline, "unet", None) or model._pipeline.transformer


SAMPLERS = {
    **tiny.SAMPLERS,
    "flux-dpm": lambda: DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, use_dynamic_shifting=True
    ),
    "sdxl-dpm": DPMSolverMultistepScheduler,
}


def samplers(name: str) -> tuple[str, ...]:
    """Three that the family can run; Heun asks more than once a step, the second ones draw noise or shift."""
    if name in U_NETS:
        return ("sdxl-euler", "sdxl-ancestral", "sdxl-dpm")
    return ("euler", "heun", "dpm") if name.startswith("sd3") else ("euler", "shifting", "flux-dpm")


@dataclass(frozen=True)
class Member:
    """A request that has taken some iterations with a sampler of its own."""

    spec: Spec
    sampler: str
    iterations: int

    def state(self, model: StagedPipeline) -> LatentState:
        """Iterations so far are taken alone."""
        usual, model._pipeline.scheduler = model._pipeline.scheduler, SAMPLERS[self.sampler]()
        state = tiny.begin(model, self.spec)
        model._pipeline.scheduler = usual
        for _ in range(min(self.iterations, len(state.sampler.timesteps) - 1)):
            tiny.iterate(model, state)
        return state


def members(name: str, cells: st.SearchStrategy[int]) -> st.SearchStrategy[list[Member]]:
    """One to eight requests; `cells` are sides in what the family counts: 16 px, or 8 px for U-Nets."""
    pixels = 8 if name in U_NETS else 16
    member = st.builds(
        lambda height, width, guidance, steps, seed, negative, sampler, iterations: Member(
            tiny.spec(
                height=pixels * height,
                width=pixels * width,
                guidance_scale=guidance,
                steps=steps,
                seed=seed,
                prompt="a red circle on a blue background"[seed % 30 :],
                negative_prompt=negative,
            ),
            sampler,
            iterations,
        ),
        height=cells,
        width=cells,
        guidance=st.sampled_from([1.0, 2.5, 7.0]),
        steps=st.integers(1, 6),
        seed=st.integers(0, 99),
        negative=st.sampled_from(["", "a green square", "blue"]),
        sampler=st.sampled_from(samplers(name)),
        iterations=st.integers(0, 3),
    )
    return st.lists(member, min_size=1, max_size=8)


caps = st.one_of(st.none(), st.integers(1, 8))


def alone(model: StagedPipeline, states: Sequence[LatentState]) -> list[Tensor]:
    """By the stock forward, which test_pipelines_exact compares with the stock pipeline bit for bit."""
    return [model.predict([state])[0] for state in states]


def assert_close(results: Sequence[Tensor], references: Sequence[Tensor]) -> None:
    for result, reference in zip(results, references, strict=True):
        assert result.shape == reference.shape
        assert result.dtype == reference.dtype
    assert error(results, references) <= TOLERANCE


def error(results: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """Relative to the largest value; a picture of one or two latents may have none that is not small by chance."""
    return max(
        float((result - reference).abs().max() / reference.abs().max().clamp(min=0.1))
        for result, reference in zip(results, references, strict=True)
    )


@contextmanager
def forwards(model: StagedPipeline) -> Iterator[list[int]]:
    """Batch rows of each forward pass of the denoiser."""
    seen: list[int] = []

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(len(args[0] if args else kwargs["hidden_states"]))

    hook = denoiser(model).register_forward_pre_hook(count, with_kwargs=True)
    yield seen
    hook.remove()


def check(name: str, batch: list[Member], cap: int | None) -> None:
    model = family(name)
    states = [member.state(model) for member in batch]
    before = [(state.latents.clone(), state.iteration_index) for state in states]
    assert_close(model.predict(states, partial(pack, cap=cap)), alone(model, states))
    for state, (latents, iteration_index) in zip(states, before, strict=True):
        assert torch.equal(state.latents, latents)
        assert state.iteration_index == iteration_index


@pytest.mark.parametrize("name", quick(("sd3", "sdxl-deep"), FAMILIES))
@settings(max_examples=5)
@given(data=st.data())
def test_any_mix_is_predicted_as_if_each_were_alone(name: str, data: st.DataObject) -> None:
    check(name, data.draw(members(name, st.integers(2, 8))), data.draw(caps))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=150)
@given(data=st.data())
def test_many_mixes_are_predicted_as_if_each_were_alone(name: str, data: st.DataObject) -> None:
    check(name, data.draw(members(name, st.integers(1, 16))), data.draw(caps))


def mixed(name: str, **changes: Any) -> list[Member]:
    """Four sizes, of which two have equal areas; guided and not; at different times."""
    kinds = samplers(name)
    sizes, guidance = [(64, 64), (64, 128), (128, 64), (128, 128), (192, 64)], [4.0, 1.0, 2.5, 7.0, 4.0]
    return [
        Member(
            tiny.spec(
                height=height,
                width=width,
                guidance_scale=guidance[index],
                prompt="a red circle on a blue background"[index:],
                negative_prompt="a blue square"[: 3 * index],
                seed=index,
                steps=4 + index,
                **changes,
            ),
            kinds[index % len(kinds)],
            index % 3,
        )
        for index, (height, width) in enumerate(sizes)
    ]


@cache
def mixed_states(name: str) -> list[LatentState]:
    """Those of `mixed`; predictions leave them as they are, which `check` looks at."""
    return [member.state(family(name)) for member in mixed(name)]


@cache
def mixed_alone(name: str) -> list[Tensor]:
    return alone(family(name), mixed_states(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mix_is_one_forward_pass_of_equal_patches(name: str) -> None:
    model = family(name)
    states = mixed_states(name)
    with forwards(model) as rows:
        together = model.predict(states, pack)
    passes = [2 if model._is_guided(state.spec) else 1 for state in states]
    assert rows == [sum(count * patches for count, patches in zip(passes, (1, 2, 2, 4, 3), strict=True))]
    assert_close(together, mixed_alone(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_requests_of_one_size_are_a_plain_batch(name: str) -> None:
    model = family(name)
    batch = [replace(member, spec=replace(member.spec, height=64, width=96)) for member in mixed(name)]
    states = [member.state(model) for member in batch]
    with forwards(model) as rows:
        together = model.predict(states, pack)
    assert rows == [sum(2 if model._is_guided(state.spec) else 1 for state in states)]
    assert_close(together, alone(model, states))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_of_the_requests_does_not_matter(name: str) -> None:
    model = family(name)
    states = mixed_states(name)
    straight = model.predict(states, pack)
    assert_close(model.predict(states[::-1], pack)[::-1], straight)


@pytest.mark.parametrize("name", ["sd3", "flux", "sdxl", "sd"])
def test_half_precision_rounds_as_it_does_for_one_request(name: str) -> None:
    model = build_family(name)
    states = [member.state(model) for member in mixed(name)]
    exact = alone(model, states)
    model._pipeline.to(torch.bfloat16)
    for state in states:
        state.latents = state.latents.bfloat16()
        halved = {name: tensor.bfloat16() for name, tensor in state.conditioning.tensors.items()}
        state.conditioning = Conditioning(halved)
    together, apart = model.predict(states, pack), alone(model, states)
    assert {prediction.dtype for prediction in together} == {torch.bfloat16}
    assert error(together, exact) <= 2 * error(apart, exact) < 0.5


def refuse(sizes: tuple[Size, ...], multiple: int, device: Any, reuses: tuple[Reuse, ...] = ()) -> PatchLayout:
    raise AssertionError("nothing was to be packed")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_of_one_is_the_stock_forward_bit_for_bit(name: str) -> None:
    model = family(name)
    states = mixed_states(name)
    model.predict(states, pack)
    for state, reference in zip(states, mixed_alone(name), strict=True):
        assert torch.equal(model.predict([state], refuse)[0], reference)
    assert model.predict([], refuse) == []


class Spoilt(PatchLayout):
    """A layout in which one thing is wrong."""

    def __init__(self, sizes: tuple[Size, ...], layout: PatchLayout, wrong: str) -> None:
        super().__init__(sizes, layout.csp)
        self.wrong = wrong

    def convolve(self, convolution: nn.Conv2d, patches: Tensor) -> Tensor:
        if self.is_wrong("halo"):
            return convolution._conv_forward(patches, convolution.weight, convolution.bias)
        return super().convolve(convolution, patches)

    def normalise(self, norm: nn.GroupNorm, patches: Tensor) -> Tensor:
        if self.is_wrong("statistics"):
            return group_norm(patches, norm.num_groups, norm.weight, norm.bias, norm.eps)
        return super().normalise(norm, patches)

    def convolve_activated(self, convolution: nn.Conv2d, norm: nn.GroupNorm, patches: Tensor) -> Tensor:
        if self.is_wrong("halo") or self.is_wrong("statistics"):
            return self.convolve(convolution, silu(self.normalise(norm, patches)))
        return super().convolve_activated(convolution, norm, patches)

    def attend(self, query: Tensor, *rest: Any, queries: Any, keys: Any) -> Tensor:
        attended = super().attend(query, *rest, queries=queries, keys=keys)
        if not self.is_wrong("attention"):
            return attended
        per_patch = queries[IMAGE] // self.csp.num_patches
        return attended.roll(per_patch, dims=2)

    def arrange(self, things: Sequence[Any]) -> list[Any]:
        arranged = super().arrange(things)
        if self.is_wrong("conditioning") and isinstance(arranged[0], Tensor) and arranged[0].dim() == 3:
            arranged[0], arranged[-1] = arranged[-1], arranged[0]
        return arranged

    def per_patch(self, values: Tensor) -> Tensor:
        return super().per_patch(values.roll(1, dims=0) if self.is_wrong("times") else values)

    def is_wrong(self, what: str) -> bool:
        return self.wrong == what


def spoilt(wrong: str) -> Pack:
    return lambda sizes, multiple, device, reuses=(): Spoilt(sizes, pack(sizes, multiple, device), wrong)


@pytest.mark.parametrize("wrong", ["halo", "statistics", "attention", "conditioning", "times"])
@pytest.mark.parametrize("name", ["sd3", "flux", "sdxl"])
def test_a_mechanism_that_goes_wrong_is_seen(name: str, wrong: str) -> None:
    if name not in U_NETS and wrong in ("halo", "statistics"):
        pytest.skip("transformers neither convolve nor normalise over a picture")
    model = family(name)
    states = mixed_states(name)
    references = mixed_alone(name)
    assert error(model.predict(states, spoilt("nothing")), references) <= TOLERANCE
    assert error(model.predict(states, spoilt(wrong)), references) > 10 * TOLERANCE


def run_together(model: StagedPipeline, joining: dict[int, list[Spec]]) -> dict[Spec, LatentState]:
    """Requests by the iteration at which they join; each leaves when it is done."""
    running: list[LatentState] = []
    done: dict[Spec, LatentState] = {}
    for iteration in range(20):
        running += [tiny.begin(model, spec) for spec in joining.get(iteration, [])]
        for state, prediction in zip(running, model.predict(running, pack), strict=True):
            model.advance(state, prediction)
        done |= {state.spec: state for state in running if state.steps_done == state.spec.steps}
        running = [state for state in running if state.spec not in done]
    assert not running
    return done


@pytest.mark.parametrize(
    "name", quick(("sd3.5", "flux", "sdxl-deep"), ("sd3", "sd3.5", "flux", "sdxl", "sdxl-deep", "sd"))
)
def test_pictures_do_not_change_when_others_join_or_leave(name: str) -> None:
    model = family(name)
    long, short, late = (
        tiny.spec(height=128, width=64, steps=6, seed=1, guidance_scale=2.0),
        tiny.spec(height=64, width=64, steps=2, seed=2, negative_prompt="a green square"),
        tiny.spec(height=64, width=96, steps=4, seed=3, guidance_scale=1.0),
    )
    done = run_together(model, {0: [long], 1: [short, late], 7: [replace(late, seed=4)]})
    assert len(done) == 4
    for spec, state in done.items():
        stock = tiny.run_stock(model._pipeline, spec)
        assert error([state.latents], [stock.latents[-1]]) <= TOLERANCE
        drawn = tiny.pixels(tiny.decode(model, state)).astype(int)
        assert np.abs(drawn - stock.pixels.astype(int)).max() <= 1


# What cannot be packed exactly is not packed.


@pytest.mark.parametrize("name", tuple(U_NETS))
def test_a_u_net_packs_odd_sizes_with_their_equals_only(name: str) -> None:
    model = family(name)
    sizes = [(72, 64), (64, 64), (72, 64), (64, 72), (128, 96)]
    specs = [tiny.spec(height=height, width=width, seed=index) for index, (height, width) in enumerate(sizes)]
    states = [tiny.begin(model, spec) for spec in specs]
    with forwards(model) as rows:
        together = model.predict(states, pack)
    per_state = 2 if model._is_guided(specs[0]) else 1
    assert rows == [per_state * count for count in (2, 8, 1)]
    assert_close(together, alone(model, states))


@pytest.mark.parametrize("name", ["sd3", "flux", "sdxl"])
def test_texts_of_different_length_are_not_packed_together(name: str) -> None:
    model = family(name)
    states = [member.state(model) for member in mixed(name)]
    for state in states[1:3]:
        tensors = dict(state.conditioning.tensors)
        tensors["encoder_hidden_states"] = tensors["encoder_hidden_states"][:, :9]
        if "txt_ids" in tensors:
            tensors["txt_ids"] = tensors["txt_ids"][:9]
        state.conditioning = Conditioning(tensors)
    with forwards(model) as rows:
        together = model.predict(states, pack)
    assert len(rows) == 2
    assert_close(together, alone(model, states))


class Echo:
    """A group of two in which the other rank is as this one."""

    rank, size = 0, 2

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        output.view(2, -1).copy_(source)


def test_in_a_group_each_request_has_a_forward_pass_of_its_own() -> None:
    model = family("sdxl")
    states = [replace(m, spec=replace(m.spec, guidance_scale=1.0)).state(model) for m in mixed("sdxl")]
    references = alone(model, states)
    model.parallel.join(Echo(), guided=False)  # type: ignore[arg-type]
    try:
        assert all(map(torch.equal, model.predict(states, refuse), references))
    finally:
        model.parallel.leave()


@pytest.mark.parametrize("adapter", ["encoder_hid_proj", "image_proj"])
@pytest.mark.parametrize("name", ["sd3", "flux", "sdxl"])
def test_with_adapters_nothing_is_packed(name: str, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family(name)
    states = mixed_states(name)
    monkeypatch.setattr(model._packing, "_model", type("Adapted", (), {adapter: True})())
    assert all(map(torch.equal, model.predict(states, refuse), mixed_alone(name)))


def test_a_u_net_of_unknown_parts_is_not_packed() -> None:
    pipeline = tiny.build_sdxl()
    pipeline.unet.down_blocks[0].downsamplers[0].conv.padding = (0, 0)
    assert not StableDiffusionXL(pipeline, "tiny", {}, "")._packing.is_possible
    pipeline = tiny.build_sdxl()
    pipeline.unet.mid_block = nn.Identity()
    assert not StableDiffusionXL(pipeline, "tiny", {}, "")._packing.is_possible


def scale_shift_sdxl() -> Any:
    pipeline = tiny.build_sdxl()
    config = {**pipeline.unet.config, "resnet_time_scale_shift": "scale_shift", "_use_default_values": []}
    pipeline.unet = UNet2DConditionModel.from_config(config).eval()
    return pipeline


@pytest.mark.parametrize(
    ("build", "usual"), [(tiny.build_sdxl, True), (scale_shift_sdxl, False)], ids=["as in SDXL", "scale and shift"]
)
def test_only_usual_resnet_blocks_are_activated_and_convolved_at_once(
    build: Callable[[], Any], usual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = StableDiffusionXL(build(), "tiny", {}, "")
    states, at_once = mixed_states("sdxl"), PatchLayout.convolve_activated
    seen: list[nn.Module] = []

    def count(self: PatchLayout, convolution: nn.Conv2d, norm: nn.GroupNorm, patches: Tensor) -> Tensor:
        seen.append(convolution)
        return at_once(self, convolution, norm, patches)

    monkeypatch.setattr(PatchLayout, "convolve_activated", count)
    assert_close(model.predict(states, pack), alone(model, states))
    blocks = [module for module in denoiser(model).modules() if isinstance(module, ResnetBlock2D)]
    assert seen.count(blocks[0].conv1) == seen.count(blocks[0].conv2) == int(usual)
    assert len(seen) == (2 * len(blocks) if usual else 0)


def test_after_an_error_the_stock_forward_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("sdxl")
    states, references = mixed_states("sdxl"), mixed_alone("sdxl")
    with monkeypatch.context() as broken:
        broken.setattr(PatchLayout, "normalise", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.predict(states, pack)
    assert all(map(torch.equal, alone(model, states), references))
