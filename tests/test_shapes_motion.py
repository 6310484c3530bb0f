"""How `shapes-motion` is trained and judged, and how well it draws."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from training.shapes_motion import score
from training.shapes_motion.drawing import Scene, all_scenes, caption, draw, split_scenes
from training.shapes_motion.judge import judge
from training.shapes_motion.model import build_pipeline
from training.shapes_motion.text import MAX_TOKENS, Texts, attend_to_few
from training.shapes_motion.train import Recipe, crop, to_batch, train

CLIPS = 60
SLACK = 0.1
"""Below the published score: about two standard errors of a share of CLIPS clips."""
CAPTIONS = ["a red circle moves left", "", "Blue square standing still, black background."]


def test_the_judge_reads_drawings_and_is_not_led_by_captions() -> None:
    own, shuffled = score.judge_drawings(Random(5))
    assert min(own.values()) > 0.99
    assert shuffled["motion"] < 0.4
    assert shuffled["colour"] < 0.35


def test_a_shape_that_vanishes_or_moves_askew_has_no_motion() -> None:
    clip = draw(Scene("red", "circle", "left", "black"), 9, 64, 64, Random(0))
    assert judge(clip).motion == "left"
    assert judge(clip[:, ::-1]).motion == "right"
    gone = clip.copy()
    gone[:, 4] = gone[:, :1, :1, :1][:, 0]
    assert judge(gone).motion == ""
    askew = np.stack([np.roll(frame, 3 * index, axis=1) for index, frame in enumerate(clip.swapaxes(0, 1))], 1)
    assert judge(askew).motion == ""


def test_no_combination_is_both_trained_and_held_out() -> None:
    training, held_out = split_scenes()
    assert len(training) + len(held_out) == len(all_scenes())
    kinds = [{(scene.colour, scene.shape, scene.motion) for scene in part} for part in (training, held_out)]
    assert not kinds[0] & kinds[1]
    assert {caption(scene) for scene in held_out}.isdisjoint(caption(scene, 0) for scene in training)


def test_one_token_for_all_empty_ones_is_the_stock_prediction() -> None:
    """The transformer is trained on 16 tokens of text, and called by the stock pipeline with 512."""
    torch.manual_seed(0)
    pipeline = build_pipeline()
    torch.nn.init.normal_(pipeline.transformer.proj_out.weight)
    latents, times = torch.randn(3, 16, 3, 8, 8), 1000 * torch.rand(3)
    with torch.no_grad():
        whole, _ = pipeline.encode_prompt(CAPTIONS, max_sequence_length=MAX_TOKENS, do_classifier_free_guidance=False)
        expected = pipeline.transformer(latents, times, whole, return_dict=False)[0]
        few = Texts(pipeline).embed(CAPTIONS)
        attend_to_few(pipeline.transformer)
        found = pipeline.transformer(latents, times, few, return_dict=False)[0]
    assert few.shape[1] < 20
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_window_shows_some_of_the_shape() -> None:
    rng = Random(3)
    for clip in to_batch(split_scenes()[0][:20], 9, rng):
        assert crop(clip, rng).std((1, 2, 3)).max() > 0.1


@pytest.mark.exhaustive
def test_training_goes_on_where_it_stopped_and_the_stock_pipeline_loads_what_it_saves(tmp_path: Path) -> None:
    whole = Recipe(autoencoder_steps=2, crop_share=1.0, steps=3, batch_latents=6, pool=10)
    train(whole, tmp_path / "whole", tmp_path / "at once")
    # Of so few steps each has the learning rate that it has in the whole.
    for part in (replace(whole, autoencoder_steps=1, steps=0), replace(whole, steps=1), whole):
        train(part, tmp_path / "parts", tmp_path / "second")
    clips = [
        score.generate(score.load(tmp_path / name), CAPTIONS[:2], frames=5, seed=1) for name in ("at once", "second")
    ]
    assert clips[0].shape == (2, 3, 5, 64, 64)
    assert np.array_equal(*clips)
    train(replace(whole, steps=1), tmp_path / "other", tmp_path / "third", start=tmp_path / "second")
    assert not np.array_equal(clips[1], score.generate(score.load(tmp_path / "third"), CAPTIONS[:2], frames=5, seed=1))


@pytest.mark.exhaustive
def test_the_shipped_model_draws_what_its_score_says() -> None:
    published = json.loads((score.HERE / "score.json").read_text())["frames"]
    pipeline = score.load(score.MODEL)
    _, held_out = split_scenes()
    frames = max(published, key=int)
    scenes = [held_out[index % len(held_out)] for index in range(CLIPS)]
    clips = score.generate(pipeline, [caption(scene) for scene in scenes], int(frames), seed=77_000)
    found = score.rates(scenes, [judge(clip) for clip in clips])
    assert {name: share for name, share in published[frames].items() if found[name] < share - SLACK} == {}
