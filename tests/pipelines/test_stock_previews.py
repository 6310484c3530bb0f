"""Previews of stock pipelines: the stock call itself says what its picture would be if the model were right now."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from quick import quick
from tilework.core.preview import preview_shape, spread
from tilework.core.request import Shape
from tilework.core.wire.spec import Image, Spec
from tilework.patches.layout import pack
from tilework.pipelines.family import Family, StepState
from tilework.pipelines.previews.shrink import shrunk
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.pipelines.support.record import served_classes
from zoo import requests
from zoo.registry import ZOO, build

QUICK = ("ltx-condition", "ltx2", "z-image")
SERVED = [name for name, model in ZOO.items() if model.class_name in served_classes()]
NOISY = {"sd2": 8, "sd1-pag-inpaint": 6, "text-to-video-video": 16, "hunyuan-dit": 6, "hunyuan-dit-pag": 6}
"""Levels of 255 by which the last step of a sampler moves away from what the model believes in."""


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@cache
def made(name: str) -> Family:
    return StockPipeline(build(ZOO[name]), name, {}, "")


def spec_of(name: str, every: int = 1, **changes: Any) -> Spec:
    return replace(requests.spec_of(ZOO[name], made(name), 1), preview_every=every, **changes)


def watched(name: str, spec: Spec) -> tuple[list[tuple[int, Image]], StepState]:
    """All steps, with the previews that are drawn before them are counted."""
    drawn: list[tuple[int, Image]] = []
    _, state = requests.begin(made(name), spec)
    while state.steps_done < state.num_steps:
        made(name).step([state], watch=lambda now, draw: drawn.append((now.steps_done, draw())))
    return drawn, state


def frames(image: Image) -> np.ndarray:
    return np.frombuffer(image.pixels, np.uint8).reshape(image.frames, image.height, image.width, 3).astype(int)


@pytest.mark.parametrize("name", quick(QUICK, SERVED))
def test_what_the_model_believes_in_at_last_is_the_result_and_nothing_changes(name: str) -> None:
    spec = spec_of(name)
    if not made(name).info.stages[1].previews:
        pytest.skip("it draws none")
    drawn, state = watched(name, spec)
    found = requests.end(made(name), state)
    assert np.array_equal(found, requests.alone(made(name), replace(spec, preview_every=0)))
    assert len(drawn) >= spec.steps
    last = frames(drawn[-1][1])
    assert len(np.unique(last)) > 10, "a flat picture would prove nothing"
    if preview_shape(spec.shape) == spec.shape and len(found) == spec.shape.pixels * 3:
        result = found.reshape(spec.frames, *last.shape[1:]).astype(int)
        assert np.abs(last - result[spread(len(result), len(last))]).max() <= NOISY.get(name, 3)


def test_previews_come_step_by_step_and_change_from_one_to_the_next() -> None:
    drawn, _ = watched("ltx", spec_of("ltx"))
    steps_done = [step for step, _ in drawn]
    assert steps_done[:-1] == [0, 1, 2], "a preview is told before its step is counted"
    assert len({image.pixels for _, image in drawn}) == len(drawn)


def test_without_previews_nothing_is_looked_at() -> None:
    drawn, _ = watched("ltx", spec_of("ltx", every=0))
    assert drawn == []


def test_requests_that_share_passes_have_previews_of_their_own() -> None:
    """The second has none."""
    name = "ltx"
    specs = [spec_of(name), spec_of(name, every=0, seed=2)]
    states = [requests.begin(made(name), spec)[1] for spec in specs]
    drawn: list[tuple[int, Image]] = []
    while states[0].steps_done < states[0].num_steps:
        made(name).step(states, pack, lambda now, draw: drawn.append((now.spec.seed, draw())))
    assert [seed for seed, _ in drawn] == [1] * specs[0].steps
    alone, _ = watched(name, specs[0])
    assert np.abs(frames(drawn[0][1]) - frames(alone[0][1])).max() <= 2


@pytest.mark.slow
def test_a_second_denoiser_that_was_not_asked_yet_is_no_reason_to_fail() -> None:
    """Wan 2.2 hands over from one to the other in the middle of its steps."""
    name = "wan22"
    drawn, _ = watched(name, spec_of(name))
    assert len(drawn) == spec_of(name).steps


@pytest.mark.slow
def test_a_long_clip_is_shown_by_a_few_frames_of_its_size() -> None:
    spec = spec_of("wan21", height=272, width=32, frames=21, steps=1, whole_steps=1)
    drawn, _ = watched("wan21", spec)
    small = preview_shape(spec.shape)
    assert small == Shape(256, 32, 17)
    for _, image in drawn:
        assert (image.height, image.width, image.frames) == (256, 32, 5)
        assert len({bytes(one) for one in frames(image).astype(np.uint8)}) > 1, "it moves"


def test_what_is_decoded_is_a_part_of_the_latents() -> None:
    latents = torch.arange(2 * 21 * 60 * 104, dtype=torch.float32).reshape(1, 2, 21, 60, 104)
    small = preview_shape(Shape(480, 832, 81))
    part = shrunk(latents, Shape(480, 832, 81), small)
    assert part.shape == (1, 2, 5, 60 * small.height // 480, 104 * small.width // 832)
    centre = latents[:, :, [0, 5, 10, 15, 20]].mean(dim=(-1, -2))
    assert torch.allclose(part.mean(dim=(-1, -2)), centre, rtol=1e-3)
    whole = torch.rand(1, 2, 3, 8, 8)
    assert torch.equal(shrunk(whole, Shape(64, 64, 9), Shape(64, 64, 9)), whole)
    batch = shrunk(torch.rand(9, 4, 64, 64), Shape(512, 512, 9), Shape(256, 256, 9))
    assert batch.shape == (9, 4, 32, 32), "frames as rows stay"
    tokens = torch.rand(1, 77, 8)
    assert shrunk(tokens, Shape(512, 512), Shape(256, 256)) is tokens


def test_no_previews_where_a_decoder_needs_all_latents() -> None:
    assert not any(stage.previews for stage in made("allegro").info.stages)
    loop = made("ltx").info.stages[1]
    assert (loop.previews, "vae" in loop.components) == ("decode", True)
