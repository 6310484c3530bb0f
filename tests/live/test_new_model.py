"""Models of the first day, as docs/models.md tells: a pipeline of one file, and classes that no list has."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import tilework
import tiny
from builders import table
from runtime.rig import PingPong, Rig, assert_nothing_is_left
from tilework.core.model import ModelSource
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.loading import load
from tilework.policy import registry
from zoo import requests
from zoo.autoencoders import ddim
from zoo.model import GUIDED, SQUARE, entry
from zoo.registry import build
from zoo.stable_diffusion import sd

EXAMPLES = Path(__file__).parents[2] / "examples"
ADAPTER = "new_model:PebblePipeline"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tiny.prepare()
    sys.path.insert(0, str(EXAMPLES))  # As PYTHONPATH; workers take it over.
    import new_model

    directory = tmp_path_factory.mktemp("pebble")
    new_model.save(str(directory))
    yield str(directory)
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def specs() -> list[Spec]:
    return [tiny.spec(height=64, width=96, seed=seed, steps=5, negative_prompt="grey") for seed in (1, 2)]


@pytest.fixture(scope="module")
def stock(directory: str, specs: list[Spec]) -> list[np.ndarray]:
    """The pictures of the pipeline's own call."""
    pipeline = tilework.reference(directory, adapter=ADAPTER)
    pipeline.set_progress_bar_config(disable=True)
    pictures = []
    for one in specs:
        asked = {"height": one.height, "width": one.width, "num_inference_steps": one.steps}
        generator = torch.Generator().manual_seed(one.seed)
        texts = {"negative_prompt": one.negative_prompt, "guidance_scale": one.guidance_scale}
        ((picture,),) = pipeline(one.prompt, **texts, **asked, generator=generator)
        pictures.append(np.asarray(picture).reshape(-1))
    return pictures


def test_it_is_exact_side_by_side_and_moved_after_every_step(
    directory: str, specs: list[Spec], stock: list[np.ndarray]
) -> None:
    here, there = (load(ModelSource(path=directory, adapter=ADAPTER)) for _ in range(2))
    assert not np.array_equal(*stock), "the seed must matter"
    assert all(map(np.array_equal, requests.side_by_side(here, *specs), stock))
    assert np.array_equal(requests.moved(here, there, specs[0]), stock[0])


@pytest.mark.parametrize("name", ["StableDiffusionPanorama", "SemanticStableDiffusion"])
def test_a_class_of_diffusers_is_served_without_any_file(name: str, tmp_path: Path) -> None:
    model = entry(name, name, "text to image", lambda: sd(ddim), {**GUIDED, **SQUARE})
    here, there = requests.family(model, tmp_path), requests.family(model, tmp_path)
    spec = requests.spec_of(model, here, seed=1)
    assert np.array_equal(requests.moved(here, there, spec), requests.stock_pixels(model, build(model), seed=1))


def test_workers_serve_it(directory: str, specs: list[Spec], stock: list[np.ndarray]) -> None:
    registry._GIVEN["ping-pong"] = PingPong
    costs = table(pipeline=Path(directory).name)
    rig = Rig(ModelSource(path=directory, adapter=ADAPTER), "ping-pong", costs=costs)
    try:
        rig.start()
        outcomes = rig.outcomes({str(one.seed): one for one in specs})
        assert_nothing_is_left(rig.engine)
    finally:
        rig.close()
        del registry._GIVEN["ping-pong"]
    for outcome, picture in zip(outcomes, stock, strict=True):
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        assert np.array_equal(np.frombuffer(outcome.image.pixels, np.uint8), picture)
        assert {segment.devices for segment in outcome.segments} == {(0,), (1,)}


def test_without_the_class_the_error_says_what_to_name(directory: str) -> None:
    with pytest.raises(UnsupportedModel, match="PebblePipeline"):
        load(ModelSource(path=directory))
    with pytest.raises(UnsupportedModel, match="name the class itself as the adapter"):
        load(ModelSource(path=directory, adapter="tilework.pipelines.stock.stock_pipeline:StockPipeline"))


@pytest.mark.exhaustive
def test_the_commands_of_the_page_serve_it(directory: str, specs: list[Spec], stock: list[np.ndarray]) -> None:
    """Devices are measured, and a deadline is promised."""
    command = [sys.executable, "-m", "tilework", "serve", directory, "--adapter", ADAPTER, "--port", "0", "--json"]
    environment = os.environ | {"PYTHONPATH": f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen([*command, "--workers", "2"], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server did not start"
        answers = [httpx.post(f"{json.loads(line)['url']}/v1/images/generations", json=body(one)) for one in specs]
    finally:
        process.terminate()
        process.wait(30)
    for answer, picture in zip(answers, stock, strict=True):
        assert answer.status_code == 200, answer.text
        png = base64.b64decode(answer.json()["data"][0]["b64_json"])
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).reshape(-1), picture)


def body(spec: Spec) -> dict[str, Any]:
    return {
        "prompt": spec.prompt,
        "negative_prompt": spec.negative_prompt,
        "size": f"{spec.width}x{spec.height}",
        "num_inference_steps": spec.steps,
        "guidance_scale": spec.guidance_scale,
        "seed": spec.seed,
        "slo_s": 60,
        "on_miss": "reject",
    }
