"""A user's filter: asked about each text and each picture before anyone sees anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from fake_engine import CLIPS, VIDEOS, FakeEngine, Plan, Served, serving
from tilework.core.wire.spec import VideoFormat
from tilework.pipelines.video.export import video_file
from tilework.server.config import ConfigError, ServerConfig
from tilework.server.safety_filter import load_safety_filter
from waiting import eventually

LATER = {"Prefer": "respond-async"}


class Filter:
    """Objects to the word "gun", and to pictures with a red of 66 to 99; it fails at a red of 100."""

    seen: list[Mapping[str, str]] = []

    def refuse_texts(self, texts: Mapping[str, str]) -> str | None:
        self.seen.append(texts)
        return "weapons are not drawn" if any("gun" in text for text in texts.values()) else None

    def refuse_picture(self, picture: Image.Image) -> str | None:
        (red, *_) = picture.getpixel((0, 0))  # type: ignore[misc]
        if red == 100:
            raise RuntimeError("a bug of the filter")
        return "it shows a gun" if 60 < red < 100 else None


class Broken:
    def __init__(self) -> None:
        raise RuntimeError("no weights")


NAME = f"{__name__}:Filter"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(), safety_filter=NAME) as served:
        yield served


def refused(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "content_policy_violation"), answer.text
    return str(error["message"])


def test_a_text_that_is_refused_is_never_drawn(server: Served) -> None:
    Filter.seen.clear()
    for fields in (
        {"prompt": "a gun"},
        {"prompt": "x", "prompt_2": "a gun"},
        {"prompt": "x", "negative_prompt": "gun"},
    ):
        assert "weapons are not drawn" in refused(server.post(fields))
    chat = {"messages": [{"role": "user", "content": "a gun"}]}
    assert "weapons are not drawn" in refused(server.http.post("/v1/chat/completions", json=chat))
    assert not server.engine.requests
    assert server.post({"prompt": "a cat", "seed": 1}).status_code == 200
    assert Filter.seen[-1] == {"prompt": "a cat"}, "no text that was not given"


def test_a_picture_that_is_refused_is_never_given_out(server: Served) -> None:
    assert server.post({"prompt": "x", "seed": 60}).status_code == 200
    assert "it shows a gun" in refused(server.post({"prompt": "x", "seed": 59, "n": 3})), "one of three"
    uid = server.post({"prompt": "x", "seed": 70}, headers=LATER).json()["uid"]
    eventually(lambda: server.http.get(f"/v1/requests/{uid}").json()["status"] == "failed")
    assert server.http.get(f"/v1/requests/{uid}/content").status_code == 410


def test_what_the_filter_could_not_look_at_is_not_given_out(server: Served) -> None:
    answer = server.post({"prompt": "x", "seed": 100})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


@pytest.mark.parametrize(
    "fields", [{"stream": True, "partial_images": 1}, {"preview_every": 1}, {"preview_every_s": 1}]
)
def test_there_are_no_previews(server: Served, fields: dict[str, Any]) -> None:
    error = server.post({"prompt": "x", "num_inference_steps": 4, **fields}).json()["error"]
    assert error["param"] in fields
    assert "only once they are done and checked" in error["message"]


@pytest.mark.slow
def test_frames_of_clips_and_videos_are_looked_at() -> None:
    with serving(FakeEngine(info=CLIPS), safety_filter=NAME) as server:
        assert server.post({"prompt": "x", "seed": 10}).status_code == 200
        assert "it shows a gun" in refused(server.post({"prompt": "x", "seed": 57})), "its last frame has 61"
    good, bad = (torch.full((9, 32, 32, 3), 20, dtype=torch.uint8) for _ in range(2))
    bad[4:6] = torch.tensor([80, 80, 80], dtype=torch.uint8)
    files = [video_file(frames, VideoFormat(4)).content for frames in (good, bad)]
    engine = FakeEngine(info=VIDEOS, script=[Plan(video=file) for file in files])
    with serving(engine, safety_filter=NAME, drain_s=0) as server:
        assert server.http.post("/v1/videos/sync", json={"prompt": "x"}).status_code == 200
        assert "it shows a gun" in refused(server.http.post("/v1/videos/sync", json={"prompt": "x"}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere:Filter", "ModuleNotFoundError"),
        (f"{__name__}:Broken", "no weights"),
        ("builtins:dict", "give MODULE:NAME"),
    ],
)
def test_what_is_no_filter_is_named_at_the_start(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_safety_filter(ServerConfig(safety_filter=name).safety_filter)
