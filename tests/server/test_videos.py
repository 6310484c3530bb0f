"""Videos: jobs, their files and parts of these, the form that waits, and what is wrong with a call for one."""

from __future__ import annotations

import base64
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image

from fake_engine import VIDEOS, FakeEngine, Plan, Served, serving
from server.video_calls import FPS, created, post, serving_videos, when_done
from tilework.core.request import OnMiss
from tilework.core.wire.spec import VideoFormat
from tilework.pipelines.video.export import video_file
from waiting import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving_videos() as served:
        yield served


@pytest.fixture(scope="module")
def url(server: Served) -> str:
    job = when_done(server, created(server, {"prompt": "x", "seed": 9, "num_frames": 13})["id"])
    return f"/v1/videos/{job['id']}/content"


NUM_BYTES = 48 * 64 * 3 * 5  # What the fake engine makes of a clip of five frames.
HELD = Plan(is_held=True)


def file_of(seed: int, frames: int = 5) -> bytes:
    return b"".join(bytes(((seed + frame) % 256, 0, 0)) * (48 * 64) for frame in range(frames))


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (48, 64), (1, 2, 3)).save(file, "PNG")
    return file.getvalue()


# Jobs.


def test_a_job_from_its_beginning_to_its_file(server: Served) -> None:
    server.engine.script = [HELD]
    job = created(server, {"prompt": "x", "seed": 3, "size": "48x64", "slo_s": 40, "fps": 2})
    assert (job["object"], job["status"], job["progress"], job["model"]) == ("video", "queued", 0, "tiny-videos")
    assert (job["size"], job["seconds"], job["prompt"], job["error"]) == ("48x64", "3", "x", None)
    assert (job["completed_at"], job["expires_at"]) == (None, None)
    ours = job["tilework"]
    assert (ours["frames"], ours["fps"], ours["seconds"]) == (5, 2, 2.5)
    assert (ours["slo_s"], ours["is_promised"], ours["state"]) == (40, False, "queued")
    assert ours["eta_s"] == pytest.approx(0.25, abs=0.1)
    spec, request = server.engine.specs[-1], server.engine.requests[-1]
    assert (spec.video.fps, spec.video.codec, request.result) == (2, "h264", "video")
    uid = f"{job['id']}-0"
    server.on_loop(server.engine.begin, uid)
    server.on_loop(server.engine.step, uid, 3)
    job = server.http.get(f"/v1/videos/{job['id']}").json()
    assert (job["status"], job["progress"], job["tilework"]["step"]) == ("in_progress", 75, 3)
    early = server.http.get(f"/v1/videos/{job['id']}/content")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "not_ready")
    server.on_loop(server.engine.finish, uid)
    job = when_done(server, job["id"])
    assert (job["progress"], job["prompt"], job["tilework"]["eta_s"]) == (100, None, None)
    assert job["created_at"] <= job["completed_at"] <= job["expires_at"]
    assert list(job["stage_durations"]) == ["diffuse"]
    assert job["tilework"]["timeline"]["status"] == "done"
    content = server.http.get(f"/v1/videos/{job['id']}/content")
    assert (content.status_code, content.headers["content-type"]) == (200, "video/mp4")
    assert content.content == file_of(3)
    assert server.http.get(f"/v1/requests/{job['id']}").json()["output_format"] == "mp4"
    assert server.http.get(f"/v1/requests/{job['id']}/content").content == file_of(3)


@pytest.mark.parametrize(
    ("seconds", "frames", "whole"),
    [("1", 5, "1"), (1, 5, "1"), (1.5, 5, "1"), ("2", 9, "2"), (3.25, 13, "3"), ("0.1", 5, "1")],
)
def test_seconds_are_the_nearest_number_of_frames(server: Served, seconds: object, frames: int, whole: str) -> None:
    job = created(server, {"prompt": "x", "seconds": seconds})
    ours = job["tilework"]
    assert (ours["frames"], ours["seconds"], job["seconds"]) == (frames, frames / FPS, whole)


@pytest.mark.parametrize(("fps", "whole"), [(50, "1"), (2, "3"), (3.4, "1"), (3.3, "2")])
def test_seconds_are_whole_for_clients_that_parse_an_integer(server: Served, fps: float, whole: str) -> None:
    """The nearest, and at least one."""
    job = created(server, {"prompt": "x", "num_frames": 5, "fps": fps})
    assert (job["seconds"], job["tilework"]["seconds"]) == (whole, 5 / fps)


def test_promises(server: Served) -> None:
    made = created(server, {"prompt": "x", "slo_s": 9, "on_miss": "reject"})
    assert made["tilework"]["is_promised"]
    assert when_done(server, made["id"])["tilework"]["timeline"]["is_promised"]
    assert server.engine.requests[-1].on_miss is OnMiss.REJECT
    server.engine.script = [Plan(refuse_s=5.0)]
    answer = post(server, {"prompt": "x", "slo_s": 1, "on_miss": "reject"})
    assert (answer.status_code, answer.json()["error"]["earliest_s"]) == (429, pytest.approx(5.0, abs=0.01))


def test_a_failure_is_in_the_job(server: Served) -> None:
    server.engine.script = [Plan(fail="out of memory")]
    job = when_done(server, created(server, {"prompt": "x"})["id"], "failed")
    assert job["error"]["code"] == "generation_failed"
    assert "out of memory" in job["error"]["message"]
    assert server.http.get(f"/v1/videos/{job['id']}/content").status_code == 410


def test_deleting_cancels_and_forgets(server: Served) -> None:
    server.engine.script = [HELD]
    held, done = created(server, {"prompt": "x"})["id"], created(server, {"prompt": "x"})["id"]
    when_done(server, done)
    for video_id in (held, done):
        answer = server.http.delete(f"/v1/videos/{video_id}")
        assert answer.json() == {"id": video_id, "object": "video.deleted", "deleted": True}
        for path in (f"/v1/videos/{video_id}", f"/v1/videos/{video_id}/content", f"/v1/requests/{video_id}"):
            assert server.http.get(path).status_code == 404
        assert server.http.delete(f"/v1/videos/{video_id}").status_code == 404
    assert f"{held}-0" in server.engine.cancelled
    assert not {held, done} & {one["id"] for one in server.http.get("/v1/videos?limit=100").json()["data"]}


def test_the_list_has_videos_alone_page_by_page() -> None:
    with serving(FakeEngine(info=VIDEOS), drain_s=0) as server:
        assert server.http.get("/v1/videos").json() == {
            "object": "list",
            "data": [],
            "first_id": None,
            "last_id": None,
            "has_more": False,
        }
        ids = []
        for _ in range(5):
            ids.append(created(server, {"prompt": "x"})["id"])
            server.post({"prompt": "a picture"})
        for order, expected in (("desc", ids[::-1]), ("asc", ids)):
            found, after = [], ""
            while True:
                page = server.http.get(f"/v1/videos?limit=2&order={order}{after}").json()
                found += [one["id"] for one in page["data"]]
                assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
                if not page["has_more"]:
                    break
                after = f"&after={page['last_id']}"
            assert found == expected
        assert server.http.get("/v1/videos?limit=0").json()["has_more"]


def test_a_repeat_with_a_key_is_the_same_job(server: Served) -> None:
    key = {"Idempotency-Key": "video"}
    first = created(server, {"prompt": "x"}, headers=key)
    when_done(server, first["id"])
    again = post(server, {"prompt": "x"}, headers=key)
    assert (again.json()["id"], again.json()["status"]) == (first["id"], "completed")
    assert again.headers["idempotent-replayed"] == "true"
    assert post(server, {"prompt": "y"}, headers=key).status_code == 422


def test_pictures_are_no_videos(server: Served) -> None:
    uid = server.post({"prompt": "x"}, headers={"Prefer": "respond-async"}).json()["uid"]
    assert server.http.get(f"/v1/videos/{uid}").status_code == 404
    assert server.http.delete(f"/v1/videos/{uid}").status_code == 404
    assert server.http.get(f"/v1/requests/{uid}").status_code == 200


def test_the_route_of_pictures_still_gives_frames(server: Served) -> None:
    assert [one["frame"] for one in server.post({"prompt": "x"}).json()["data"]] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_videos_survive_a_kill(tmp_path: Path) -> None:
    with serving(FakeEngine(info=VIDEOS, plan=HELD), durable=str(tmp_path), drain_s=0) as server:
        video_id = created(server, {"prompt": "x", "seed": 2, "fps": 12})["id"]
    again = FakeEngine(info=VIDEOS)
    with serving(again, durable=str(tmp_path), drain_s=0) as server:
        when_done(server, video_id)
        assert again.specs[0].video.fps == 12
        part = server.http.get(f"/v1/videos/{video_id}/content", headers={"Range": "bytes=-7"})
        assert (part.status_code, part.content) == (206, file_of(2)[-7:])
    with serving(FakeEngine(info=VIDEOS), durable=str(tmp_path), drain_s=0) as server:
        assert server.http.get(f"/v1/videos/{video_id}/content").content == file_of(2)
        server.http.delete(f"/v1/videos/{video_id}")
    with serving(FakeEngine(info=VIDEOS), durable=str(tmp_path), drain_s=0) as server:
        assert server.http.get(f"/v1/videos/{video_id}").status_code == 404


# Previews, and pictures of the file.


def shown(content: bytes) -> list[tuple[int, ...]]:
    """The colour of each frame of an animated WebP."""
    with Image.open(io.BytesIO(content)) as picture:
        assert (picture.format, picture.info["loop"]) == ("WEBP", 0)
        colours = []
        for frame in range(picture.n_frames):
            picture.seek(frame)
            assert picture.info.get("duration", 250) == 250
            colours.append(picture.convert("RGB").getpixel((4, 4)))
    return colours


def test_the_latest_preview_of_a_video_plays_its_frames(server: Served) -> None:
    server.engine.script = [HELD]
    job = created(server, {"prompt": "x", "preview_every": 1})
    path, uid = f"/v1/videos/{job['id']}/content?variant=preview", f"{job['id']}-0"
    server.on_loop(server.engine.begin, uid)
    early = server.http.get(path)
    assert (early.status_code, early.json()["error"]["code"], early.headers["retry-after"]) == (409, "not_ready", "1")
    for step in (1, 2):
        server.on_loop(server.engine.step, uid, step)
        answer = server.http.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/webp")
        colours = shown(answer.content)
        assert len(colours) == 3
        assert all(abs(blue - 80 * frame) < 12 for frame, (_, _, blue) in enumerate(colours)), colours
    server.on_loop(server.engine.finish, uid)
    when_done(server, job["id"])
    gone = server.http.get(path)
    assert (gone.status_code, gone.json()["error"]["param"]) == (410, "variant")


def test_previews_of_a_video_are_in_its_events(server: Served) -> None:
    server.engine.script = [Plan(delay_s=0.4)]
    job = created(server, {"prompt": "x", "preview_every": 2})
    text = server.http.get(f"/v1/requests/{job['id']}/events").text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    previews = [one for one in events if one["type"] == "tilework.preview"]
    assert [(one["step"], one["output_format"]) for one in previews] == [(2, "webp")]
    assert len(shown(base64.b64decode(previews[0]["b64_json"]))) == 3


@pytest.mark.parametrize(("seconds", "every"), [(0.5, 5), (2, 20), (0.1, 2), (3600, 3600 * 10)])
def test_previews_by_the_time_of_a_step(server: Served, seconds: float, every: int) -> None:
    """Alone this request takes a second, for 10 steps. Not more than 4 previews are allowed."""
    created(server, {"prompt": "x", "preview_every_s": seconds, "num_inference_steps": 10})
    assert server.engine.specs[-1].preview_every == every


def test_pictures_of_a_video(server: Served) -> None:
    colours = [(200 - 20 * frame, 40 + 25 * frame, 128) for frame in range(5)]
    frames = torch.tensor(colours, dtype=torch.uint8)[:, None, None, :].expand(5, 48, 64, 3)
    server.engine.script = [Plan(video=video_file(frames, VideoFormat(4)).content)]
    job = when_done(server, created(server, {"prompt": "x"})["id"])
    thumbnail = server.http.get(f"/v1/videos/{job['id']}/content?variant=thumbnail")
    assert thumbnail.headers["content-type"] == "image/webp"
    with Image.open(io.BytesIO(thumbnail.content)) as picture:
        assert (picture.format, picture.size) == ("WEBP", (64, 48))
        assert np.abs(np.asarray(picture.convert("RGB")).mean(axis=(0, 1)) - colours[0]).max() < 10
    sheet = server.http.get(f"/v1/videos/{job['id']}/content?variant=spritesheet")
    assert sheet.headers["content-type"] == "image/jpeg"
    with Image.open(io.BytesIO(sheet.content)) as picture:
        assert (picture.format, picture.size) == ("JPEG", (3 * 64, 2 * 48)), "two rows, one tile is empty"
        for index, colour in enumerate(colours):
            row, column = divmod(index, 3)
            assert np.abs(np.asarray(picture)[48 * row + 24, 64 * column + 32] - np.array(colour)).max() < 12
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert client.videos.download_content(job["id"], variant="thumbnail").read() == thumbnail.content


@pytest.mark.parametrize("variant", ["thumbnail", "spritesheet"])
def test_pictures_of_a_video_that_is_not_done(server: Served, variant: str) -> None:
    server.engine.script = [HELD]
    job = created(server, {"prompt": "x"})
    path = f"/v1/videos/{job['id']}/content?variant={variant}"
    assert server.http.get(path).status_code == 409
    server.http.delete(f"/v1/videos/{job['id']}")
    assert server.http.get(path).status_code == 404


# Parts of files.


WHOLE = file_of(9, 13)
SIZE = len(WHOLE)


@pytest.mark.parametrize(
    ("given", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=0-99", 0, 100),
        ("bytes=100-", 100, SIZE),
        ("bytes=-1", SIZE - 1, SIZE),
        (f"bytes=-{SIZE + 5}", 0, SIZE),
        (f"bytes=5-{SIZE + 5}", 5, SIZE),
        (f"bytes=7-{SIZE - 2}", 7, SIZE - 1),
    ],
)
def test_a_range_is_answered_with_the_part(server: Served, url: str, given: str, start: int, stop: int) -> None:
    answer = server.http.get(url, headers={"Range": given})
    assert (answer.status_code, answer.content) == (206, WHOLE[start:stop])
    assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{SIZE}"
    assert answer.headers["content-length"] == str(stop - start)
    assert server.http.head(url, headers={"Range": given}).headers["content-length"] == str(stop - start)


@pytest.mark.parametrize("given", ["bytes=0-1,3-4", "bytes=5-2", "bytes=-", "lines=0-1", "bytes=a-b", "bytes 0-1"])
def test_what_is_no_range_is_answered_with_all(server: Served, url: str, given: str) -> None:
    answer = server.http.get(url, headers={"Range": given})
    assert (answer.status_code, answer.content) == (200, WHOLE)
    assert answer.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize("given", [f"bytes={SIZE}-", "bytes=-0", "bytes=999999999999-"])
def test_a_range_without_a_byte_is_refused(server: Served, url: str, given: str) -> None:
    answer = server.http.get(url, headers={"Range": given})
    assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{SIZE}")
    assert answer.json()["error"]["param"] == "Range"


def test_a_range_of_another_version_is_answered_with_all(server: Served, url: str) -> None:
    etag = server.http.get(url).headers["etag"]
    assert server.http.get(url, headers={"Range": "bytes=0-1", "If-Range": etag}).status_code == 206
    assert server.http.get(url, headers={"Range": "bytes=0-1", "If-Range": '"other"'}).status_code == 200


# The form that waits.


def test_the_synchronous_form_answers_with_the_file(server: Served) -> None:
    answer = post(server, {"prompt": "x", "seed": 4}, "/v1/videos/sync")
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (200, "video/mp4", file_of(4))
    assert answer.headers["x-model"] == "tiny-videos"
    server.engine.script = [Plan(fail="out of memory")]
    assert post(server, {"prompt": "x"}, "/v1/videos/sync").status_code == 500


def test_a_client_of_the_synchronous_form_that_goes_away_cancels(server: Served) -> None:
    server.engine.script = [HELD]
    num_cancelled = len(server.engine.cancelled)
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "x"}'
    head = f"POST /v1/videos/sync HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        eventually(lambda: any(not one.outcome.done() for one in list(server.engine.tickets.values())))
    eventually(lambda: len(server.engine.cancelled) == num_cancelled + 1)


def test_a_client_of_a_job_may_go_away(server: Served) -> None:
    server.engine.script = [Plan(delay_s=0.2)]
    with httpx.Client(base_url=server.url) as client:
        video_id = client.post("/v1/videos", json={"prompt": "x"}).json()["id"]
    when_done(server, video_id)


# Forms and pictures.


def test_a_form_with_and_without_a_picture(server: Served) -> None:
    fields = {"prompt": "7", "seconds": "2", "size": "64x48", "fps": "4", "seed": "5", "guidance_scale": "2.5"}
    for files in ({"input_reference": ("a.png", png(), "image/png")}, {"x": (None, "")}):
        answer = server.http.post("/v1/videos", data=fields, files=files)
        assert answer.status_code == 200, answer.text
        spec = server.engine.specs[-1]
        assert (spec.prompt, spec.frames, spec.width, spec.seed, spec.guidance_scale) == ("7", 9, 64, 5, 2.5)
        assert len(spec.pictures.get("image", ())) == ("input_reference" in files)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_picture_in_json(server: Served, wrapped: bool) -> None:
    text = "data:image/png;base64," + base64.b64encode(png()).decode()
    created(server, {"prompt": "x", "input_reference": {"image_url": text} if wrapped else text})
    assert server.engine.specs[-1].pictures["image"][0].width == 48
    assert (server.engine.specs[-1].height, server.engine.specs[-1].width) == (64, 48)


# Clients.


def test_openais_client(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    made = client.videos.create(
        prompt="x", seconds="4", size="64x48", extra_body={"fps": 3, "seed": 6, "slo_s": 60, "on_miss": "reject"}
    )
    assert (made.object, made.status in ("queued", "in_progress", "completed")) == ("video", True)
    assert int(made.seconds) == 4
    assert made.model_extra["tilework"]["seconds"] == 13 / 3
    assert made.model_extra["tilework"]["is_promised"]
    eventually(lambda: client.videos.retrieve(made.id).status == "completed")
    polled = client.videos.create_and_poll(
        prompt="y", input_reference=("a.png", png(), "image/png"), model="tiny-videos", poll_interval_ms=20
    )
    assert polled.status == "completed"
    assert len(server.engine.specs[-1].pictures["image"]) == 1
    assert client.videos.download_content(made.id).read() == b"".join(
        bytes((6 + frame, 0, 0)) * (64 * 48) for frame in range(13)
    )
    listed = client.videos.list(limit=1)
    assert listed.data[0].id == polled.id
    assert made.id in [one.id for one in client.videos.list(limit=1)], "it asks for one page after the other"
    deleted = client.videos.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="seconds"):
        client.videos.create(prompt="x", seconds="12")


def test_vllm_omnis_benchmark(server: Served) -> None:
    """As `async_request_v1_videos` of vllm-omni 0.20.0: a form, polls, the content, and a deletion.

    aiohttp sends its form as `application/x-www-form-urlencoded` where there is no file.
    """
    fields = {"prompt": "ü & x", "height": 64, "width": 48, "num_frames": 9, "num_inference_steps": 3, "seed": 1}
    form = {name: str(value) for name, value in {**fields, "fps": 8, "negative_prompt": "y"}.items()}
    picture = ("a.png", png(), "application/octet-stream")
    assert server.http.post("/v1/videos", data=form, files={"input_reference": picture}).status_code == 200
    assert len(server.engine.specs[-1].pictures["image"]) == 1
    answer = server.http.post("/v1/videos", data=form)
    assert answer.request.headers["content-type"] == "application/x-www-form-urlencoded"
    assert answer.status_code == 200, answer.text
    job_id = answer.json()["id"]
    assert answer.json()["status"]
    done = when_done(server, job_id)
    assert done["stage_durations"]
    assert len(server.http.get(f"/v1/videos/{job_id}/content").content) == 48 * 64 * 3 * 9
    assert server.http.delete(f"/v1/videos/{job_id}").status_code == 200
    spec = server.engine.specs[-1]
    assert (spec.prompt, spec.negative_prompt, spec.frames, spec.steps) == ("ü & x", "y", 9, 3)
    assert (spec.height, spec.width, spec.seed, spec.video.fps) == (64, 48, 1, 8)


def test_sglangs_benchmark(server: Served) -> None:
    """As `async_request_video_sglang` of sglang 0.5.23: JSON without a picture; with one a form, with further fields in
    one of JSON. It counts `num_outputs`.
    """
    payload = {"model": "tiny-videos", "prompt": "x", "size": "48x64", "num_frames": 9, "fps": 8}
    payload |= {"num_outputs_per_prompt": 1}
    job = when_done(server, created(server, {**payload, "num_inference_steps": 2})["id"])
    assert job["num_outputs"] == 1
    form = {name: (None, str(value)) for name, value in payload.items()}
    form["extra_body"] = (None, json.dumps({"num_inference_steps": 2, "seed": 8}))
    answer = server.http.post("/v1/videos", files={**form, "input_reference": ("a.png", png(), "image/png")})
    when_done(server, answer.json()["id"])
    spec = server.engine.specs[-1]
    assert (spec.steps, spec.seed, spec.frames, len(spec.pictures["image"])) == (2, 8, 9, 1)
