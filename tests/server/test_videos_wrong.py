"""What calls for videos may not ask for: each mistake is named."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fake_engine import VIDEOS, FakeEngine, Served, serving
from server.video_calls import created, post, serving_videos, when_done


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving_videos() as served:
        yield served


@pytest.fixture(scope="module")
def url(server: Served) -> str:
    job = when_done(server, created(server, {"prompt": "x", "seed": 9, "num_frames": 13})["id"])
    return f"/v1/videos/{job['id']}/content"


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "prompt is missing"),
    ({"prompt": 7}, "prompt", "Give a text"),
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"model": "wan"}, "model", "tiny-videos"),
    ({"model": "tiny-shapes"}, "model", "It makes images: use POST /v1/images/generations"),
    ({"model": "tiny-clips"}, "model", "name a model that makes clips"),
    ({"seconds": "12"}, "seconds", "at most 13 frames, 3.25 seconds at 4 frames a second"),
    ({"seconds": 1e308}, "seconds", "at most 13 frames"),
    ({"seconds": "0"}, "seconds", "above 0"),
    ({"seconds": -4}, "seconds", "above 0"),
    ({"seconds": "four"}, "seconds", "also as a text"),
    ({"seconds": "nan"}, "seconds", "above 0"),
    ({"seconds": "inf"}, "seconds", "above 0"),
    ({"seconds": True}, "seconds", "a number of seconds"),
    ({"seconds": [4]}, "seconds", "a number of seconds"),
    ({"seconds": "2", "num_frames": 9}, "seconds", "leave one of them out"),
    ({"fps": 0}, "fps", "from 1 to 240"),
    ({"fps": 1000}, "fps", "from 1 to 240"),
    ({"fps": "many"}, "fps", "from 1 to 240"),
    ({"fps": False}, "fps", "from 1 to 240"),
    ({"num_frames": 7}, "num_frames", "the nearest is"),
    ({"num_frames": 0}, "num_frames", "the nearest is 1"),
    ({"size": "720x1296"}, "size", "the nearest size is"),
    ({"size": "large"}, "size", "width and height"),
    ({"size": "64x48", "width": 64}, "size", "leave one of them out"),
    ({"size": "512x496", "num_frames": 13}, "size", "fewer num_frames"),
    ({"n": 2}, "n", "one video"),
    ({"num_outputs_per_prompt": 3}, "num_outputs_per_prompt", "one video"),
    ({"stream": True}, "stream", "no such field"),
    ({"response_format": "url"}, "response_format", "no such field"),
    ({"output_format": "webm"}, "output_format", "no such field"),
    ({"preview_every": -1}, "preview_every", "at least 0"),
    ({"preview_every": 1, "num_inference_steps": 50}, "preview_every", "at least 10 for 50 steps"),
    ({"preview_every": 1, "preview_every_s": 1}, "preview_every_s", "leave one of them out"),
    ({"preview_every_s": 0}, "preview_every_s", "above 0"),
    ({"preview_every_s": "often"}, "preview_every_s", "above 0"),
    ({"tilework_events": True}, "tilework_events", "no such field"),
    ({"num_inference_steps": 0}, "num_inference_steps", "at least 1"),
    ({"num_inference_steps": 10**6}, "num_inference_steps", "1 to 200"),
    ({"guidance_scale": -1}, "guidance_scale", "from 0 to 30"),
    ({"seed": -2}, "seed", "from 0"),
    ({"slo_s": 0}, "slo_s", "above 0"),
    ({"slo_s": 1, "deadline": "2030-01-01T12:00:00Z"}, "deadline", "slo_s is given as well"),
    ({"on_miss": "pray"}, "on_miss", "best_effort"),
    ({"extra_body": [1]}, "extra_body", "an object"),
    ({"extra_body": "{"}, "extra_body", "as JSON"),
    ({"extra_body": {"fps": 0}}, "fps", "from 1 to 240"),
    ({"generate_sound": True}, "generate_sound", "leave"),
    ({"input_reference": "https://example.org/a.png"}, "input_reference", "fetches nothing"),
    ({"input_reference": {"file_id": "file-1"}}, "input_reference", "base64 or a data URL"),
    ({"input_reference": "abc!"}, "input_reference", "no base64"),
    ({"input_reference": ["a", "b"]}, "input_reference", "one image"),
    ({"input_reference": base64.b64encode(b"GIF89a").decode()}, "input_reference", "PNG"),
    ({"input_reference": "AAAA", "image": "AAAA"}, "image", "leave one out"),
    ({"mask": "AAAA"}, "mask", "takes image"),
]


@pytest.mark.parametrize(("body", "param", "remedy"), WRONG, ids=lambda one: str(one)[:50])
@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/sync"])
def test_bad_input(server: Served, path: str, body: dict[str, Any], param: str, remedy: str) -> None:
    num_specs = len(server.engine.specs)
    answer = post(server, {"prompt": "x", **body} if body else {}, path)
    assert answer.status_code == (404 if body.get("model") == "wan" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert remedy in error["message"]
    assert len(server.engine.specs) == num_specs


@pytest.mark.parametrize(
    ("query", "param"), [("limit=-1", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")]
)
def test_bad_lists(server: Served, query: str, param: str) -> None:
    answer = server.http.get(f"/v1/videos?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_bad_content(server: Served, url: str) -> None:
    for variant, remedy in (("poster", "thumbnail"), ("preview", "asked for no previews")):
        answer = server.http.get(f"{url}?variant={variant}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "variant")
        assert remedy in answer.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("video_id", ["x", "0" * 32, "video_123"])
def test_unknown_videos(server: Served, method: str, video_id: str) -> None:
    answer = server.http.request(method, f"/v1/videos/{video_id}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "video_id")


def test_bad_forms(server: Served) -> None:
    text = server.http.post("/v1/videos", content=b"x", headers={"Content-Type": "text/plain"})
    assert text.status_code == 415
    encoded = {"Content-Type": "application/x-www-form-urlencoded"}
    for content, reason in (
        (b"prompt=\xff", "no text"),
        (b"prompt=%ff", "no text"),
        (b"a=1&" * 201, "Too many fields"),
    ):
        answer = server.http.post("/v1/videos", content=content, headers=encoded)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
        assert reason in answer.json()["error"]["message"]
    twice = server.http.post("/v1/videos", files=[("prompt", (None, "a")), ("prompt", (None, "b"))])
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "prompt")
    file = server.http.post("/v1/videos", files={"prompt": ("a.txt", b"x", "text/plain")})
    assert (file.status_code, file.json()["error"]["param"]) == (400, "prompt")


def test_a_model_that_draws_no_previews_says_so() -> None:
    stages = tuple(replace(one, previews="") for one in VIDEOS.stages)
    with serving(FakeEngine(info=replace(VIDEOS, stages=stages)), drain_s=0) as server:
        for field in ("preview_every", "preview_every_s"):
            error = post(server, {"prompt": "x", field: 1}).json()["error"]
            assert (error["param"], error["code"]) == (field, "unsupported_value")
        assert post(server, {"prompt": "x", "preview_every": 0}).status_code == 200


def test_a_model_of_pictures_says_where_to_go() -> None:
    with serving(FakeEngine()) as server:
        answer = post(server, {"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_value")
        assert not server.http.get("/v1/models").json()["data"][0]["tilework"]["makes_videos"]
