"""Pictures that clients give: decoded as they should be, or refused by field, value and remedy before they hurt."""

from __future__ import annotations

import base64
import io
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fake_engine import CLIPS, EDITOR, INFO, FakeEngine, Plan, Served, serving
from server.picture_files import (
    BLACK,
    BLUE,
    RED,
    WHITE,
    animated,
    data_url,
    file_of,
    halves,
    jpeg_of_many_scans,
    plain,
    png_with_size,
    text_of,
)
from tilework.core.model import PictureInput, StrengthRule
from tilework.core.wire.spec import Image as Pixels
from tilework.server.calls.parsing.decode import decode
from tilework.server.calls.parsing.file_parts import Undecodable

LIMITS = {"max_picture_bytes": 100_000, "max_input_pixels": 500_000, "max_input_bytes": 400_000}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(info=EDITOR), max_steps=60, max_body_bytes=4096, **LIMITS) as served:
        yield served


def sent(server: Served, **fields: Any) -> httpx.Response:
    return server.post({"prompt": "x", **fields})


def refused(answer: httpx.Response, field: str, *words: str) -> dict[str, Any]:
    """The error of a call that was refused for a field; its message has these words, and no more of a picture than a
    line."""
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["param"] == field
    assert field in error["message"]
    for word in words:
        assert word in error["message"]
    assert len(error["message"]) < 500
    return error


def colours(image: Pixels) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the first and of the last pixel."""
    return tuple(image.pixels[:3]), tuple(image.pixels[-3:])


def given_to(server: Served) -> dict[str, tuple[Pixels, ...]]:
    return dict(server.engine.specs[-1].pictures)


# Decoding.


def decoded(content: bytes, *, is_mask: bool = False) -> Pixels:
    return decode(content, is_mask=is_mask, max_pixels=1 << 20).image


def near(image: Pixels, *wanted: tuple[int, int, int]) -> bool:
    """Whether the first and the last pixel have these colours, as far as a lossy format keeps them."""
    return np.allclose(colours(image), wanted, atol=6)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_formats(kind: str) -> None:
    image = decoded(file_of(halves(RED, BLUE), kind))
    assert (image.width, image.height, len(image.pixels)) == (32, 16, 3 * 32 * 16)
    assert near(image, RED, BLUE)


def test_colour_modes() -> None:
    deep = Image.fromarray(np.array([[0, 0x8000, 0xFFFF]], dtype=np.uint16))
    assert list(decoded(file_of(deep)).pixels[::3]) == [0, 0x80, 0xFF], "16 bits are scaled, not cut off"
    assert near(decoded(file_of(halves(RED, BLUE).convert("CMYK"), "JPEG")), RED, BLUE)
    assert colours(decoded(file_of(halves(RED, BLUE).convert("P")))) == (RED, BLUE)
    assert colours(decoded(file_of(halves(0, 1, "1")))) == (BLACK, WHITE)
    assert colours(decoded(file_of(halves(0, 255, "L")))) == (BLACK, WHITE)


def test_transparent_parts_are_white() -> None:
    assert colours(decoded(file_of(halves((*RED, 255), (*BLUE, 0), "RGBA")))) == (RED, WHITE)
    assert colours(decoded(file_of(halves((9, 255), (9, 0), "LA")))) == ((9, 9, 9), WHITE)
    palette = halves(RED, BLUE).convert("P")
    last = palette.getpixel((31, 0))
    assert colours(decoded(file_of(palette, transparency=last))) == (RED, WHITE)
    half = decoded(file_of(halves((*RED, 255), (0, 0, 0, 128), "RGBA")))
    assert near(half, RED, (127, 127, 127))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_exif_says_which_side_is_up(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # To be turned by 90 degrees: what is left goes up.
    image = decoded(file_of(halves(RED, BLUE), kind, exif=exif))
    assert (image.width, image.height) == (16, 32)
    assert near(image, RED, BLUE)


def test_masks_are_white_where_they_draw() -> None:
    openai = file_of(halves((*RED, 255), (*WHITE, 0), "RGBA"))
    assert colours(decoded(openai, is_mask=True)) == (BLACK, WHITE), "transparent: drawn anew"
    nearly_opaque = halves((*BLACK, 255), (*WHITE, 250), "RGBA")
    for mask in (
        halves(0, 255, "L"),
        halves(BLACK, WHITE),
        halves((*BLACK, 255), (*WHITE, 255), "RGBA"),
        nearly_opaque,
    ):
        assert colours(decoded(file_of(mask), is_mask=True)) == (BLACK, WHITE), "white: drawn anew"
    assert colours(decoded(file_of(halves(RED, WHITE)), is_mask=True))[0] == (76, 76, 76), "in grey"


def test_a_phones_jpeg_with_a_second_picture_is_its_first() -> None:
    first, second = Image.new("RGB", (16, 16), RED), Image.new("RGB", (8, 8), BLUE)
    content = file_of(first, "MPO", save_all=True, append_images=[second])
    assert Image.open(io.BytesIO(content)).n_frames == 2  # type: ignore[attr-defined]
    assert near(decoded(content), RED, RED)


DAMAGED = [
    ("text", b"a red circle", "no PNG, JPEG or WebP"),
    ("nothing", b"", "no PNG, JPEG or WebP"),
    ("svg", b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "no PNG, JPEG or WebP"),
    ("pdf", b"%PDF-1.7\n%", "no PNG, JPEG or WebP"),
    ("gif", plain(kind="GIF"), "no PNG, JPEG or WebP"),
    ("tiff", plain(kind="TIFF"), "no PNG, JPEG or WebP"),
    ("bmp", plain(kind="BMP"), "no PNG, JPEG or WebP"),
    ("animated gif", animated("GIF"), "no PNG, JPEG or WebP"),
    ("animated webp", animated("WEBP"), "animated: give one frame"),
    ("animated png", animated("PNG"), "animated: give one frame"),
    ("bomb", png_with_size(60_000, 60_000), "more than 500000 pixels: give a smaller one"),
    ("large", png_with_size(1000, 501), "1000x501 pixels, and at most 500000"),
    ("truncated jpeg", file_of(Image.effect_noise((200, 200), 50), "JPEG")[:-3000], "damaged"),
    ("truncated png", file_of(Image.effect_noise((200, 200), 50))[:-3000], "damaged"),
    ("truncated webp", file_of(Image.effect_noise((200, 200), 50), "WEBP")[:-3000], "damaged"),
    ("head of a png", plain()[:20], "damaged"),
    ("broken exif", plain(exif=b"MM\x80*" + bytes(30)), "damaged"),
    ("empty png", png_with_size(0, 0), "damaged"),
    ("jpeg of many scans", jpeg_of_many_scans(200), "more than 100 scans"),
    ("many bytes", plain() + bytes(100_000), "at most 100000 bytes"),
]


@pytest.mark.parametrize(("content", "remedy"), [case[1:] for case in DAMAGED], ids=[case[0] for case in DAMAGED])
def test_a_file_that_is_no_picture_is_refused(server: Served, content: bytes, remedy: str) -> None:
    before = len(server.engine.requests)
    refused(sent(server, image=data_url(content)), "image", remedy)
    form = {"image": ("x.png", content, "image/png")}
    answer = server.http.post("/v1/images/edits", files=form, data={"prompt": "x"})
    refused(answer, "image", f"a file of {len(content)} bytes", remedy)
    assert len(server.engine.requests) == before


def test_ordinary_progressive_jpegs_are_read() -> None:
    noise = Image.effect_noise((300, 300), 60).convert("RGB")
    assert decoded(file_of(noise, "JPEG", progressive=True)).width == 300
    assert decoded(jpeg_of_many_scans(50)).width == 64


def test_a_bomb_takes_no_memory() -> None:
    tracemalloc.start()
    for size in ((60_000, 60_000), (12_000, 12_000), (4097, 4096)):
        with pytest.raises(Undecodable, match="pixels"):
            decode(png_with_size(*size), is_mask=False, max_pixels=1 << 24)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


@settings(max_examples=200, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["PNG", "JPEG", "WEBP"]), is_mask=st.booleans())
def test_no_file_raises_anything_else(data: st.DataObject, kind: str, is_mask: bool) -> None:
    content = bytearray(file_of(halves(RED, BLUE), kind))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        image = decode(bytes(content), is_mask=is_mask, max_pixels=1 << 16).image
    except Undecodable:
        return
    assert len(image.pixels) == 3 * image.width * image.height <= 3 << 16


# How they are given in JSON.


@pytest.mark.parametrize(
    "value",
    [
        text_of(plain()),
        data_url(plain()),
        data_url(plain(), "webp"),
        [data_url(plain())],
        {"url": data_url(plain())},
        {"image_url": data_url(plain())},
        {"type": "image_url", "image_url": {"url": data_url(plain())}},
        "\n".join(base64.encodebytes(plain()).decode().splitlines()),
    ],
    ids=lambda value: str(value)[:30],
)
def test_ways_to_give_a_picture(server: Served, value: object) -> None:
    for name in ("image", "images"):
        assert sent(server, **{name: value}).status_code == 200
        (image,) = given_to(server)["image"]
        assert (image.width, image.height, colours(image)) == (64, 48, (RED, RED))


def test_several_pictures_and_other_arguments(server: Served) -> None:
    pictures = [data_url(plain(colour=RED)), data_url(plain(colour=BLUE))]
    assert sent(server, image=pictures, control_image=data_url(plain(colour=WHITE)), n=3).status_code == 200
    given = given_to(server)
    assert {name: [colours(one)[0] for one in each] for name, each in given.items()} == {
        "image": [RED, BLUE],
        "control_image": [WHITE],
    }
    first, second, third = (spec.pictures for spec in server.engine.specs[-3:])
    assert first is second is third, "the images of a call share their pictures"


@pytest.mark.parametrize("name", ["mask", "mask_image"])
def test_masks(server: Served, name: str) -> None:
    fields = {"image": data_url(plain()), name: data_url(file_of(halves(0, 255, "L")))}
    assert sent(server, **fields).status_code == 200
    assert colours(given_to(server)["mask_image"][0]) == (BLACK, WHITE)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (7, "base64 or a data URL"),
        (True, "base64 or a data URL"),
        ([], "or leave it out"),
        ([None], "base64 or a data URL"),
        ({"file_id": "file-1"}, "base64 or a data URL"),
        ({"url": 5}, "base64 or a data URL"),
        ("https://example.org/cat.png", "fetches nothing: send the image itself"),
        (" HTTP://example.org/cat.png", "fetches nothing"),
        ({"image_url": {"url": "http://169.254.169.254/latest"}}, "fetches nothing"),
        ("file:///etc/passwd", "no base64"),
        ("data:image/png,abc", "base64 or a data URL"),
        ("data:image/png;base64", "no PNG"),
        ("data:image/png;base64,%%%", "no base64"),
        ("data:image/png;base64," + text_of(plain())[:-5], "no base64"),
        ("é" * 50, "no base64"),
        ("A" * 300_000, "at most 100000 bytes"),
        ([data_url(plain())] * 3, "at most 2 images"),
    ],
    ids=lambda part: str(part)[:30].encode("ascii", "replace").decode(),
)
def test_a_value_that_is_no_picture_is_refused(server: Served, value: object, remedy: str) -> None:
    before = len(server.engine.requests)
    answer = sent(server, image=value)
    refused(answer, "image", remedy)
    assert len(server.engine.requests) == before


def test_a_large_webp_is_refused_unless_it_was_accepted_before() -> None:
    """By a version without this limit: a start reads it again."""
    file = file_of(Image.new("RGB", (2900, 2900)), "WEBP")
    with pytest.raises(Undecodable, match="save it as PNG or JPEG"):
        decode(file, is_mask=False, max_pixels=1 << 25)
    assert decode(file, is_mask=False, max_pixels=None).image.width == 2900


def test_pixels_of_all_pictures_of_a_call_count(server: Served) -> None:
    half = data_url(plain(500, 500))
    assert sent(server, image=[half, half], size="64x64").status_code == 200
    refused(sent(server, image=[half, half], mask=data_url(plain(1, 1))), "mask", "at most 0 are left")


def test_large_bodies_are_for_models_that_take_pictures(server: Served) -> None:
    small = json.dumps({"prompt": "x"})
    headers = {"Content-Type": "application/json"}
    broken = base64.encodebytes(file_of(Image.effect_noise((250, 250), 90))).decode()
    fits = json.dumps({"prompt": "x", "image": [broken, broken]})
    assert len(fits) > 100_000
    assert server.http.post("/v1/images/generations", content=fits, headers=headers).status_code == 200
    no_text = server.http.post("/v1/images/generations", content=small.ljust(50_000), headers=headers)
    assert (no_text.status_code, no_text.json()["error"]["code"]) == (413, "body_too_large")
    assert "4096 bytes without its long texts" in no_text.json()["error"]["message"]
    for path in ("/v1/images/generations", "/v1/chat/completions", "/v1/images/edits"):
        answer = server.http.post(path, content=small.ljust(400_001), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    with serving(FakeEngine(), max_body_bytes=4096, **LIMITS) as other:
        assert other.http.post("/v1/images/generations", content=small.ljust(4097), headers=headers).status_code == 413


# What the model takes.


@pytest.mark.parametrize(
    ("fields", "name", "remedy"),
    [
        ({"image": "x"}, "image", "tiny-shapes draws from text alone"),
        ({"mask": "x"}, "mask", "POST /v1/images/generations"),
        ({"control_image": ["x"]}, "control_image", "leave images out"),
        ({"strength": 0.5}, "strength", "no such field"),
    ],
)
def test_a_model_of_text_alone_takes_no_picture(fields: dict[str, Any], name: str, remedy: str) -> None:
    with serving(FakeEngine()) as server:
        error = refused(sent(server, **fields), name, remedy)
        assert error["code"] == "unsupported_value"


def test_what_a_model_lacks_is_refused_by_name() -> None:
    info = replace(EDITOR, pictures=(PictureInput(name="image", required=True),))
    with serving(FakeEngine(info=info)) as server:
        picture = data_url(plain())
        refused(sent(server, image=picture, mask=picture), "mask", "takes image")
        refused(sent(server, image=picture, image_reference=picture), "image_reference", "takes image")
        error = refused(sent(server), "image", "draws from an image", "data:image/png;base64", "/v1/images/edits")
        assert error["code"] == "missing_value"
        refused(sent(server, image=[picture, picture]), "image", "2 images", "Give one image")
        assert sent(server, image=picture).status_code == 200


def test_aliases_mean_the_models_own_names() -> None:
    pictures = (PictureInput(name="control_image"), PictureInput(name="control_mask", is_mask=True))
    with serving(FakeEngine(info=replace(EDITOR, pictures=pictures))) as server:
        picture = data_url(plain())
        assert sent(server, image=picture, mask=picture).status_code == 200
        assert set(given_to(server)) == {"control_image", "control_mask"}
        refused(sent(server, image=picture, control_image=picture), "control_image", "image is given as well")


def test_a_mask_or_a_strength_without_a_picture(server: Served) -> None:
    refused(sent(server, mask=data_url(plain())), "mask", "give image as well")
    refused(sent(server, mask_image=data_url(plain())), "mask_image", "give image as well")
    refused(sent(server, strength=0.5), "strength", "0.5", "give image as well")
    assert sent(server).status_code == 200
    assert server.engine.specs[-1].whole_steps is None


# Size.


@pytest.mark.parametrize(
    ("given_size", "fields", "size"),
    [
        ((64, 48), {}, (64, 48)),
        ((70, 63), {}, (64, 48)),
        ((70, 63), {"size": "auto"}, (64, 48)),
        ((1000, 500), {}, (512, 256)),
        ((500, 1000), {}, (256, 512)),
        ((600, 400), {}, (512, 336)),
        ((5, 3), {}, (16, 16)),
        ((1000, 10), {}, (512, 16)),
        ((300, 200), {"size": "128x64"}, (128, 64)),
        ((300, 200), {"width": 64}, (64, 192)),
        ((300, 200), {"width": 64, "height": 32}, (64, 32)),
    ],
)
def test_the_size_is_that_of_the_picture(
    server: Served, given_size: tuple[int, int], fields: dict[str, Any], size: tuple[int, int]
) -> None:
    answer = sent(server, image=data_url(plain(*given_size)), **fields)
    assert answer.status_code == 200, answer.text
    spec = server.engine.specs[-1]
    assert (spec.width, spec.height) == size
    assert answer.json()["size"] == f"{size[0]}x{size[1]}"
    (image,) = given_to(server)["image"]
    assert (image.width, image.height) == given_size, "the stock pipeline itself resizes it"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(width=st.integers(1, 900), height=st.integers(1, 500))
def test_a_size_of_its_own_is_legal_and_in_proportion(server: Served, width: int, height: int) -> None:
    assert sent(server, image=data_url(plain(width, height))).status_code == 200
    spec = server.engine.specs[-1]
    assert spec.width % 16 == spec.height % 16 == 0
    scale = min(1, 512 / width, 512 / height)
    for side, given_side in ((spec.width, width), (spec.height, height)):
        assert side == 16 or given_side * scale - 16 < side <= given_side * scale + 1e-6


def test_a_size_of_its_own_keeps_to_the_pixels_of_the_server() -> None:
    with serving(FakeEngine(info=EDITOR), max_pixels=10_000) as server:
        assert sent(server, image=data_url(plain(400, 200))).status_code == 200
        spec = server.engine.specs[-1]
        assert (spec.width, spec.height) == (128, 64)


def test_where_the_picture_decides_the_size_no_other_is_taken() -> None:
    with serving(FakeEngine(info=replace(EDITOR, takes_size=False))) as server:
        for fields in ({}, {"size": "auto"}, {"size": "64x48"}):
            assert sent(server, image=data_url(plain(70, 63)), **fields).status_code == 200
            assert (server.engine.specs[-1].width, server.engine.specs[-1].height) == (64, 48)
        for width, fields, field in ((70, {"size": "128x64"}, "size"), (600, {}, "image"), (10, {}, "image")):
            error = sent(server, image=data_url(plain(width, 63)), **fields).json()["error"]
            assert error["param"] == field
            assert "at the size" in error["message"] or "sides from 16 to 512" in error["message"]


# Strength.


@pytest.mark.parametrize(
    ("steps", "strength", "made"), [(4, None, 2), (10, 0.3, 3), (10, 0.35, 3), (10, 1.0, 10), (7, 1, 7), (3, 0.5, 1)]
)
def test_strength_is_the_part_of_the_steps_that_is_made(
    server: Served, steps: int, strength: float | None, made: int
) -> None:
    assert sent(server, image=data_url(plain()), num_inference_steps=steps, strength=strength).status_code == 200
    spec = server.engine.specs[-1]
    assert (spec.steps, spec.whole_steps) == (made, steps)
    assert server.engine.requests[-1].steps == made, "what the scheduler counts"
    assert spec.arguments.get("strength") == strength, "what the stock call is told"


def test_strength_that_leaves_no_step_says_which_do(server: Served) -> None:
    for steps, strength, least in ((10, 0.09, "0.1"), (49, 0.02, "0.0205"), (3, 0, "0.3334")):
        answer = sent(server, image=data_url(plain()), num_inference_steps=steps, strength=strength)
        refused(answer, "strength", f"It leaves none of {steps} steps", f"at least {least} and at most 1")
        assert (
            sent(server, image=data_url(plain()), num_inference_steps=steps, strength=float(least)).status_code == 200
        )
    refused(sent(server, image=data_url(plain()), strength=1.5), "strength", "a number from 0 to 1")
    up = replace(
        EDITOR, arguments=tuple(replace(one, strength=one.strength and StrengthRule.UP) for one in EDITOR.arguments)
    )
    with serving(FakeEngine(info=up)) as other:
        answer = sent(other, image=data_url(plain()), strength=0)
        refused(answer, "strength", "above 0")
        assert sent(other, image=data_url(plain()), strength=0.01).status_code == 200
        assert other.engine.specs[-1].steps == 1


# Chats.


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


TEXT = {"type": "text", "text": "in blue"}
PART = {"type": "image_url", "image_url": {"url": data_url(plain())}}


def test_chats_give_pictures_in_messages(server: Served) -> None:
    for body in (chat(TEXT, PART), chat(PART, TEXT, PART), chat(TEXT, extra_body={"image": data_url(plain())})):
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert len(given_to(server)["image"]) == (2 if len(body["messages"][0]["content"]) == 3 else 1)
        assert server.engine.specs[-1].prompt == "in blue"


@pytest.mark.parametrize(
    ("body", "field", "remedy"),
    [
        (chat(TEXT, PART, PART, PART), "image", "at most 2 images"),
        (chat(TEXT, PART, image=data_url(plain())), "image", "A message has an image as well"),
        (chat(TEXT, {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}), "image", "fetches nothing"),
        (chat(TEXT, {"type": "image_url", "image_url": {}}), "image", "data URL"),
        (chat(TEXT, {"type": "image_url"}), "messages", "data:image/png;base64"),
        (chat(TEXT, {"type": "video_url", "video_url": {"url": "x"}}), "messages", "only"),
    ],
)
def test_chats_with_pictures_that_cannot_be_served(
    server: Served, body: dict[str, Any], field: str, remedy: str
) -> None:
    refused(server.http.post("/v1/chat/completions", json=body), field, remedy)


# Memory.


def test_pictures_of_open_calls_have_a_bound() -> None:
    num_bytes = 3 * 64 * 48
    engine = FakeEngine(info=EDITOR, plan=Plan(is_held=True))
    with serving(engine, input_bytes=2 * num_bytes, drain_s=0) as server:
        asked = {"prompt": "x", "n": 2, "image": data_url(plain())}
        uids = [server.post(asked, headers={"Prefer": "respond-async"}).json()["uid"] for _ in range(2)]
        answer = server.post(asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (429, "input_full", "rate_limit_error")
        assert answer.headers["retry-after"] == "5"
        assert f"{num_bytes} bytes" in error["message"]
        assert server.metric('tilework_refusals_total{reason="input_full"}') == 1
        assert server.post({"prompt": "x"}, headers={"Prefer": "respond-async"}).status_code == 202
        server.http.delete(f"/v1/requests/{uids[0]}")
        assert server.post(asked, headers={"Prefer": "respond-async"}).status_code == 202


def test_models_say_what_they_take(server: Served) -> None:
    card = server.http.get("/v1/models").json()["data"][0]["tilework"]
    assert card["pictures"][:2] == [
        {"name": "image", "required": False, "most": 2, "is_mask": False, "is_clip": False},
        {"name": "mask_image", "required": False, "most": 1, "is_mask": True, "is_clip": False},
    ]
    assert (card["default_frames"], card["max_frames"]) == (1, 1)
    assert INFO.pictures == CLIPS.pictures == ()
