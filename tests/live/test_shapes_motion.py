"""The shipped model of clips on real workers: what its `tilework.json` says, and the stock pipeline's clip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tilework
import tiny
from builders import table
from runtime.rig import Rig, assert_nothing_is_left
from tilework.core.model import ModelSource
from tilework.core.request import Status
from tilework.core.wire import Spec
from training.shapes_motion.model import DEFAULTS
from zoo.registry import quiet

PROMPT = "a red circle moves left on a black background"
STEPS = 3


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    tiny.prepare()
    rig = Rig(ModelSource(path="shapes-motion"), "edf", costs=table(pipeline="shapes-motion"))
    try:
        rig.run(rig.engine.start())
        yield rig
    finally:
        rig.close()


def test_a_request_gets_the_defaults_of_the_model(rig: Rig) -> None:
    (info,) = rig.engine.models.values()
    assert (info.name, info.default_steps, info.default_guidance_scale) == ("shapes-motion", DEFAULTS["steps"], 4.0)
    assert (info.default_height, info.default_width, info.default_frames) == (64, 64, DEFAULTS["num_frames"])
    assert (info.max_frames, info.frame_multiple, info.max_side) == (DEFAULTS["max_frames"], 4, DEFAULTS["max_side"])


def test_clips_on_two_workers_are_the_stock_pipelines_bit_for_bit(rig: Rig) -> None:
    asked = {
        f"r{frames}": tiny.spec(prompt=PROMPT, height=64, width=64, frames=frames, steps=STEPS) for frames in (5, 9)
    }
    outcomes = rig.outcomes(asked)
    assert_nothing_is_left(rig.engine)
    stock = tilework.reference("shapes-motion")
    quiet(stock)
    for outcome in outcomes:
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        expected = stock_clip(stock, asked[outcome.uid])
        assert np.array_equal(np.frombuffer(outcome.image.pixels, np.uint8), expected.ravel())
        assert outcome.image.frames == len(expected)


def stock_clip(stock: Any, spec: Spec) -> np.ndarray:
    """The frames (frames, rows, columns, 3) that the stock call makes."""
    made = stock(
        spec.prompt,
        height=spec.height,
        width=spec.width,
        num_frames=spec.frames,
        num_inference_steps=spec.steps,
        guidance_scale=spec.guidance_scale,
        generator=torch.Generator().manual_seed(spec.seed),
        output_type="pil",
    )
    return np.stack([np.asarray(frame) for frame in made.frames[0]])
