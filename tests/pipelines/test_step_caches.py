"""Caches of whole steps: the stock picture with the library's hook, bit for bit, and nothing of it in others' pictures.

The stock side applies the hook as a user of diffusers would; a context is set where the pipeline sets none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.hooks import (
    FirstBlockCacheConfig,
    HookRegistry,
    TaylorSeerCacheConfig,
    apply_first_block_cache,
    apply_taylorseer_cache,
)
from diffusers.hooks.hooks import CacheContext, _set_cache_context

import tiny
from patches.test_exact import Echo
from quick import quick
from tilework.core.cache import CacheChoice, CacheKind, CacheUse
from tilework.core.wire.spec import Spec
from tilework.patches.layout import pack
from tilework.pipelines.caching.steps import STEP_BLOCKS
from tilework.pipelines.components import denoisers_of
from tilework.pipelines.cuda.graphs import _changes
from tilework.pipelines.families.flux import Flux
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from zoo import requests
from zoo.registry import ZOO, build

FBCACHE, TAYLORSEER = CacheChoice(CacheKind.FBCACHE, 0.9), CacheChoice(CacheKind.TAYLORSEER, 2.0)
MODELS = {
    "ChromaTransformer2DModel": "chroma",
    "CogVideoXTransformer3DModel": "cogvideox",
    "CogView4Transformer2DModel": "cogview4",
    "Flux2Transformer2DModel": "flux2",
    "FluxTransformer2DModel": "flux-true-guidance",
    "HunyuanVideoTransformer3DModel": "hunyuan-video",
    "LTXVideoTransformer3DModel": "ltx",
    "MochiTransformer3DModel": "mochi",
    "PixArtTransformer2DModel": "pixart-sigma",
    "QwenImageTransformer2DModel": "qwen-image",
    "SD3Transformer2DModel": "sd3",
    "SanaTransformer2DModel": "sana",
    "WanTransformer3DModel": "wan21",
    "ZImageTransformer2DModel": "z-image",
}
"""A model of the zoo for each class that can have a cache of whole steps."""
CASES = [
    (name, choice)
    for kind, name in MODELS.items()
    for choice in ((FBCACHE, TAYLORSEER) if STEP_BLOCKS[kind].first else (TAYLORSEER,))
] + [("wan22", FBCACHE)]
TWO_CALLS = ("chroma",)  # In each step, and no contexts that tell them apart.
QUICK = [("qwen-image", FBCACHE)]


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


def hook(pipeline: Any, choice: CacheChoice) -> Any:
    """A stock pipeline with the library's hook."""
    for denoiser in denoisers_of(pipeline).values():
        if choice.kind is CacheKind.FBCACHE:
            if type(denoiser).__name__ == "SD3Transformer2DModel":
                return_text(denoiser.transformer_blocks[-1])
            apply_first_block_cache(denoiser, FirstBlockCacheConfig(threshold=choice.value))
        else:
            if type(denoiser).__name__ == "SD3Transformer2DModel":
                return_text(denoiser.transformer_blocks[-1])
            places: dict[str, Any] = {"use_lite_mode": True}
            if type(denoiser).__name__ == "ZImageTransformer2DModel":
                places = {"skip_predict_identifiers": [r"layers\.\d+"], "cache_identifiers": [r"all_final_layer\..*"]}
            config = TaylorSeerCacheConfig(
                cache_interval=int(choice.value), taylor_factors_dtype=torch.float32, **places
            )
            apply_taylorseer_cache(denoiser, config)
        HookRegistry.check_if_exists_or_initialize(denoiser).invalidate_child_registries_cache()
        _set_cache_context(denoiser, CacheContext("all"))
    return pipeline


def return_text(block: Any) -> None:
    """Let SD3's last block return a text, without which the hooks fail; nothing reads it."""
    stock = block.forward

    def forward(**given: Any) -> Any:
        return given["encoder_hidden_states"], stock(**given)[1]

    block.forward = forward


def cached(made: Any, name: str, choice: CacheChoice | None, seed: int = 1) -> Spec:
    return replace(requests.spec_of(ZOO[name], made, seed), cache=choice)


def drawn(made: Any, spec: Spec) -> tuple[np.ndarray, CacheUse]:
    """Alone, without a pause."""
    _, state = requests.begin(made, spec)
    while state.steps_done < state.num_steps:
        made.step([state])
    return requests.end(made, state), state.take_cache_use() or CacheUse()


def test_each_class_has_a_model() -> None:
    assert MODELS.keys() == STEP_BLOCKS.keys()


@pytest.mark.parametrize("case", quick(QUICK, CASES), ids=lambda case: f"{case[0]}-{case[1].kind}")
def test_a_picture_with_a_cache_is_the_stock_picture_with_its_hook(case: tuple[str, CacheChoice]) -> None:
    name, choice = case
    pipeline = build(ZOO[name])
    made = StockPipeline(pipeline, name, {}, "")
    assert choice.kind in made.info.caches
    picture, use = drawn(made, cached(made, name, choice))
    assert 0 < use.saving < 1
    hook(pipeline, choice)
    if name in TWO_CALLS:
        calls = count()
        pipeline.transformer.register_forward_pre_hook(
            lambda module, _: _set_cache_context(module, CacheContext(f"call {next(calls) % 2}"))
        )
    assert np.array_equal(picture, requests.stock_pixels(ZOO[name], pipeline, 1))


@pytest.mark.parametrize("choice", [FBCACHE, TAYLORSEER], ids=str)
@pytest.mark.parametrize(
    ("kind", "stock"),
    [(StableDiffusion3, tiny.build_sd3), pytest.param(Flux, tiny.build_flux, marks=pytest.mark.exhaustive)],
)
def test_the_same_of_families_that_call_the_denoiser_themselves(
    kind: Callable[..., Any], stock: Callable[[], Any], choice: CacheChoice
) -> None:
    made, spec = kind(stock(), "tiny", {}, ""), tiny.spec(cache=choice)
    state = tiny.begin(made, spec)
    tiny.finish(made, state)
    use = state.take_cache_use()
    assert use is not None
    assert 0 < use.saving < 1
    reference = tiny.run_stock(hook(stock(), choice), spec, made._defaults.max_sequence_length)
    assert torch.equal(state.latents, reference.latents[-1])


@pytest.mark.slow
def test_requests_that_take_turns_or_share_a_batch_keep_nothing_of_each_other() -> None:
    made = StockPipeline(build(ZOO["qwen-image"]), "qwen-image", {}, "")
    asked = [
        cached(made, "qwen-image", choice, seed) for seed, choice in enumerate((FBCACHE, FBCACHE, TAYLORSEER, None))
    ]
    alone = [drawn(made, spec) for spec in asked]
    states = [requests.begin(made, spec)[1] for spec in asked]
    made.step(states[:1])
    while running := [state for state in states if state.steps_done < state.num_steps]:
        made.step(running, pack)
    for state, (picture, use) in zip(states, alone, strict=True):
        assert np.array_equal(requests.end(made, state), picture)
        assert (state.take_cache_use() or CacheUse()) == use


def test_requests_of_a_family_that_packs_keep_nothing_of_each_other() -> None:
    made = StableDiffusion3(tiny.build_sd3(), "tiny", {}, "")
    specs = [tiny.spec(seed=seed, cache=choice) for seed, choice in enumerate((FBCACHE, FBCACHE, None))]
    alone = [tiny.begin(made, spec) for spec in specs]
    for state in alone:
        tiny.finish(made, state)
    states = [tiny.begin(made, spec) for spec in specs]
    made.step(states[:1], pack)
    while running := [state for state in states if state.steps_done < 4]:
        made.step(running, pack)
    for state, reference in zip(states, alone, strict=True):
        assert torch.equal(state.latents, reference.latents)


@pytest.mark.slow
def test_a_request_that_moves_after_each_step_has_the_plain_picture() -> None:
    """Its cache begins anew each time, so nothing is ever left out."""
    here, there = (StockPipeline(build(ZOO["z-image"]), "z-image", {}, "") for _ in range(2))
    spec = cached(here, "z-image", TAYLORSEER)
    assert np.array_equal(requests.moved(here, there, spec), drawn(here, replace(spec, cache=None))[0])


def test_after_an_error_a_cache_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = StableDiffusion3(tiny.build_sd3(), "tiny", {}, "")
    state = tiny.begin(made, tiny.spec(steps=8, cache=CacheChoice(CacheKind.TAYLORSEER, 100)))
    for _ in range(4):
        made.step([state])
    assert state.take_cache_use() == CacheUse(computed=6, skipped=2)
    with monkeypatch.context() as broken:
        broken.setattr(made._denoiser.norm_out, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.step([state])
    for block in made._denoiser.transformer_blocks:
        assert not hasattr(block.forward, "__wrapped__"), "hooks are left in place"
    made.step([state])
    assert state.take_cache_use() == CacheUse(computed=2, skipped=0)


def test_steps_of_a_group_are_computed_whole_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made = StableDiffusion3(tiny.build_sd3(), "tiny", {}, "")
    state = tiny.begin(made, tiny.spec(steps=8, guidance_scale=1.0, cache=CacheChoice(CacheKind.TAYLORSEER, 100)))
    for _ in range(4):
        made.step([state])
    before = state.take_cache_use()
    made.parallel.join(Echo(), guided=False)
    try:
        monkeypatch.setattr(made, "_denoiser", lambda hidden_states, **_: (hidden_states,))
        made.step([state])
    finally:
        made.parallel.leave()
    monkeypatch.undo()
    use = state.take_cache_use()
    assert before == CacheUse(computed=6, skipped=2)
    assert use is not None
    assert (use.computed, use.skipped) == (0, 0)
    assert "several devices" in use.off
    made.step([state])
    assert state.take_cache_use() == CacheUse(computed=2, skipped=0)


@pytest.mark.slow
def test_the_same_of_a_stock_call() -> None:
    made = StockPipeline(build(ZOO["z-image"]), "z-image", {}, "")
    _, state = requests.begin(made, cached(made, "z-image", TAYLORSEER))
    state.use_cache(degree=2)
    assert not state.walk.pending.is_cached
    use = state.take_cache_use()
    assert use is not None
    assert "several devices" in use.off
    state.use_cache(degree=1)
    assert state.walk.pending.is_cached


def test_no_pass_is_recorded_while_a_cache_may_leave_a_part_of_it_out() -> None:
    made = StableDiffusion3(tiny.build_sd3(), "tiny", {}, "")
    changes: list[bool] = []
    made._denoiser.register_forward_hook(lambda *_: changes.append(_changes(made, made._denoiser)))
    for choice in (FBCACHE, None):
        made.step([tiny.begin(made, tiny.spec(cache=choice))])
    assert changes == [True, False]


@pytest.mark.slow
def test_a_model_whose_blocks_are_compiled_has_none() -> None:
    pipeline = tiny.build_sd3()
    assert CacheKind.FBCACHE in StableDiffusion3(pipeline, "tiny", {}, "").info.caches
    for block in pipeline.transformer.transformer_blocks:
        block.compile()
    assert StableDiffusion3(pipeline, "tiny", {}, "").info.caches == (CacheKind.PATCH, CacheKind.IMAGE)


def test_one_whose_weights_are_moved_by_hooks_has_none() -> None:
    pipeline = tiny.build_sd3()
    pipeline.transformer.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    assert StableDiffusion3(pipeline, "tiny", {}, "").info.caches == (CacheKind.PATCH, CacheKind.IMAGE)


@pytest.mark.slow
def test_other_models_have_none() -> None:
    for name in ("sd1-image", "flux2-klein-kv"):
        assert StockPipeline(build(ZOO[name]), name, {}, "").info.caches == ()
