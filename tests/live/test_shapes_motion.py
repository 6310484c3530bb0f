"""The shipped model of clips on real workers: what its `tilework.json` says, and the stock pipeline's clip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

import tilework
import tiny
from builders import table
from runtime.rig import Rig, assert_nothing_is_left
from tilework.control.history import PastWork
from tilework.control.history_recorder import read_history
from tilework.core.model import ModelSource
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.cost.table_costs import TableCosts
from training.shapes_motion.model import DEFAULTS
from zoo.registry import quiet

PROMPT = "a red circle moves left on a black background"
STEPS = 3


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    tiny.prepare()
    rig = Rig(ModelSource(path="shapes-motion"), "edf", costs=table(pipeline="shapes-motion"))
    try:
        rig.start()
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


@pytest.fixture
def ddit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Two devices are better than one by the table, whatever this machine would measure."""
    monkeypatch.setattr(TableCosts, "observe", lambda *_: None)
    tiny.prepare()
    costs = table(step_s=0.05, degrees=(1, 2), pipeline="shapes-motion")
    rig = Rig(ModelSource(path="shapes-motion"), "ddit", costs=costs)
    try:
        rig.start()
        yield rig
    finally:
        rig.close()


@pytest.mark.slow
def test_a_clip_begins_beside_the_decode_of_another_and_is_promoted_after_it(ddit: Rig) -> None:
    """DDiT: the first has both devices. Its decode leaves one to the second, which gets the other when that is done."""
    asked = {
        "first": tiny.spec(prompt=PROMPT, height=64, width=64, frames=9, steps=STEPS),
        "second": tiny.spec(prompt=PROMPT, height=64, width=64, frames=9, steps=24),
    }
    outcomes = ddit.outcomes(asked)
    past = read_history(ddit.log.getvalue().splitlines())
    jobs = {one.request.uid: one.job_id for one in past.requests}
    first, second = ([one for one in past.works if one.work.job_ids == (jobs[uid],)] for uid in asked)
    assert degrees(first, "diffuse") == [2]
    assert degrees(first, "decode") == [1]
    assert degrees(second, "diffuse") == [1, 2]
    decode = next(one for one in first if one.work.stage.name == "decode")
    alone = [one for one in second if len(one.work.devices) == 1 and one.work.stage.name != "decode"]
    assert any(one.start_ns < decode.end_ns and one.end_ns > decode.start_ns for one in alone)
    stock = tilework.reference("shapes-motion")
    quiet(stock)
    for outcome in outcomes:
        assert outcome.image is not None, outcome.reason
        found = np.frombuffer(outcome.image.pixels, np.uint8).astype(int)
        assert np.abs(found - stock_clip(stock, asked[outcome.uid]).ravel()).max() <= 1


def degrees(works: Sequence[PastWork], stage: str) -> list[int]:
    """The numbers of devices, in the order in which they came."""
    widths = [len(one.work.devices) for one in works if one.work.stage.name == stage]
    return [width for width, _ in groupby(widths)]


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
