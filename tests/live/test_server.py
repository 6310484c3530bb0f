"""`tilework serve` as a user starts it, on the shipped model, driven by the official openai client."""

from __future__ import annotations

import base64
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image

import tiny
from tilework.control.log import replay
from tilework.core.model import ModelSource
from tilework.pipelines.draw import draw
from tilework.pipelines.loading import load
from training.shapes.judge import judge
from waiting import eventually

pytestmark = pytest.mark.slow  # The server that all tests share takes half a minute to start, as a user's.

PROMPT = "a large red circle on a blue background"


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    log: Path

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="not needed", max_retries=0)

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "events.jsonl"
    command = [sys.executable, "-m", "tilework", "serve", "--port", "0", "--log", str(log), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start"
    ready = json.loads(line)
    assert ready["ready_s"] > 0
    yield Server(process, ready["url"], log)
    if process.poll() is None:
        process.kill()
        process.wait()


def pixels_of(b64_json: str | None) -> np.ndarray:
    assert b64_json is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64_json))).convert("RGB"))


def test_two_pictures_in_one_call_show_what_was_asked_for(server: Server) -> None:
    answer = server.client().images.generate(prompt=PROMPT, model="shapes", n=2, size="128x128", extra_body={"seed": 5})
    assert answer.data is not None
    assert len(answer.data) == 2
    for picture in answer.data:
        image = pixels_of(picture.b64_json).transpose(2, 0, 1) / 255
        assert image.shape == (3, 128, 128)
        assert judge(image.astype(np.float32))[::2] == ("red", "blue")
        timeline = picture.model_extra["tilework"]  # type: ignore[index]
        assert timeline["status"] == "done"
        assert sum(segment["steps"] for segment in timeline["segments"] if segment["stage"] == "diffuse") == 20
    assert answer.data[0].b64_json != answer.data[1].b64_json


def test_a_picture_equals_the_one_that_the_family_makes_in_this_process(server: Server) -> None:
    tiny.prepare()
    fields = {"seed": 11, "num_inference_steps": 6, "guidance_scale": 3.0, "exact": True}
    answer = server.client().images.generate(prompt=PROMPT, size="96x64", extra_body=fields)
    assert answer.data is not None
    request = tiny.spec(prompt=PROMPT, width=96, height=64, steps=6, guidance_scale=3.0, seed=11)
    family = load(ModelSource(path="shapes"))
    with torch.inference_mode():
        expected = tiny.pixels(draw(family, request))
    assert np.array_equal(pixels_of(answer.data[0].b64_json), expected)


def test_content_by_url(server: Server) -> None:
    answer = server.client().images.generate(
        prompt=PROMPT, size="64x64", response_format="url", output_format="webp", extra_body={"num_inference_steps": 2}
    )
    assert answer.data is not None
    assert answer.data[0].url is not None
    content = httpx.get(answer.data[0].url)
    assert content.headers["content-type"] == "image/webp"
    assert Image.open(io.BytesIO(content.content)).size == (64, 64)


def test_deadlines_are_answered(server: Server) -> None:
    met = server.client().images.generate(prompt=PROMPT, size="64x64", extra_body={"slo_s": 60})
    assert met.data is not None
    timeline = met.data[0].model_extra["tilework"]  # type: ignore[index]
    assert timeline["on_time"] is True
    with pytest.raises(openai.RateLimitError) as refused:
        server.client().images.generate(
            prompt=PROMPT, size="256x256", extra_body={"slo_s": 0.05, "on_miss": "reject", "num_inference_steps": 100}
        )
    assert refused.value.body["earliest_s"] > 0.05  # type: ignore[index]


def test_wrong_values_raise_the_clients_own_exceptions(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="65x64"):
        server.client().images.generate(prompt=PROMPT, size="65x64")
    with pytest.raises(openai.NotFoundError, match="sdxl"):
        server.client().images.generate(prompt=PROMPT, model="sdxl")


def test_a_client_that_goes_away_frees_its_devices(server: Server) -> None:
    cancelled = 'tilework_requests_total{class="standard",outcome="cancelled"}'
    before = server.metric(cancelled)
    body = {"prompt": PROMPT, "size": "256x256", "num_inference_steps": 200, "n": 4}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=1.0)
    server.client().images.generate(prompt=PROMPT, size="64x64", extra_body={"num_inference_steps": 2})
    assert server.metric(cancelled) == before + 4
    assert server.metric('tilework_jobs_queued{class="standard"}') == 0


def test_the_server_itself_has_no_torch(server: Server) -> None:
    """Its workers have. It would double the time until they start, and need 300 MB."""
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_sigterm_lets_a_running_request_finish_and_the_log_replays(server: Server) -> None:
    """Last, since it stops the server."""
    body = {"prompt": PROMPT, "size": "128x128"}
    with httpx.Client(timeout=60) as client:
        request = client.build_request("POST", f"{server.url}/v1/images/generations", json=body)

        answers: list[httpx.Response] = []
        sender = threading.Thread(target=lambda: answers.append(client.send(request)))
        sender.start()
        eventually(lambda: server.metric('tilework_jobs_running{class="standard"}'))
        server.process.send_signal(signal.SIGTERM)
        sender.join(60)
    assert [answer.status_code for answer in answers] == [200]
    assert server.process.wait(30) == 0
    with server.log.open() as lines:
        count, difference = replay(lines)
    assert difference is None
    assert count > 50
