"""`POST /v1/images/edits`: OpenAI's client and others, forms and JSON, and everything that calls for images can do."""

from __future__ import annotations

import base64
import errno
import fcntl
import gc
import io
import json
import os
import socket
import termios
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fake_engine import EDITOR, FakeEngine, Plan, Served, serving
from server.picture_files import BLACK, BLUE, RED, WHITE, data_url, file_of, halves, plain
from tilework.core.model import PictureInput
from tilework.core.request import OnMiss, RefusalCode
from tilework.core.wire.spec import Image as Pixels
from tilework.server.bounded.json_reader import MAX_FIELDS
from tilework.server.calls.call import Call
from tilework.server.calls.parsing.form import form_fields
from tilework.server.calls.parsing.image_call import ImageCall
from tilework.server.http.form import MAX_FILES
from tilework.store import given_pictures
from waiting import PATIENCE_S, eventually

EDITS = "/v1/images/edits"
ASYNC = {"Prefer": "respond-async"}
NUM_BYTES = 3 * 37 * 41


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(info=EDITOR), max_body_bytes=4096, max_input_bytes=1 << 20, drain_s=0) as served:
        yield served


def edit(server: Served, fields: dict[str, Any], *files: tuple[str, Any], **options: Any) -> httpx.Response:
    """Send a form, as httpx writes it."""
    return server.http.post(EDITS, data={"prompt": "x"} | fields, files=files or [("image", plain())], **options)


def refused(answer: httpx.Response, field: str, *words: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    for word in (field, *words):
        assert word in error["message"]


def red_of(entry: Any) -> int:
    pixel = Image.open(io.BytesIO(base64.b64decode(entry.b64_json or ""))).getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return int(pixel[0])


# OpenAI's client.


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)


def test_openai_edit(server: Served) -> None:
    mask = file_of(halves((*WHITE, 255), (*WHITE, 0), "RGBA", (64, 48)))
    answer = client_of(server).images.edit(
        image=io.BytesIO(plain()),
        mask=("mask.png", mask),
        prompt="a red hat",
        model=EDITOR.name,
        n=2,
        user="u",
        quality="auto",
        background="auto",
        input_fidelity="low",
        extra_body={
            "seed": 7,
            "strength": 0.75,
            "num_inference_steps": 8,
            "guidance_scale": 2.5,
            "negative_prompt": "blue",
            "slo_s": 30.5,
            "on_miss": "reject",
            "exact": True,
            "priority": "interactive",
            "target_size": [64, 32],
            "sigmas": None,
        },
    )
    assert answer.data is not None
    assert [red_of(one) for one in answer.data] == [7, 8]
    spec, request = server.engine.specs[-2], server.engine.requests[-2]
    assert (spec.prompt, spec.negative_prompt, spec.guidance_scale) == ("a red hat", "blue", 2.5)
    assert (spec.steps, spec.whole_steps, spec.seed, spec.exact) == (6, 8, 7, True)
    assert dict(spec.arguments) == {"strength": 0.75, "target_size": (64, 32)}
    assert (spec.width, spec.height) == (64, 48)
    assert set(spec.pictures) == {"image", "mask_image"}
    given = spec.pictures["mask_image"][0].pixels
    assert (tuple(given[:3]), tuple(given[-3:])) == (BLACK, WHITE)
    assert (request.on_miss, request.priority) == (OnMiss.REJECT, "interactive")
    assert request.deadline_ns is not None
    assert 30 * 10**9 < request.deadline_ns - request.arrival_ns <= 31 * 10**9


def test_openai_edit_of_several_pictures(server: Served) -> None:
    images = [("a.png", plain(colour=RED)), ("b.webp", plain(colour=BLUE, kind="WEBP", lossless=True))]
    client_of(server).images.edit(image=images, prompt="x", size="256x256", extra_body={"sigmas": [9.5, 4, 0]})
    spec = server.engine.specs[-1]
    assert [tuple(one.pixels[:3]) for one in spec.pictures["image"]] == [RED, BLUE]
    assert (spec.width, spec.height, spec.arguments["sigmas"]) == (256, 256, (9.5, 4, 0))


def test_openai_edit_stream(server: Served) -> None:
    server.engine.script = [Plan(delay_s=0.2)]
    events = client_of(server).images.edit(
        image=("a.png", plain()), prompt="x", stream=True, partial_images=1, extra_body={"seed": 9, "strength": 1}
    )
    kinds = []
    for event in events:
        kinds.append(event.type)
    assert kinds == ["image_edit.partial_image", "image_edit.completed"]
    assert red_of(event) == 9


def test_openai_edit_errors_are_their_exceptions(server: Served) -> None:
    client = client_of(server)
    with pytest.raises(openai.BadRequestError, match="no PNG, JPEG or WebP") as bad:
        client.images.edit(image=("a.svg", b"<svg/>"), prompt="x")
    assert bad.value.param == "image"
    with pytest.raises(openai.NotFoundError, match="tiny-editor"):
        client.images.edit(image=("a.png", plain()), prompt="x", model="sdxl")
    for more in (0, 2 << 20):  # A large file is refused before it is there.
        with serving(FakeEngine()) as other, pytest.raises(openai.BadRequestError, match="draws from text alone"):
            client_of(other).images.edit(image=("a.png", plain() + bytes(more)), prompt="x")


# Forms and JSON.


def test_json_and_form_ask_for_the_same(server: Served) -> None:
    asked = {"prompt": "a hat", "seed": 3, "num_inference_steps": 6, "strength": 0.5, "negative_prompt": "1"}
    files = {"image": plain(), "mask": plain(colour=WHITE)}
    assert server.http.post(EDITS, json=asked | {name: data_url(one) for name, one in files.items()}).is_success
    assert server.http.post(EDITS, data=asked, files=files).is_success
    assert server.http.post(
        EDITS, data=asked, files={name: (None, data_url(one)) for name, one in files.items()}
    ).is_success
    nested = {"images": [{"image_url": data_url(files["image"])}], "mask": {"image_url": data_url(files["mask"])}}
    assert server.http.post(EDITS, json=asked | nested).is_success
    first, *others = server.engine.specs[-4:]
    assert first.negative_prompt == "1", "a text stays one"
    assert all(other == first and other.pictures == first.pictures for other in others)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("n", "two", '"two" is not accepted. Give an integer from 1 to 10'),
        ("n", "1.5", "an integer from 1 to 10"),
        ("n", "+1", "an integer from 1 to 10"),
        ("n", "01", "an integer from 1 to 10"),
        ("n", " 1", "an integer from 1 to 10"),
        ("n", "\uff11", "an integer from 1 to 10"),
        ("n", "true", "an integer from 1 to 10"),
        ("n", "null", "an integer from 1 to 10"),
        ("n", "11", "11 is not accepted"),
        ("seed", "1e-3", "an integer from 0"),
        ("seed", "9" * 500, "an integer from 0"),
        ("slo_s", "1s", "a number of seconds above 0"),
        ("slo_s", "nan", "a number of seconds above 0"),
        ("slo_s", "1e999", "a number of seconds above 0"),
        ("slo_s", ".5", "a number of seconds above 0"),
        ("guidance_scale", "inf", "from 0 to 30"),
        ("exact", "TRUE", "true for an image"),
        ("exact", "1", "true for an image"),
        ("stream", "yes", "true for events"),
        ("size", "100x90", '"96x96"'),
        ("size", "7", "width and height in pixels"),
        ("on_miss", "cry", '"best_effort", "reject" or "drop"'),
        ("background", "transparent", '"auto"'),
        ("output_format", "svg", '"webp"'),
        ("strength", "much", "a number from 0 to 1"),
        ("strength", "2", "a number from 0 to 1"),
        ("clip_skip", "0.5", "an integer from 0 to 2"),
        ("target_size", "[64]", "a list of 2 integers"),
        ("target_size", "[64, [1]]", "a list of 2 integers"),
        ("sigmas", "[" * 3000, "a list of falling numbers"),
        ("strenght", "0.5", "did you mean strength?"),
        ("image_url", "https://example.org/a.png", "no such field"),
    ],
    ids=lambda part: str(part)[:20].encode("ascii", "replace").decode(),
)
def test_a_wrong_field_of_a_form_is_refused(server: Served, field: str, value: str, remedy: str) -> None:
    before = len(server.engine.requests)
    refused(edit(server, {field: value}), field, remedy)
    assert len(server.engine.requests) == before


def test_empty_fields_are_absent(server: Served) -> None:
    fields = {"n": "", "seed": "", "size": "", "user": "", "mask": "", "sigmas": "", "model": "", "negative_prompt": ""}
    assert edit(server, fields).status_code == 200


def test_fields_of_a_form_come_once(server: Served) -> None:
    refused(edit(server, {"n": ["1", "2"]}), "n", '["1", "2"]', "give it once")
    refused(edit(server, {}, ("image", plain()), ("seed", b"7")), "seed", "a file of 1 bytes", "send it as a text")
    refused(edit(server, {}, ("image", plain()), ("images", plain())), "images", "image is given as well")


def test_lists_in_forms(server: Served) -> None:
    for fields in ({"target_size": "[64, 32]"}, {"target_size[]": ["64", "32"]}, {"target_size": ["64", "32"]}):
        assert edit(server, fields).status_code == 200
        assert server.engine.specs[-1].arguments["target_size"] == (64, 32)
    assert edit(server, {"skip_guidance_layers[]": "3"}).status_code == 200
    assert server.engine.specs[-1].arguments["skip_guidance_layers"] == (3,)
    for name in ("image", "image[]"):
        assert edit(server, {}, (name, plain()), (name, plain(colour=BLUE))).status_code == 200
        assert len(server.engine.specs[-1].pictures["image"]) == 2


def test_an_edit_needs_a_picture(server: Served) -> None:
    for answer in (
        server.http.post(EDITS, json={"prompt": "x"}),
        server.http.post(EDITS, files={"prompt": (None, "x")}),
        server.http.post(EDITS, json={"prompt": "x", "image": None}),
    ):
        refused(answer, "image", "missing", "PNG, JPEG or WebP")
        assert answer.json()["error"]["code"] == "missing_value"
    refused(edit(server, {}, ("mask", plain())), "mask", "give image as well")
    assert edit(server, {}, ("control_image", plain())).status_code == 200
    refused(server.http.post(EDITS, files={"image": plain()}), "prompt", "missing")


# Masks.

HOLE = file_of(halves((*RED, 255), (*BLUE, 0), "RGBA"))
"""A picture whose right half is transparent."""
NEEDS_MASK = replace(
    EDITOR, pictures=(PictureInput(name="image"), PictureInput(name="mask_image", required=True, is_mask=True))
)


def colours(image: Pixels) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the first and of the last pixel."""
    return tuple(image.pixels[:3]), tuple(image.pixels[-3:])


def test_the_transparent_part_of_a_picture_is_its_mask(server: Served) -> None:
    assert edit(server, {}, ("image", HOLE), ("image", plain())).is_success
    assert server.http.post(EDITS, json={"prompt": "x", "images": [data_url(HOLE), data_url(plain())]}).is_success
    for spec in server.engine.specs[-2:]:
        assert {name: len(each) for name, each in spec.pictures.items()} == {"image": 2, "mask_image": 1}
        assert colours(spec.pictures["image"][0]) == (RED, WHITE)
        assert colours(spec.pictures["mask_image"][0]) == (BLACK, WHITE)


def test_a_picture_is_no_mask_if_it_is_opaque_or_has_one(server: Served) -> None:
    nearly = file_of(halves((*RED, 255), (*BLUE, 200), "RGBA"))
    for files in ([("image", nearly)], [("image", plain()), ("image", HOLE)], [("control_image", HOLE)]):
        assert edit(server, {}, *files).is_success
        assert "mask_image" not in server.engine.specs[-1].pictures
    assert edit(server, {}, ("image", HOLE), ("mask", file_of(halves(255, 0, "L")))).is_success
    assert colours(server.engine.specs[-1].pictures["mask_image"][0]) == (WHITE, BLACK)


def test_elsewhere_a_picture_is_no_mask(server: Served) -> None:
    assert server.post({"prompt": "x", "image": data_url(HOLE)}).is_success
    assert set(server.engine.specs[-1].pictures) == {"image"}


def test_a_mask_that_is_needed_may_be_the_transparent_part() -> None:
    with serving(FakeEngine(info=NEEDS_MASK), drain_s=0) as other:
        assert edit(other, {}, ("image", HOLE)).is_success
        assert colours(other.engine.specs[-1].pictures["mask_image"][0]) == (BLACK, WHITE)
        refused(edit(other, {}, ("image", plain())), "mask_image", "missing", "image has no transparent part")
        refused(other.post({"prompt": "x", "image": data_url(HOLE)}), "mask_image", "missing")


def test_a_mask_of_its_own_counts_as_memory_and_not_as_pixels() -> None:
    limits = {"max_input_pixels": 64 * 48, "input_bytes": 3 * 3 * 64 * 48 - 1, "drain_s": 0}
    with serving(FakeEngine(info=EDITOR, plan=Plan(is_held=True)), **limits) as other:
        assert edit(other, {}, ("image", plain()), headers=ASYNC).status_code == 202
        assert edit(other, {}, ("image", plain(colour=(*RED, 0))), headers=ASYNC).status_code == 429


WHITE_ON_TRANSPARENT = [
    halves((0, 0, 0, 0), (*WHITE, 255), "RGBA"),
    halves((*WHITE, 0), (250, 252, 251, 255), "RGBA"),
    halves((0, 0), (255, 255), "LA"),
]
OTHER_MASKS = [
    halves((*WHITE, 0), (*BLACK, 255), "RGBA"),
    halves((*WHITE, 0), (*RED, 255), "RGBA"),
    halves((*WHITE, 255), (*BLACK, 255), "RGBA"),
    halves((*WHITE, 0), (*WHITE, 0), "RGBA"),
    halves(255, 0, "L"),
    halves(255, 255, "L"),
]


@pytest.mark.parametrize("mask", WHITE_ON_TRANSPARENT)
def test_white_on_transparent_is_ambiguous(server: Served, mask: Image.Image) -> None:
    """By OpenAI's rule all but the white part is drawn anew; who painted it may have meant the white part."""
    answer = edit(server, {}, ("image", plain()), ("mask", file_of(mask)))
    (warning,) = answer.json()["data"][0]["tilework"]["warnings"]
    assert warning.startswith("mask is white on a transparent ground, and the transparent part is drawn anew")
    assert colours(server.engine.specs[-1].pictures["mask_image"][0]) == (WHITE, BLACK)
    with serving(FakeEngine(info=EDITOR), strict=True, drain_s=0) as strict:
        refused(edit(strict, {}, ("image", plain()), ("mask", file_of(mask))), "mask", "without transparency")


@pytest.mark.parametrize("mask", OTHER_MASKS)
def test_other_masks_are_not_ambiguous(server: Served, mask: Image.Image) -> None:
    answer = edit(server, {}, ("image", plain()), ("mask", file_of(mask)))
    assert answer.json()["data"][0]["tilework"]["warnings"] == []


def test_a_white_picture_with_a_hole_is_not_ambiguous(server: Served) -> None:
    answer = edit(server, {}, ("image", file_of(WHITE_ON_TRANSPARENT[0])))
    assert answer.json()["data"][0]["tilework"]["warnings"] == []
    assert "mask_image" in server.engine.specs[-1].pictures


# Forms that are none.


@pytest.mark.parametrize(
    ("kind", "content", "status"),
    [
        ("multipart/form-data", b"x", 400),
        ("multipart/form-data; boundary=b", b"x", 400),
        ("multipart/form-data; boundary=b", b"", 400),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx\r\n--b--\r\n", 400),
        ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", 400),
        ("multipart/form-data; boundary=" + "b" * 5000, b"x", 400),
        ("multipart/form-data; boundary=\xff; charset=none", b"x", 400),
        ("application/x-www-form-urlencoded", b"prompt=%ff", 400),
        ("image/png", b"x", 415),
        ("", b"x", 415),
        ("application/json", b"x", 400),
    ],
)
def test_bodies_that_are_no_forms(server: Served, kind: str, content: bytes, status: int) -> None:
    headers = {b"content-type": kind.encode("latin-1")}
    answer = server.http.post(EDITS, content=content, headers=headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    if status == 415:
        assert "multipart/form-data" in error["message"]
        assert "application/json" in error["message"]


def test_a_form_has_limits_while_it_is_read(server: Served) -> None:
    files = [("image", b"x")] * (MAX_FILES + 1)
    answer = edit(server, {}, *files)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
    assert "Too many files" in answer.json()["error"]["message"]
    answer = edit(server, {f"f{index}": "1" for index in range(MAX_FIELDS + 1)})
    assert "Too many fields" in answer.json()["error"]["message"]
    large = plain() + bytes(1 << 20)
    for content in (large, iter_of(form_of(large))):
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        body = form_of(large) if isinstance(content, bytes) else content
        answer = server.http.post(EDITS, content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert "1048576" in answer.json()["error"]["message"]


def form_of(content: bytes) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="x.png"\r\n\r\n'
    prompt = b'\r\n--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n--b--\r\n'
    return head + content + prompt


def iter_of(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), 50_000):
        yield content[start : start + 50_000]


def begin_form(server: Served, num_bytes: int) -> socket.socket:
    """A connection that has sent this much of a form, which the server has read, and sends no more."""
    body = form_of(plain() + bytes(2 * num_bytes))
    head = f"POST {EDITS} HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE_S)
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:num_bytes])
    eventually(lambda: not any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))))  # All have left this end.
    server.until_idle()
    return connection


def test_a_form_that_does_not_come_is_given_up() -> None:
    with serving(FakeEngine(info=EDITOR), read_timeout_s=0.3, drain_s=0) as server:
        with begin_form(server, 100_000) as connection:
            answer = connection.makefile("rb").read().decode()
        assert answer.startswith("HTTP/1.1 408")
        assert "body_too_slow" in answer


def test_large_bodies_that_are_read_at_a_time_have_a_bound() -> None:
    limits = {"max_body_bytes": 4096, "input_bytes": 300_000, "drain_s": 0}
    with serving(FakeEngine(info=EDITOR), **limits) as server:
        with begin_form(server, 200_000), begin_form(server, 90_000):
            noise = file_of(Image.effect_noise((200, 200), 90))
            assert len(noise) > 20_000
            answer = edit(server, {}, ("image", noise))
            assert answer.status_code == 503
            assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("too_many_bodies", "1")
            assert edit(server, {}).status_code == 200, "small ones have their own room"
        eventually(lambda: edit(server, {}, ("image", noise)).status_code == 200)


names = st.sampled_from(["prompt", "image", "image[]", "mask", "n", "seed", "sigmas", "exact", "model", "odd", ""])
form_values = st.text(max_size=20) | st.binary(max_size=40) | st.sampled_from(["1", "true", "[1]", "{}", "\x00", "1.5"])


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(st.tuples(names, form_values), max_size=6))
def test_no_form_brings_the_server_down(server: Served, parts: list[tuple[str, str | bytes]]) -> None:
    files = [(name, (None, value) if isinstance(value, str) else ("f", value)) for name, value in parts]
    answer = server.http.post(EDITS, files=[*files, ("prompt", (None, "x")), ("image", ("f", plain()))])
    assert answer.status_code in (200, 400, 404), answer.text


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_bytes_of_a_form_bring_the_server_down(server: Served, data: st.DataObject) -> None:
    content = bytearray(form_of(plain()))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = server.http.post(EDITS, content=bytes(content), headers=headers)
    assert answer.status_code in (200, 400), answer.text


@given(value=st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans())
def test_values_in_json_are_values_in_forms(value: float) -> None:
    written = json.dumps(value)
    found = form_fields([("seed", written)], EDITOR)["seed"]
    assert (found, type(found)) == (value, type(value)) or len(written) > 30


# What calls for images can do.


def test_edits_are_calls_like_any_other(server: Served) -> None:
    uid = edit(server, {"seed": "5"}, headers=ASYNC).json()["uid"]
    eventually(lambda: server.http.get(f"/v1/requests/{uid}").json()["status"] == "done")
    picture = Image.open(io.BytesIO(server.http.get(f"/v1/requests/{uid}/content").content))
    assert (picture.size, picture.getpixel((0, 0))) == ((64, 48), (5, 0, 0))
    assert server.http.get(f"/v1/requests/{uid}/decisions").json()["decisions"]
    answer = edit(server, {"response_format": "url"}).json()
    assert server.http.get(answer["data"][0]["url"]).headers["content-type"] == "image/png"
    server.engine.script = [Plan(refuse_s=9)]
    late = edit(server, {"slo_s": "1.5", "on_miss": "reject"})
    assert (late.status_code, late.json()["error"]["code"]) == (429, "deadline_unreachable")


def test_idempotency_keys_know_the_files(server: Served) -> None:
    key = {"Idempotency-Key": "files"}
    first, second = (edit(server, {"seed": "5"}, ("image", plain()), headers=key) for _ in range(2))
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    assert second.headers["idempotent-replayed"] == "true"
    other = edit(server, {"seed": "5"}, ("image", plain(colour=BLUE)), headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


def test_calls_with_one_key_at_a_time_are_one(server: Served) -> None:
    """While the pictures of one are decoded, the other may come in."""
    before = len(server.engine.requests)
    picture = file_of(Image.effect_noise((600, 600), 90))
    body = json.dumps({"prompt": "x", "image": data_url(picture)}).encode()
    head = f"POST {EDITS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nIdempotency-Key: at once\r\n"
    message = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    address = "127.0.0.1", int(server.url.rpartition(":")[2])
    with socket.create_connection(address) as one, socket.create_connection(address) as other:
        for connection in (one, other):
            connection.sendall(message)
        for connection in (one, other):
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert len(server.engine.requests) == before + 1


@pytest.mark.slow
def test_a_call_that_has_ended_holds_no_pictures() -> None:
    """Whatever may still be read of it: its record, its answer, its events."""

    def held() -> list[ImageCall]:
        gc.collect()
        return [one for one in gc.get_objects() if isinstance(one, ImageCall) and one.num_input_bytes == NUM_BYTES]

    before = len(held())
    with serving(FakeEngine(info=EDITOR, keeps=False, plan=Plan(is_held=True)), drain_s=0) as server:
        uid = edit(server, {}, ("image", plain(37, 41)), headers=ASYNC).json()["uid"]
        assert len(held()) == before + 1
        calls = [one for one in gc.get_objects() if isinstance(one, Call) and one.uid == uid]
        assert len(calls) == 1, "a slow reader of its events holds it, as this does"
        server.on_loop(server.engine.finish, f"{uid}-0")
        eventually(lambda: server.http.get(f"/v1/requests/{uid}").json()["status"] == "done")
        eventually(lambda: len(held()) == before)


@pytest.mark.slow
def test_pictures_survive_a_kill(tmp_path: Any) -> None:
    held = FakeEngine(info=EDITOR, plan=Plan(is_held=True))
    with serving(held, durable=str(tmp_path), drain_s=0) as server:
        files = ("image", HOLE), ("image", plain(kind="JPEG"))  # The first is its mask, too.
        uid = edit(server, {"n": "2"}, *files, headers=ASYNC).json()["uid"]
        before = [(spec, spec.pictures) for spec in held.specs]
    assert set(before[0][1]) == {"image", "mask_image"}
    kept_files = list((tmp_path / "pictures").iterdir())
    assert sorted(one.read_bytes() for one in kept_files) == sorted(content for _, content in files), "each once"
    assert {one.stat().st_mode & 0o777 for one in kept_files} == {0o600}
    again = FakeEngine(info=EDITOR, plan=Plan(is_held=True))
    with serving(again, durable=str(tmp_path), drain_s=0) as server:
        assert [(spec, spec.pictures) for spec in again.specs] == before
        for index in range(2):
            server.on_loop(again.finish, f"{uid}-{index}")
        eventually(lambda: server.http.get(f"/v1/requests/{uid}").json()["status"] == "done")
        assert server.http.get(f"/v1/requests/{uid}/content?index=1").status_code == 200
        eventually(lambda: kept(tmp_path) == [])


def kept(path: Path) -> list[str]:
    """The pictures that a durable server keeps."""
    return sorted(one.name for one in (path / "pictures").iterdir())


def test_pictures_of_a_call_that_does_not_begin_are_not_kept(tmp_path: Path) -> None:
    engine = FakeEngine(info=EDITOR, script=[Plan(code=RefusalCode.QUEUE)], plan=Plan(is_held=True))
    with serving(engine, durable=str(tmp_path), drain_s=0) as server:
        assert edit(server, {}, ("image", plain())).status_code == 429
        assert edit(server, {"seed": "x"}, ("image", plain())).status_code == 400
        eventually(lambda: kept(tmp_path) == [])
        again = {**ASYNC, "Idempotency-Key": "k"}
        for _ in range(2):
            assert edit(server, {}, ("image", plain()), headers=again).status_code == 202
        eventually(lambda: len(kept(tmp_path)) == 1)
        (tmp_path / "pictures" / ("a" * 32)).write_bytes(b"x")
        (tmp_path / "pictures" / "not ours").write_bytes(b"x")
        before = kept(tmp_path)
    with serving(FakeEngine(info=EDITOR, plan=Plan(is_held=True)), durable=str(tmp_path), drain_s=0):
        assert kept(tmp_path) == [one for one in before if one != "a" * 32]


def _make_link(file: Path) -> None:
    file.rename(file.with_name("other"))
    file.symlink_to(file.with_name("other"))


def _make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "spoil", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:40]), _make_link, _make_pipe]
)
def test_a_call_whose_picture_is_lost_fails_and_the_others_go_on(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    held = FakeEngine(info=EDITOR, plan=Plan(is_held=True))
    with serving(held, durable=str(tmp_path), drain_s=0) as server:
        lost = edit(server, {}, ("image", plain()), headers=ASYNC).json()["uid"]
        spoil(tmp_path / "pictures" / kept(tmp_path)[0])
        other = edit(server, {}, ("image", plain()), headers=ASYNC).json()["uid"]
    with serving(FakeEngine(info=EDITOR), durable=str(tmp_path), drain_s=0) as server:
        eventually(lambda: server.http.get(f"/v1/requests/{other}").json()["status"] == "done")
        found = server.http.get(f"/v1/requests/{lost}").json()
        assert found["status"] == "failed"
        assert "one of its input images cannot be read" in found["error"]["message"]


def test_a_picture_that_cannot_be_kept_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(info=EDITOR)
    with serving(engine, durable=str(tmp_path), drain_s=0) as server:
        with monkeypatch.context() as patch:
            patch.setattr(given_pictures.os, "fsync", no_room)
            answer = edit(server, {}, ("image", plain()))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "disk_unwritable")
        assert (engine.requests, kept(tmp_path)) == ([], [])


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
