"""What a strict server alone refuses: values that are written otherwise, and what has no effect."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fake_engine import EDITOR, INFO, FakeEngine, Served, serving
from server.picture_files import plain
from tilework.core.model import Argument, ArgumentKind, ModelInfo
from tilework.server.calls.parsing.form import form_fields
from tilework.server.schema.foreign_fields import SILENT, WITHOUT_CHOICE, WITHOUT_EFFECT

TRUE_SCALE = Argument(name="true_cfg_scale", kind=ArgumentKind.NUMBER, low=1.0, high=30.0, default=4.0)
NO_CHOICE = "has no effect: this server has no choice of it."


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine()) as served:
        yield served


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    with serving(FakeEngine(), strict=True) as served:
        yield served


def warnings_of(server: Served, fields: dict[str, Any]) -> list[str]:
    answer = server.post({"prompt": "a cat", **fields})
    assert answer.status_code == 200, answer.text
    warnings: list[str] = answer.json()["data"][0]["tilework"]["warnings"]
    return warnings


def refused_with(server: Served, fields: dict[str, Any]) -> tuple[int, str]:
    before = len(server.engine.requests)
    answer = server.post({"prompt": "a cat", **fields})
    assert len(server.engine.requests) == before
    return answer.status_code, answer.json()["error"]["param"]


def refused_for(server: Served, fields: dict[str, Any]) -> str:
    status, param = refused_with(server, fields)
    assert status == 400
    return param


READ: list[tuple[dict[str, Any], str, object]] = [
    ({"seed": "42"}, "seed", 42),
    ({"seed": 42.0}, "seed", 42),
    ({"guidance_scale": "7.5"}, "guidance_scale", 7.5),
    ({"num_inference_steps": "3"}, "steps", 3),
    ({"num_inference_steps": 3.0}, "steps", 3),
    ({"width": "96", "height": "64.0"}, "width", 96),
    ({"exact": "true"}, "exact", True),
    ({"exact": "False"}, "exact", False),
    *(({"size": size}, "width", 96) for size in ("96X64", "96*64", "96\u00d764", "96 x 64")),
    ({"eta": "0.5"}, "arguments", {"eta": 0.5}),
    ({"clip_skip": 2.0}, "arguments", {"clip_skip": 2}),
    ({"target_size": ["64", 32.0]}, "arguments", {"target_size": (64, 32)}),
]


@pytest.mark.parametrize(("fields", "name", "value"), READ, ids=str)
def test_what_can_be_read_in_one_way_is_read(
    server: Served, strict: Served, fields: dict[str, Any], name: str, value: object
) -> None:
    assert warnings_of(server, fields) == []
    assert getattr(server.engine.specs[-1], name) == value
    assert refused_for(strict, fields) in fields


@pytest.mark.parametrize(("given", "read"), [("PNG", "png"), ("JPEG", "jpeg"), ("jpg", "jpeg"), ("WebP", "webp")])
def test_the_format_of_a_file_may_be_written_as_its_kind_often_is(
    server: Served, strict: Served, given: str, read: str
) -> None:
    answer = server.post({"prompt": "a cat", "output_format": given})
    assert answer.json()["output_format"] == read
    assert refused_for(strict, {"output_format": given}) == "output_format"
    assert refused_for(server, {"output_format": "gif"}) == "output_format"


def test_a_number_of_images_may_be_a_text(server: Served) -> None:
    answer = server.post({"prompt": "a cat", "n": "2", "seed": 5})
    assert [one["tilework"]["seed"] for one in answer.json()["data"]] == [5, 6]


def test_a_seed_of_minus_one_is_a_random_one(server: Served, strict: Served) -> None:
    for seed in (-1, "-1"):
        assert warnings_of(server, {"seed": seed}) == []
    first, second = (spec.seed for spec in server.engine.specs[-2:])
    assert first != second
    assert refused_for(strict, {"seed": -1}) == "seed"


def test_a_form_is_read_alike() -> None:
    assert form_fields([("seed", "-1"), ("exact", "True"), ("negative_prompt", "")], EDITOR) == {
        "seed": -1,
        "exact": True,
        "negative_prompt": "",
    }


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_a_prompt_may_be_empty(server: Served, prompt: str) -> None:
    """Object removal and unconditional images need none, and stock calls take it."""
    assert warnings_of(server, {"prompt": prompt}) == []
    assert server.engine.specs[-1].prompt == prompt


def test_a_chat_may_be_empty_but_needs_the_users_message(server: Served) -> None:
    chat = {"messages": [{"role": "user", "content": ""}]}
    assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
    assert server.engine.specs[-1].prompt == ""


IDLE: list[tuple[dict[str, Any], str]] = [
    ({"on_miss": "reject"}, "on_miss has no effect: there is no deadline"),
    ({"quality": "high"}, f"quality {NO_CHOICE}"),
    ({"quality": "hd"}, f"quality {NO_CHOICE}"),
    ({"style": "natural"}, f"style {NO_CHOICE}"),
    ({"input_fidelity": "high"}, f"input_fidelity {NO_CHOICE}"),
    ({"output_compression": 50}, "output_compression has no effect: png is lossless"),
    (
        {"negative_prompt": "dogs", "guidance_scale": 1},
        "negative_prompt has no effect: at guidance_scale 1 there",
    ),
]


@pytest.mark.parametrize(("fields", "warning"), IDLE, ids=str)
def test_what_has_no_effect_is_taken_with_a_warning(
    server: Served, strict: Served, fields: dict[str, Any], warning: str
) -> None:
    (found,) = warnings_of(server, fields)
    assert found.startswith(warning)
    assert refused_for(strict, fields) in fields


@pytest.mark.parametrize("name", sorted(SILENT))
def test_what_no_client_expects_an_effect_of_has_no_warning(server: Served, strict: Served, name: str) -> None:
    for served in (server, strict):
        assert warnings_of(served, {name: "x"}) == []


def test_values_that_ask_for_what_is_done_anyway_have_no_warning(server: Served, strict: Served) -> None:
    usual = {name: values[0] for name, values in (*WITHOUT_EFFECT.items(), *WITHOUT_CHOICE.items())}
    for served in (server, strict):
        assert warnings_of(served, usual) == []


@pytest.mark.parametrize(
    "fields", [{"background": "transparent"}, {"vae_use_tiling": True}, {"extra_params": {"x": 1}}], ids=str
)
def test_what_would_change_the_picture_is_refused(server: Served, fields: dict[str, Any]) -> None:
    assert refused_for(server, fields) in fields


QWEN = replace(INFO, two_passes=False, takes_guidance=False, arguments=(TRUE_SCALE,), default_guidance_scale=1.0)
NO_PASS = replace(INFO, two_passes=False)
NO_NEGATIVE = replace(INFO, takes_negative=False)
NO_GUIDANCE = replace(INFO, takes_guidance=False, default_guidance_scale=0.0)


@pytest.mark.parametrize(
    ("info", "fields", "warning"),
    [
        (NO_PASS, {"negative_prompt": "dogs"}, "tiny-shapes has no second pass that it could guide away from."),
        (NO_PASS, {"negative_prompt": ""}, "tiny-shapes has no second pass that it could guide away from."),
        (NO_NEGATIVE, {"negative_prompt": ""}, "tiny-shapes takes none."),
        (NO_GUIDANCE, {"guidance_scale": 1}, "tiny-shapes takes none."),
        (QWEN, {"negative_prompt": "dogs", "true_cfg_scale": 1}, "give true_cfg_scale above 1 for one."),
        (QWEN, {"true_cfg_scale": 3}, "it needs negative_prompt, which may be empty."),
        (QWEN, {"true_cfg_scale": 1}, None),
        (QWEN, {"negative_prompt": ""}, None),
        (QWEN, {"negative_prompt": "dogs"}, None),
    ],
)
def test_guidance_without_effect(info: ModelInfo, fields: dict[str, Any], warning: str | None) -> None:
    with serving(FakeEngine(info=info), drain_s=0) as served:
        found = warnings_of(served, fields)
        assert served.engine.specs[-1].negative_prompt == fields.get("negative_prompt"), "none is given if none was"
    assert not found if warning is None else found[0].endswith(warning)


@pytest.mark.parametrize(
    ("info", "fields", "remedy"),
    [
        (NO_NEGATIVE, {"negative_prompt": "dogs"}, "takes none: leave it out"),
        (NO_GUIDANCE, {"guidance_scale": 3}, "takes none: leave it out"),
        (QWEN, {"guidance_scale": 3}, "give true_cfg_scale with a negative_prompt"),
    ],
)
def test_guidance_that_a_model_cannot_have_is_refused(info: ModelInfo, fields: dict[str, Any], remedy: str) -> None:
    with serving(FakeEngine(info=info), drain_s=0) as served:
        error = served.post({"prompt": "a cat", **fields}).json()["error"]
    assert error["param"] in fields
    assert remedy in error["message"]


@pytest.mark.parametrize(
    "name", ["dall-e-2", "dall-e-3", "gpt-image-1", "gpt-image-1-mini", "chatgpt-image-latest", "sora-2"]
)
def test_a_model_stands_in_for_those_of_openai(server: Served, strict: Served, name: str) -> None:
    assert warnings_of(server, {"model": name}) == [f'model "{name}" is not served here: tiny-shapes is used instead.']
    assert refused_with(strict, {"model": name}) == (404, "model")


def test_an_empty_name_is_none(server: Served) -> None:
    assert warnings_of(server, {"model": ""}) == []


@pytest.mark.parametrize("name", ["sdxl", "dall-e", "gpt-image-", "my-dall-e-3"])
def test_another_name_is_no_model(server: Served, name: str) -> None:
    assert refused_with(server, {"model": name}) == (404, "model")


def test_a_name_that_a_model_has_is_its_own() -> None:
    with serving(FakeEngine(), served_model_name="dall-e-3", drain_s=0) as served:
        assert served.post({"prompt": "x", "model": "dall-e-3"}).json()["data"][0]["tilework"]["warnings"] == []


@pytest.mark.parametrize(
    ("fields", "as_url"),
    [
        ({"model": "dall-e-3"}, True),
        ({"model": "dall-e-3", "response_format": "b64_json"}, False),
        ({"model": "gpt-image-1"}, False),
        ({}, False),
    ],
)
def test_images_are_urls_where_openai_gives_them(server: Served, fields: dict[str, Any], as_url: bool) -> None:
    (image,) = server.post({"prompt": "a cat", **fields}).json()["data"]
    assert (image["url"] is not None, image["b64_json"] is None) == (as_url, as_url)


@pytest.mark.parametrize(
    ("size", "made"), [("1024x1024", "512x512"), ("1792x1024", "512x288"), ("1024x1536", "336x512"), ("256x256", None)]
)
def test_a_size_of_openai_is_made_smaller_if_it_must_be(
    server: Served, strict: Served, size: str, made: str | None
) -> None:
    expected = [] if made is None else [f"size {size} is none that tiny-shapes draws: this is {made}."]
    answer = server.post({"prompt": "a cat", "size": size}).json()
    assert answer["size"] == (made or size)
    assert answer["data"][0]["tilework"]["warnings"] == expected
    if made is not None:
        assert refused_for(strict, {"size": size}) == "size"


def test_any_other_size_that_cannot_be_drawn_is_refused(server: Served) -> None:
    assert refused_for(server, {"size": "1024x64"}) == "size"


def test_a_picture_that_decides_the_size_comes_before_one_of_openai() -> None:
    with serving(FakeEngine(info=replace(EDITOR, takes_size=False)), drain_s=0) as served:
        fields = {"prompt": "x", "image": base64.b64encode(plain(32, 48)).decode()}
        (image,) = served.post({**fields, "size": "1024x1024"}).json()["data"]
        assert image["tilework"]["warnings"] == ["size 1024x1024 is none that tiny-editor draws: this is 32x48."]
        assert served.post({**fields, "size": "64x64"}).json()["error"]["param"] == "size"
