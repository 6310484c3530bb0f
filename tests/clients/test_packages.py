"""Clients as they come from their registries: openai and Vercel's AI SDK in JavaScript, and LiteLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.installed import from_npm, from_pypi
from fake_engine import FakeEngine, Served, serving

pytestmark = pytest.mark.exhaustive

LITELLM = ("litellm<2", "python-dotenv", "tiktoken", "fastuuid", "h2", "hyperframe", "hpack")
PNG = "iVBORw0K"
CALLS = """
import base64, json, sys, urllib.request
import litellm
api = {"api_base": sys.argv[1] + "/v1", "api_key": "EMPTY"}
image = litellm.image_generation(model="openai/dall-e-2", prompt="a cat", size="64x32", n=1, **api)
told = {"content": "", "reasoning": ""}
messages = [{"role": "user", "content": "a cat"}]
for chunk in litellm.completion(model="openai/dall-e-2", messages=messages, stream=True, **api):
    delta = chunk.choices[0].delta
    told["content"] += delta.content or ""
    told["reasoning"] += getattr(delta, "reasoning_content", None) or ""
file = urllib.request.urlopen(image.data[0].url).read()  # As OpenAI gives it for this name.
print(json.dumps({"image": base64.b64encode(file)[:8].decode(), **told}))
"""


@pytest.fixture
def server() -> Iterator[Served]:
    with serving(FakeEngine(), served_model_name="dall-e-2", default_slo="3x") as served:
        yield served


def output(command: list[str], **options: Any) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_javascript(server: Served, tmp_path: Path) -> None:
    from_npm(tmp_path, "openai@6", "ai", "@ai-sdk/openai-compatible")
    shutil.copy(Path(__file__).with_name("calls.mjs"), tmp_path / "calls.mjs")
    found = output(["node", str(tmp_path / "calls.mjs"), server.url])
    assert found["images"] == [[PNG, "server", 5], [PNG, "server", 6]]
    for content, reasoning in (("content", "reasoning"), ("sdk_text", "sdk_reasoning")):
        assert found[content].startswith(f"![picture](data:image/png;base64,{PNG}")
        assert found[reasoning].startswith("1 image, about ")
    assert found["finish"] == "stop"
    assert found["error"] == ["BadRequestError", "size"]
    assert found["sdk_image"] == ["image/png", PNG]
    assert [spec.prompt for spec in server.engine.specs] == ["a cat", "a cat", "a cat", "a dog", "a dog"]
    assert all(request.deadline_ns is not None for request in server.engine.requests)


def test_litellm(server: Served, tmp_path: Path) -> None:
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # Else it asks GitHub what models cost.
    environment = from_pypi(tmp_path / "packages", *LITELLM) | offline
    found = output([sys.executable, "-c", CALLS, server.url], env=environment)
    assert found["image"] == PNG
    assert found["content"].startswith(f"![picture](data:image/png;base64,{PNG}")
    assert found["reasoning"].startswith("1 image, about ")
    assert all(request.deadline_ns is not None for request in server.engine.requests)
