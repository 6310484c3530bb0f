"""What an answer says of how an exact picture was made, and what PNG files carry."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any

import httpx
import pytest
from PIL import Image

from fake_engine import CLIPS, EDITOR, INFO, VIDEOS, FakeEngine, serving
from tilework.core.model import ModelInfo
from tilework.server.calls.parsing.image_call import image_call
from tilework.server.calls.parsing.specs import Rules
from tilework.server.config import ServerConfig
from tilework.server.schema.provenance import PictureMetadata
from tilework.server.tenants import Tenant, Tenants
from waiting import eventually

SECRET = "a secret wish"


def loaded(info: ModelInfo = INFO) -> ModelInfo:
    """As a worker with a model says it."""
    return replace(
        info, path="someone/model", dtype="bfloat16", attention_backend="native", hardware="an abacus", threads=2
    )


def picture(answer: httpx.Response, index: int = 0) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][index]["b64_json"])))


def chunk(opened: Image.Image) -> PictureMetadata:
    return PictureMetadata.model_validate_json(opened.text["tilework"])  # type: ignore[attr-defined]


def provenance(answer: httpx.Response, index: int = 0) -> dict[str, Any] | None:
    found: dict[str, Any] | None = answer.json()["data"][index]["tilework"]["provenance"]
    return found


@pytest.mark.slow
def test_the_answer_for_an_exact_picture_has_its_provenance_and_a_hash_of_its_pixels() -> None:
    with serving(FakeEngine(info=loaded())) as server:
        fields = {"prompt": SECRET, "exact": True, "seed": 5, "n": 2, "eta": 0.5, "prompt_2": "too"}
        answer = server.post(fields)
        for index in (0, 1):
            found = provenance(answer, index)
            assert found is not None
            pixels = picture(answer, index).tobytes()
            assert found["pixels_sha256"] == hashlib.sha256(pixels).hexdigest()
            assert found["settings"]["seed"] == 5 + index
        about = {name: found[name] for name in ("model", "source", "dtype", "hardware", "threads", "libraries")}
        assert about == {
            "model": INFO.name,
            "source": "someone/model",
            "dtype": "bfloat16",
            "hardware": "an abacus",
            "threads": 2,
            "libraries": INFO.library,
        }
        assert found["settings"]["arguments"] == {"eta": 0.5}
        assert SECRET not in json.dumps(found), "texts are in the file alone"
        status = server.http.get(f"/v1/requests/{answer.headers['x-request-id']}")
        assert status.json()["images"][1]["timeline"]["provenance"] == found, "the record has it, too"
        assert SECRET not in status.text


@pytest.mark.slow
def test_other_pictures_have_none() -> None:
    with serving(FakeEngine(info=loaded())) as server:
        assert provenance(server.post({"prompt": "x"})) is None
    with serving(FakeEngine()) as server:
        assert provenance(server.post({"prompt": "x", "exact": True})) is None, "no model has drawn it"
    with serving(FakeEngine(info=loaded(VIDEOS)), drain_s=0) as server:
        job = server.http.post("/v1/videos", json={"prompt": "x", "exact": True}).json()
        eventually(lambda: server.http.get(f"/v1/videos/{job['id']}").json()["status"] == "completed")
        status = server.http.get(f"/v1/videos/{job['id']}").json()
        assert status["tilework"]["timeline"]["provenance"] is None, "its pixels stay with its worker"


def test_what_is_remembered_of_a_call_has_nothing_that_its_client_wrote() -> None:
    texts = {"prompt": SECRET, "negative_prompt": SECRET, "prompt_2": SECRET, "user": SECRET, "quality": SECRET}
    rules = Rules(
        info=INFO, config=ServerConfig(), tenants=Tenants(), tenant=Tenant(), now=datetime(2030, 1, 1, tzinfo=UTC)
    )
    call = image_call({**texts, "guidance_scale": 1, "a secret field": SECRET}, rules, Random(0))
    assert SECRET in repr(call)
    assert call.warnings
    assert SECRET not in repr(call.without_texts())


def test_png_files_say_how_they_were_made() -> None:
    with serving(FakeEngine(info=loaded())) as server:
        fields = {"prompt": SECRET, "negative_prompt": "blue ü", "seed": 5, "steps": 3, "prompt_2": "too"}
        opened = picture(server.post(fields))
        assert opened.text["parameters"] == (  # type: ignore[attr-defined]
            f"{SECRET}\nNegative prompt: blue ü\nSteps: 3, CFG scale: 4.5, Seed: 5, Size: 48x64, Model: {INFO.name}"
        )
        found = chunk(opened)
        assert found.texts == {"prompt": SECRET, "negative_prompt": "blue ü", "prompt_2": "too"}
        assert (found.provenance.exact, found.provenance.pixels_sha256) == (False, None)
        kept = server.post({"prompt": SECRET, "response_format": "url"}).json()["data"][0]["url"]
        assert chunk(Image.open(io.BytesIO(server.http.get(kept).content))).texts["prompt"] == SECRET
        jpeg = base64.b64decode(server.post({"prompt": SECRET, "output_format": "jpeg"}).json()["data"][0]["b64_json"])
        assert SECRET.encode() not in jpeg


@pytest.mark.slow
def test_each_frame_of_a_clip_says_which_it_is() -> None:
    with serving(FakeEngine(info=loaded(CLIPS))) as server:
        answer = server.post({"prompt": "x", "exact": True})
        assert [chunk(picture(answer, index)).frame for index in range(5)] == [0, 1, 2, 3, 4]
        pixels = b"".join(picture(answer, index).tobytes() for index in range(5))
        found = provenance(answer)
        assert found is not None
        assert found["pixels_sha256"] == hashlib.sha256(pixels).hexdigest()


@pytest.mark.slow
def test_given_pictures_are_named_by_their_digests() -> None:
    given = Image.new("RGB", (64, 48), (1, 2, 3))
    file = io.BytesIO()
    given.save(file, "PNG")
    with serving(FakeEngine(info=loaded(EDITOR))) as server:
        answer = server.post({"prompt": "x", "exact": True, "image": base64.b64encode(file.getvalue()).decode()})
        found = provenance(answer)
        assert found is not None
        assert found["settings"]["pictures"] == {"image": [hashlib.sha256(given.tobytes()).hexdigest()]}


@pytest.mark.slow
def test_a_server_may_write_nothing_into_files() -> None:
    with serving(FakeEngine(info=loaded()), metadata=False) as server:
        answer = server.post({"prompt": SECRET, "exact": True})
        assert picture(answer).text == {}  # type: ignore[attr-defined]
        assert provenance(answer) is not None
