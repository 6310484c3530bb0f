"""`tilework serve --adapter` as a user starts it, with the example that adds an upscaler to Stable Diffusion 3."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

import tiny
from tilework.control.history_recorder import read_history
from tilework.control.log import replay
from tilework.core.model import ModelSource
from tilework.core.wire.spec import Spec
from tilework.pipelines.draw import draw
from tilework.pipelines.loading import load

EXAMPLES = Path(__file__).parents[2] / "examples"
ADAPTER = "upscale_sd3:UpscaledStableDiffusion3"
PROMPT = "a large red circle on a blue background"


@pytest.mark.slow
def test_the_added_stage_is_served_measured_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "events.jsonl"
    command = [sys.executable, "-m", "tilework", "serve", "shapes", "--adapter", ADAPTER, "--port", "0"]
    environment = os.environ | {"PYTHONPATH": f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [*command, "--workers", "2", "--log", str(log), "--json"], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server did not start"
        url = json.loads(line)["url"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="not needed", max_retries=0)
        options = {"seed": 5, "num_inference_steps": 6, "slo_s": 60, "on_miss": "reject"}
        answer = client.images.generate(prompt=PROMPT, model="shapes", n=2, size="128x64", extra_body=options)
        metrics = httpx.get(f"{url}/metrics").text
    finally:
        process.terminate()
        process.wait(30)
    assert answer.data is not None
    monkeypatch.syspath_prepend(str(EXAMPLES))
    tiny.prepare()
    family = load(ModelSource(path="shapes", adapter=ADAPTER))
    for index, picture in enumerate(answer.data):
        large = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture.b64_json or ""))).convert("RGB"))
        assert large.shape == (128, 256, 3), "twice the stock size"
        spec = Spec(
            prompt=PROMPT,
            height=64,
            width=128,
            steps=6,
            guidance_scale=family.info.default_guidance_scale,
            seed=5 + index,
        )
        assert np.abs(large.astype(int) - tiny.pixels(draw(family, spec))).max() <= 1, "as alone, but for rounding"
        stages = [segment["stage"] for segment in picture.model_extra["tilework"]["segments"]]  # type: ignore[index]
        assert (stages[0], stages[-2:]) == ("encode", ["decode", "upscale"])
    assert 'stage="upscale"' in metrics
    lines = log.read_text("utf-8").splitlines()
    assert replay(lines)[1] is None
    history = read_history(lines)
    assert [past.work.stage.name for past in history.works].count("upscale") == 2
    assert {row.stage for row in history.header.table.rows} == {"encode", "diffuse", "decode", "upscale"}
    assert [past.on_time for past in history.requests] == [True, True]
