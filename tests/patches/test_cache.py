"""The patch cache: what is computed is right, what is kept is the request's own, and never more than allowed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from patches.test_exact import TOLERANCE, Echo, error, family
from quick import quick
from tilework.core.cache import CacheChoice, CacheKind, CacheUse
from tilework.core.packing import Reuse
from tilework.core.wire.spec import Spec
from tilework.patches.cache import PatchCache
from tilework.patches.cached_layout import CachedLayout
from tilework.patches.layout import pack
from tilework.pipelines.families.latent_state import LatentState
from tilework.pipelines.staged import StagedPipeline

FAMILIES = ("sd3", "sd3.5", "flux", "sdxl", "sdxl-deep", "sd")
PATCH, IMAGE = CacheKind.PATCH, CacheKind.IMAGE
PLENTY = 1 << 30
NUM_BLOCKS = {"sd3": 2, "sdxl": 5}


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


def asked(threshold: float, kind: CacheKind = PATCH, **changes: Any) -> Spec:
    values = {"height": 128, "width": 64, "steps": 6, "guidance_scale": 3.0, "prompt": "a red circle"} | changes
    return tiny.spec(**values, cache=CacheChoice(kind, threshold))


def begin(model: StagedPipeline, spec: Spec) -> LatentState:
    state = tiny.begin(model, spec)
    assert isinstance(state, LatentState)
    return state


def reuse(state: LatentState) -> Reuse:
    assert isinstance(state.reuse, Reuse)
    return state.reuse


def run(model: StagedPipeline, spec: Spec) -> LatentState:
    """Alone, from start to end."""
    state, cache = begin(model, spec), PatchCache(PLENTY)
    while state.steps_done < spec.steps:
        model.step([state], cache)
    return state


@pytest.mark.parametrize("name", quick(("sd3", "flux", "sdxl"), FAMILIES))
def test_with_threshold_zero_everything_is_computed_and_bit_equal_to_no_cache(name: str) -> None:
    model, cache = family(name), PatchCache(PLENTY)
    kept = [begin(model, asked(0.0, seed=seed)) for seed in range(2)]
    plain = [begin(model, replace(state.spec, cache=None)) for state in kept]
    packed = partial(pack, cap=max(reuse(kept[0]).patch))
    for _ in range(4):
        model.step(kept, cache)
        model.step(plain, packed)
        assert all(torch.equal(one.latents, other.latents) for one, other in zip(kept, plain, strict=True))
    assert all(reuse(state).use.computed > 0 == reuse(state).use.skipped for state in kept)


class Drawn:
    """In place of a predictor: each patch may be reused with a chance, and one always, whatever has changed."""

    def __init__(self, seed: int, chance: float) -> None:
        self.generator, self.chance = torch.Generator().manual_seed(seed), chance

    def __call__(self, index: int, change: Tensor) -> Tensor:
        drawn = torch.rand(change.shape, generator=self.generator)
        return torch.where(drawn <= drawn.min().clamp(min=self.chance), 0.0, 2.0)


def twice(name: str, seed: int, chance: float) -> float:
    """The difference between a prediction and the same again, of which only some patches are computed."""
    model = family(name)
    sizes = [(64, 64), (128, 64), (64, 128)]
    specs = [
        asked(1.0, height=height, width=width, seed=seed + index, guidance_scale=(1.0, 3.0)[index % 2])
        for index, (height, width) in enumerate(sizes)
    ]
    states, drawn = [begin(model, spec) for spec in specs], Drawn(seed, chance)
    for state in states:
        tiny.iterate(model, state)
        state.reuse = replace(reuse(state), patch=(4, 4), predict=drawn)
    cache = PatchCache(PLENTY)
    first = model.predict(states, cache)
    assert not any(reuse(state).use.skipped for state in states)
    again = model.predict(states, cache)
    assert any(reuse(state).use.skipped for state in states)
    return error(again, first)


@pytest.mark.parametrize("chance", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("name", quick(("sd3", "sdxl"), FAMILIES))
def test_any_part_of_what_has_not_changed_gives_the_same_prediction(name: str, chance: float) -> None:
    assert twice(name, 3, chance) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), chance=st.floats(0.1, 1.0))
def test_any_part_at_all(name: str, seed: int, chance: float) -> None:
    assert twice(name, seed, chance) <= TOLERANCE


@pytest.mark.parametrize("name", ["sd3", "sdxl"])
def test_a_swapped_patch_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = CachedLayout._complete
    monkeypatch.setattr(CachedLayout, "_complete", lambda self, rows: complete(self, rows).roll(1, dims=0))
    assert twice(name, 3, 0.5) > 10 * TOLERANCE


def assert_same(state: LatentState, alone: LatentState) -> None:
    assert reuse(state).use == reuse(alone).use
    assert error([state.latents], [alone.latents]) <= 10 * TOLERANCE


@pytest.mark.parametrize("name", quick(("sd3", "sdxl"), FAMILIES))
def test_a_picture_does_not_depend_on_who_joins_leaves_or_takes_turns(name: str) -> None:
    model, cache = family(name), PatchCache(PLENTY)
    specs = [
        asked(0.05, seed=1),
        asked(0.2, seed=2, kind=IMAGE, guidance_scale=1.0),
        asked(0.1, seed=3),
        asked(0.05, seed=4, height=64),
    ]
    alone = [run(model, spec) for spec in specs]
    assert all(0 < reuse(state).use.saving < 1 for state in alone)
    states = [begin(model, spec) for spec in specs]
    # Places of those that make a step together; the last two rounds end some.
    for group in ([0, 1], [0, 1], [2], [1, 2, 0], [3, 0], [2, 3], [0, 1, 2, 3], [1, 3], [0, 2], [3, 2, 1, 0]):
        model.step([states[index] for index in group if states[index].steps_done < 6], cache)
    for state in states:
        while state.steps_done < 6:
            model.step([state], cache)
    for state, reference in zip(states, alone, strict=True):
        assert_same(state, reference)


def test_who_is_dropped_leaves_nothing_and_changes_nobody() -> None:
    model, cache = family("sd3"), PatchCache(PLENTY)
    spec = asked(0.05, seed=1)
    state, other = begin(model, spec), begin(model, asked(0.05, seed=2))
    for _ in range(2):
        model.step([state, other], cache)
    together = cache.num_bytes
    del other
    gc.collect()
    while state.steps_done < spec.steps:
        model.step([state], cache)
    assert 0 < cache.num_bytes <= 0.6 * together
    assert_same(state, run(model, spec))
    del state
    gc.collect()
    assert cache.num_bytes == 0


def test_a_request_that_moves_begins_anew() -> None:
    model, cache = family("sd3"), PatchCache(PLENTY)
    state = begin(model, asked(10.0))
    for _ in range(2):
        model.step([state], cache)
    assert reuse(state).use.skipped == reuse(state).use.computed
    moved = tiny.move(model, model, state)
    model.step([moved], cache)
    assert reuse(moved).use.skipped == 0
    model.step([moved], cache)
    assert reuse(moved).use.skipped > 0


def test_steps_of_a_group_drop_what_was_kept_and_say_so() -> None:
    model, cache = family("sd3"), PatchCache(PLENTY)
    state = begin(model, asked(10.0, guidance_scale=1.0))
    model.step([state], cache)
    assert cache.num_bytes > 0
    model.parallel.join(Echo(), guided=False)  # type: ignore[arg-type]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "_predict_one", lambda state: torch.zeros_like(state.latents))
            model.step([state], None)
    finally:
        model.parallel.leave()
    gc.collect()
    assert cache.num_bytes == 0
    assert "several devices" in reuse(state).use.off
    before = reuse(state).use
    model.step([state], cache)
    assert reuse(state).use.skipped == before.skipped


@pytest.mark.parametrize(("kind", "whole"), [(PATCH, False), (IMAGE, True)])
def test_images_are_skipped_whole_or_not_at_all(kind: CacheKind, whole: bool) -> None:
    model, uses = family("sd3"), []
    state, cache = begin(model, asked(0.05, kind)), PatchCache(PLENTY)
    for _ in range(6):
        model.step([state], cache)
        use = state.take_cache_use()
        assert use is not None
        uses.append(use)
    patches = 8 * 4  # Of 2 x 2 latents, of 16 x 8.
    parts = [use.skipped % patches for use in uses]
    assert any(use.skipped for use in uses)
    assert (not any(parts)) is whole


@settings(max_examples=5)
@given(data=st.data())
def test_memory_never_exceeds_its_bound(data: st.DataObject) -> None:
    model = family("sd3")
    most = data.draw(st.integers(0, 400_000), label="most_bytes")
    cache = PatchCache(most)
    states: list[LatentState] = []
    for seed in range(data.draw(st.integers(2, 6), label="passes")):
        if (len(states) < 3 and data.draw(st.booleans(), label="one joins")) or not states:
            states.append(begin(model, asked(0.1, seed=seed, height=data.draw(st.sampled_from([64, 128])))))
        elif data.draw(st.booleans(), label="one is dropped"):
            del states[0]
        group = data.draw(st.lists(st.sampled_from(range(len(states))), min_size=1, unique=True)) if states else []
        model.predict([states[index] for index in group], cache)
        assert cache.num_bytes <= most


def test_blocks_without_room_are_computed_whole_and_it_is_said() -> None:
    model, cache = family("sd3"), PatchCache(PLENTY)
    spec = asked(10.0)
    state = begin(model, spec)
    model.step([state], cache)
    one_block = cache.num_bytes // NUM_BLOCKS["sd3"]
    state, cache = begin(model, spec), PatchCache(one_block + one_block // 2)
    for _ in range(2):
        model.step([state], cache)
    use = reuse(state).use
    assert use.computed == 3 * use.skipped
    assert "memory" in use.off


def test_after_an_error_nothing_of_the_pass_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = family("sdxl"), PatchCache(PLENTY)
    state = begin(model, asked(10.0))
    model.step([state], cache)
    with monkeypatch.context() as broken:
        broken.setattr(CachedLayout, "_store", lambda *_: 1 / 0)
        broken.setattr(CachedLayout, "_computed", lambda *_: None)
        with pytest.raises(ZeroDivisionError):
            model.predict([state], cache)
    assert cache.num_bytes == 0
    before = reuse(state).use.skipped
    model.predict([state], cache)
    assert reuse(state).use.skipped == before


def reason(name: str, **changes: Any) -> str:
    use = begin(family(name), asked(0.1, **changes)).take_cache_use()
    assert use is not None
    assert use == CacheUse(off=use.off)
    return use.off


def test_what_cannot_be_cut_has_no_cache_and_a_reason() -> None:
    assert "cannot be halved" in reason("sdxl", height=72)
    assert "true_cfg_scale" in reason("flux", arguments={"true_cfg_scale": 2.0}, negative_prompt="blue")
    assert begin(family("sd3"), replace(asked(0.1), cache=None)).take_cache_use() is None


def test_requests_with_and_without_a_cache_do_not_share_a_pass() -> None:
    model, cache = family("sd3"), PatchCache(PLENTY)
    states: Sequence[LatentState] = [begin(model, asked(0.1)), begin(model, replace(asked(0.1), cache=None))]
    with_cache, without = model.predict(states, cache)
    assert torch.equal(without, model.predict([states[1]])[0])
    assert error([with_cache], [without]) <= TOLERANCE


def test_slow_changes_add_up() -> None:
    """An input is compared with the one that its output was computed from, not with that of the step before."""
    model, cache = family("sd3"), PatchCache(PLENTY)
    state = begin(model, asked(0.001, guidance_scale=1.0))
    first = state.latents.clone()
    skipped: list[int] = []
    for step in itertools.count():
        state.latents = first * (1 + 0.02 * step)
        model.predict([state], cache)
        use = state.take_cache_use()
        assert use is not None
        skipped.append(use.skipped)
        if step > 1 and use.skipped < max(skipped):
            break
        assert step < 20, f"slow changes are never seen: {skipped}"
    assert skipped[1] == max(skipped) > 0
