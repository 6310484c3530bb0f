"""Clips: how many frames they have, and their frames as a list of pictures in every way to be answered."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fake_engine import CLIPS, INFO, FakeEngine, Plan, Served, serving
from tilework.core.model import PictureInput
from waiting import eventually

GENERATIONS = "/v1/images/generations"
ASYNC = {"Prefer": "respond-async"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(info=CLIPS), max_pixels=64 * 48 * 13) as served:
        yield served


def red_of(content: bytes) -> int:
    pixel = Image.open(io.BytesIO(content)).getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return int(pixel[0])


def test_frames_of_clip_after_clip(server: Served) -> None:
    answer = server.post({"prompt": "x", "seed": 20, "n": 2}).json()
    assert [one["frame"] for one in answer["data"]] == [0, 1, 2, 3, 4] * 2
    reds = [red_of(base64.b64decode(one["b64_json"])) for one in answer["data"]]
    assert reds == [*range(20, 25), *range(21, 26)]
    assert [one["tilework"]["uid"][-1] for one in answer["data"]] == ["0"] * 5 + ["1"] * 5
    assert answer["size"] == "48x64"
    spec = server.engine.specs[-1]
    assert (spec.frames, str(server.engine.requests[-1].shape)) == (5, "48x64x5")


def test_a_picture_has_no_frame() -> None:
    with serving(FakeEngine()) as server:
        for frames in (None, 1):
            answer = server.post({"prompt": "x", "num_frames": frames}).json()
            assert [one["frame"] for one in answer["data"]] == [None]


@pytest.mark.parametrize("frames", [1, 5, 9, 13])
def test_numbers_of_frames(server: Served, frames: int) -> None:
    answer = server.post({"prompt": "x", "num_frames": frames, "seed": 1})
    assert answer.status_code == 200
    assert len(answer.json()["data"]) == server.engine.specs[-1].frames == frames
    chat = {"messages": [{"role": "user", "content": "x"}], "extra_body": {"num_frames": frames}}
    content = server.http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    assert [part["frame"] for part in content] == ([None] if frames == 1 else [*range(frames)])


@pytest.mark.parametrize(
    ("frames", "remedy"),
    [
        (0, "from 1 to 13, one more than a multiple of 4; the nearest is 1"),
        (-7, "the nearest is 1"),
        (2, "the nearest is 1"),
        (4, "the nearest is 5"),
        (14, "the nearest is 13"),
        (10**30, "the nearest is 13"),
        ("five", "an integer"),
        (5.5, "an integer"),
        (True, "an integer"),
    ],
)
def test_wrong_numbers_of_frames(server: Served, frames: object, remedy: str) -> None:
    error = server.post({"prompt": "x", "num_frames": frames}).json()["error"]
    assert error["param"] == "num_frames"
    assert json.dumps(frames) in error["message"]
    assert remedy in error["message"]


def test_models_of_pictures_make_no_clips() -> None:
    with serving(FakeEngine(info=INFO)) as server:
        error = server.post({"prompt": "x", "num_frames": 5}).json()["error"]
        assert error["param"] == "num_frames"
        assert "makes single images: give 1" in error["message"]


def test_the_most_frames_need_not_be_a_legal_number() -> None:
    with serving(FakeEngine(info=replace(CLIPS, max_frames=15))) as server:
        assert "from 1 to 13" in server.post({"prompt": "x", "num_frames": 15}).json()["error"]["message"]
    with serving(FakeEngine(info=replace(CLIPS, max_frames=15, frame_multiple=1))) as server:
        assert (
            "from 1 to 15; the nearest is 15"
            in server.post({"prompt": "x", "num_frames": 16}).json()["error"]["message"]
        )


def test_pixels_of_all_frames_count(server: Served) -> None:
    assert server.post({"prompt": "x", "size": "48x64", "num_frames": 13}).status_code == 200
    error = server.post({"prompt": "x", "size": "64x64", "num_frames": 13}).json()["error"]
    assert error["param"] == "size"
    assert f"has {64 * 64 * 13}" in error["message"]
    assert "fewer num_frames" in error["message"]


def test_streams_send_frame_after_frame(server: Served) -> None:
    server.engine.script = [Plan(delay_s=0.2)]
    answer = server.post({"prompt": "x", "seed": 3, "stream": True, "partial_images": 1, "tilework_events": True})
    events = [json.loads(data) for data in re.findall(r"^data: (.*)$", answer.text, flags=re.M)]
    kinds = [one["type"] for one in events if one["type"].startswith("image")]
    assert kinds == ["image_generation.partial_image"] + ["image_generation.completed"] * 5
    completed = [one for one in events if one["type"] == "image_generation.completed"]
    assert [(one["frame"], red_of(base64.b64decode(one["b64_json"]))) for one in completed] == [
        (frame, 3 + frame) for frame in range(5)
    ]
    assert [one["type"] for one in events][-1] == "tilework.done"


def test_frames_are_files_of_their_own(server: Served) -> None:
    answer = server.post({"prompt": "x", "seed": 7, "n": 2, "response_format": "url"}).json()
    assert [red_of(server.http.get(one["url"]).content) for one in answer["data"]] == [*range(7, 12), *range(8, 13)]
    uid = answer["data"][0]["tilework"]["uid"][:-2]
    status = server.http.get(f"/v1/requests/{uid}").json()
    assert (status["size"], status["frames"], len(status["images"])) == ("48x64", 5, 2)
    for path, red in (
        (f"requests/{uid}/content", 7),
        (f"requests/{uid}/content?frame=4", 11),
        (f"requests/{uid}/content?index=1&frame=2", 10),
        (f"images/{uid}-1/content?frame=4", 12),
    ):
        assert red_of(server.http.get(f"/v1/{path}").content) == red
    for frame, remedy in ((5, "0 to 4"), (-1, "index of a frame"), (10_000, "index of a frame")):
        wrong = server.http.get(f"/v1/images/{uid}-0/content?frame={frame}")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "frame")
        assert remedy in wrong.json()["error"]["message"]
    server.http.delete(f"/v1/requests/{uid}")
    assert {server.http.get(one["url"]).status_code for one in answer["data"]} == {410}


def test_a_repeat_has_all_frames(server: Served) -> None:
    key = {"Idempotency-Key": "clip"}
    first, second = (server.post({"prompt": "x", "n": 2}, headers=key) for _ in range(2))
    assert second.headers["idempotent-replayed"] == "true"
    assert first.json() == second.json()
    assert len(second.json()["data"]) == 10


def test_a_stop_waits_until_all_frames_are_fetched() -> None:
    with serving(FakeEngine(info=CLIPS), drain_s=20) as server:
        uid = server.post({"prompt": "x"}, headers=ASYNC).json()["uid"]
        eventually(lambda: server.http.get(f"/v1/requests/{uid}").json()["status"] == "done")
        server.stop()
        for left in range(5, 0, -1):
            eventually(lambda left=left: f"{left} image" in server.http.get("/ready").text)
            assert server.http.get(f"/v1/requests/{uid}/content?frame={left - 1}").status_code == 200


@pytest.mark.slow
def test_clips_survive_a_kill(tmp_path: Path) -> None:
    with serving(FakeEngine(info=CLIPS, plan=Plan(is_held=True)), durable=str(tmp_path), drain_s=0) as server:
        uid = server.post({"prompt": "x", "seed": 2}, headers=ASYNC).json()["uid"]
    again = FakeEngine(info=CLIPS)
    with serving(again, durable=str(tmp_path), drain_s=0) as server:
        eventually(lambda: server.http.get(f"/v1/requests/{uid}").json()["status"] == "done")
        assert red_of(server.http.get(f"/v1/requests/{uid}/content?frame=4").content) == 6
        assert again.specs[0].frames == 5


def test_a_clip_of_one_frame_is_like_a_picture(server: Served) -> None:
    answer: Any = server.post({"prompt": "x", "num_frames": 1, "response_format": "url"}).json()
    assert answer["data"][0]["frame"] is None
    assert "?" not in answer["data"][0]["url"]


def test_a_given_clip_decides_how_many_frames_are_made() -> None:
    video = PictureInput(name="video", required=True, most=13, is_clip=True)
    editor = replace(CLIPS, frames_of="video", pictures=(video,))
    with serving(FakeEngine(info=editor), max_pixels=64 * 48 * 13) as server:

        def ask(frames: int, **fields: object) -> dict[str, Any]:
            clip = [png_of(Image.new("RGB", (48, 64), (index, 0, 0))) for index in range(frames)]
            answer: dict[str, Any] = server.post({"prompt": "x", "video": clip, **fields}).json()
            return answer

        assert len(ask(9)["data"]) == server.engine.specs[-1].frames == 9
        assert len(server.engine.specs[-1].pictures["video"]) == 9
        assert len(ask(9, num_frames=9)["data"]) == 9
        assert "video has 9 frames" in ask(9, num_frames=5)["error"]["message"]
        assert "one more than a multiple of 4, such as the first 5" in ask(7)["error"]["message"]
        assert "at most 13 images" in ask(17)["error"]["message"]


def png_of(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
