"""Bad input: never the server's fault, always with field, value and remedy, in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_engine import INFO, FakeEngine, Served, serving
from tilework.core.model import Argument, ArgumentKind, StepRange
from tilework.server.bounded.json_reader import MAX_DEPTH

MAX_SEED = 2**63 - 1


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(), max_prompt_chars=100, max_steps=50, max_images=4, max_body_bytes=4096) as served:
        yield served


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error, after a check of its shape."""
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] in ("invalid_request_error", "server_error", "rate_limit_error")
    return error


BAD = [
    # field, value, what the message must offer
    ("prompt", None, "a text"),
    ("prompt", 7, "a text"),
    ("prompt", ["x"], "a text"),
    ("prompt", "x" * 101, "at most 100 characters"),
    ("prompt", "\ud800", "valid Unicode"),
    ("negative_prompt", 7, "a text"),
    ("negative_prompt", "y" * 101, "at most 100 characters"),
    ("negative_prompt", "a\udfff", "valid Unicode"),
    ("model", 3, "the served model"),
    ("n", 0, "1 to 10"),
    ("n", 11, "1 to 10"),
    ("n", 5, "1 to 4"),
    ("n", True, "1 to 10"),
    ("n", 1.5, "1 to 10"),
    ("n", "two", "1 to 10"),
    ("n", "11", "1 to 10"),
    ("size", "big", '"48x64"'),
    ("size", "64", '"48x64"'),
    ("size", "64x64x64", '"48x64"'),
    ("size", "-64x64", '"48x64"'),
    ("size", "٦٤x٦٤", '"48x64"'),
    ("size", "64x64\n", '"48x64"'),
    ("size", 64, "width and height"),
    ("size", [64, 64], "width and height"),
    ("size", "100x90", '"96x96"'),
    ("size", "0x0", '"16x16"'),
    ("size", "1024x64", '"512x64"'),
    ("size", "513x513", '"512x512"'),
    ("response_format", "file", '"b64_json" or "url"'),
    ("response_format", 1, '"b64_json" or "url"'),
    ("output_format", "gif", '"webp"'),
    ("output_format", ["png"], '"webp"'),
    ("output_compression", 101, "0 to 100"),
    ("output_compression", -1, "0 to 100"),
    ("user", 12, "a text"),
    ("stream", "yes", "true"),
    ("partial_images", 4, "0 to 3"),
    ("partial_images", 2, "set stream to true"),
    ("tilework_events", True, "set stream to true"),
    ("tilework_events", 1, "true"),
    ("preview_every", -1, "at least 0"),
    ("preview_every", True, "at least 0"),
    ("priority", "urgent", "interactive, standard, batch"),
    ("priority", 1, "a class"),
    ("deadline", 5, "RFC 3339"),
    ("deadline", "tomorrow", "2030-01-01T12:00:00Z"),
    ("deadline", "2030-01-01T12:00:00", "offset"),
    ("deadline", "2030-02-31T12:00:00Z", "RFC 3339"),
    ("deadline", "2001-01-01T12:00:00+02:00", "clock shows"),
    ("deadline", "2999-01-01T12:00:00Z", "at most 604800"),
    ("seed", MAX_SEED, f"0 to {MAX_SEED - 1}"),
    ("seed", MAX_SEED + 1, "0 to"),
    ("seed", 10**70, "0 to"),
    ("seed", False, "0 to"),
    ("seed", -2, "0 to 2**63 - 1 - n"),
    ("seed", "0x7", "0 to"),
    ("num_inference_steps", 0, "at least 1"),
    ("num_inference_steps", 51, "1 to 50"),
    ("num_inference_steps", 2.5, "an integer"),
    ("guidance_scale", -0.1, "0 to 30"),
    ("guidance_scale", 30.5, "0 to 30"),
    ("guidance_scale", float("nan"), "0 to 30"),
    ("guidance_scale", float("inf"), "0 to 30"),
    ("guidance_scale", True, "0 to 30"),
    ("slo_s", 0, "above 0"),
    ("slo_s", -1.5, "above 0"),
    ("slo_s", float("nan"), "above 0"),
    ("slo_s", 1e300, "at most 604800"),
    ("slo_s", "soon", "above 0"),
    ("slo_s", True, "above 0"),
    ("on_miss", "cry", '"best_effort", "reject" or "drop"'),
    ("on_miss", {"a": 1}, '"best_effort", "reject" or "drop"'),
]


@pytest.mark.parametrize(
    ("field", "value", "remedy"), BAD, ids=lambda part: str(part)[:20].encode("ascii", "replace").decode()
)
def test_wrong_value_names_field_value_and_remedy(server: Served, field: str, value: object, remedy: str) -> None:
    before = len(server.engine.requests)
    content = json.dumps({"prompt": "x", field: value})
    answer = server.http.post("/v1/images/generations", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert field in error["message"]
    assert json.dumps(value)[:60] in error["message"]
    assert remedy in error["message"]
    assert len(server.engine.requests) == before


def test_values_of_any_size_are_cut_in_messages(server: Served) -> None:
    answer = server.post({"prompt": "x", "n": ["y" * 3000]})
    assert len(error_of(answer)["message"]) < 400


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/chat/completions"])
@pytest.mark.parametrize("has_key", [False, True])
def test_depth_of_a_body_is_limited_long_before_the_stack_is(server: Served, path: str, has_key: bool) -> None:
    """JSON that is just shallow enough to be parsed may be too deep to be written again, for a key or a message."""
    named = '"prompt": "x"' if "images" in path else '"messages": [{"role": "user", "content": "x"}]'
    fields = f'{{{named}, "metadata": '
    headers = {"Content-Type": "application/json", **({"Idempotency-Key": f"deep {path}"} if has_key else {})}
    statuses = {}
    for depth in (MAX_DEPTH - 1, MAX_DEPTH, *range(800, 1101)):
        answer = server.http.post(path, content=f"{fields}{'[' * depth}{']' * depth}}}", headers=headers)
        statuses[depth] = answer.status_code
        if answer.status_code == 400:
            assert f"more than {MAX_DEPTH} levels" in error_of(answer)["message"]
    assert statuses.pop(MAX_DEPTH - 1) == 200, "the body itself is a level"
    assert set(statuses.values()) == {400}


def test_a_number_of_too_many_digits_is_no_advice_about_python() -> None:
    content = '{"prompt": "x", "seed": ' + "9" * 5000 + "}"
    with serving(FakeEngine()) as served:
        headers = {"Content-Type": "application/json"}
        answer = served.http.post("/v1/images/generations", content=content, headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_json")
    assert error_of(answer)["message"].endswith("but a number in it has too many digits. Send one.")


def test_missing_prompt(server: Served) -> None:
    error = error_of(server.post({"n": 1}))
    assert (error["param"], error["code"]) == ("prompt", "missing_value")


def test_exceptions_of_the_official_client(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="nearest size") as bad:
        client.images.generate(prompt="x", size="100x90")  # type: ignore[call-overload]
    assert bad.value.param == "size"
    for model in ("sdxl", "dall-e"):
        with pytest.raises(openai.NotFoundError, match="tiny-shapes") as missing:
            client.images.generate(prompt="x", model=model)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"prompt": "x",}',
        b"[]",
        b'"x"',
        b"null",
        b"7",
        b"\xff\xfe\xfd",
        b"[" * 4000,
        b'{"seed": ' + b"1" * 4000 + b"}x",
        b'{"prompt": "x", "n": ' + b"[" * 1500 + b"]" * 1500 + b"}",
        b"prompt=x",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_malformed_body(server: Served, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = server.http.post("/v1/images/generations", content=content, headers=headers)
    assert answer.status_code == 400
    error_of(answer)


@pytest.mark.parametrize("kind", [None, "text/plain", "multipart/form-data; boundary=x", "application/jsonx", ""])
def test_other_content_types(server: Served, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = server.http.post("/v1/images/generations", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415
    assert "application/json" in error_of(answer)["message"]


def test_content_type_may_carry_a_charset(server: Served) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    answer = server.http.post("/v1/images/generations", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 200


def test_body_too_large_by_length_and_by_chunks(server: Served) -> None:
    headers = {"Content-Type": "application/json"}
    body = json.dumps({"prompt": "x", "padding": "y" * 4096}).encode()

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 500):
            yield body[start : start + 500]

    for content in (body, chunks()):
        answer = server.http.post("/v1/images/generations", content=content, headers=headers)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
        assert "4096" in error_of(answer)["message"]
    fits = b'{"prompt": "x"}'.ljust(4096)
    assert server.http.post("/v1/images/generations", content=iter([fits]), headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/images/generations", 405, "method_not_allowed"),
        ("HEAD", "/v1/images/generations", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/images/generations", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/images/generations/", 404, "unknown_url"),
        ("POST", "/v1/images/variations", 404, "unknown_url"),
        ("GET", "/v1/images/edits", 405, "method_not_allowed"),
        ("GET", "/v1", 404, "unknown_url"),
        ("GET", "/%ff%00'\"", 404, "unknown_url"),
        ("GET", "/v1/images/none/content", 404, "request_not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_wrong_path_or_method(server: Served, method: str, path: str, status: int, code: str) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status
    if status == 405:
        assert answer.headers["allow"] in ("POST", "GET, HEAD")
    if method != "HEAD":
        error = error_of(answer)
        assert (error["code"], error["type"]) == (code, "invalid_request_error")


def test_odd_host_header_is_harmless(server: Served) -> None:
    for host in ("[", "a b", "x:99999", "", "]:["):
        answer = server.post({"prompt": "x", "response_format": "url"}, headers={"Host": host})
        assert answer.status_code in (200, 400), host


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 60)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["auto", "64x64", "url", "webp", "reject", "1x1", "\ud800", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
OPTIONAL = sorted({field for field, _, _ in BAD} - {"prompt"})
bodies = st.fixed_dictionaries({"prompt": st.just("x") | json_values}, optional=dict.fromkeys(OPTIONAL, json_values))


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=bodies | json_values)
def test_no_json_brings_the_server_down(server: Served, body: object) -> None:
    headers = {"Content-Type": "application/json"}
    answer = server.http.post("/v1/images/generations", content=json.dumps(body), headers=headers)
    if answer.status_code != 200:
        assert answer.status_code in (400, 404, 413), answer.text
        error_of(answer)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert "event: image_generation.completed" in answer.text
    else:
        assert answer.json()["data"]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=60))
def test_no_bytes_bring_the_server_down(server: Served, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = server.http.post("/v1/images/generations", content=content, headers=headers)
    assert answer.status_code == 400
    error_of(answer)


@pytest.mark.parametrize(
    ("ranges", "steps", "offer"),
    [(((4, None),), 3, "from 4 on"), (((1, 1), (3, 40)), 2, "from 1 to 1 or from 3 to 40")],
)
def test_a_number_of_steps_that_the_sampler_cannot_run_is_refused(
    ranges: tuple[StepRange, ...], steps: int, offer: str
) -> None:
    with serving(FakeEngine(info=replace(INFO, step_ranges=ranges))) as served:
        answer = served.post({"prompt": "a cat", "num_inference_steps": steps})
        assert answer.status_code == 400
        error = error_of(answer)
        assert (error["param"], error["code"]) == ("num_inference_steps", "unsupported_value")
        assert offer in error["message"]
        assert not served.engine.requests
        assert served.post({"prompt": "a cat", "num_inference_steps": ranges[-1][0]}).status_code == 200


ARGUMENTS = {
    "prompt_2": "a dog",
    "eta": 1,
    "clip_skip": 2,
    "target_size": [64, 0],
    "skip_guidance_layers": [0, 3],
    "sigmas": [14.5, 2, 0.5],
    "generator_device": "cpu",
}


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/chat/completions"])
def test_arguments_of_the_model_reach_the_engine(server: Served, path: str) -> None:
    what: dict[str, Any] = {"prompt": "a cat"} if "images" in path else {"messages": [{"role": "user", "content": "x"}]}
    assert server.http.post(path, json=what | ARGUMENTS).status_code == 200
    spec = server.engine.specs[-1]
    assert spec.steps == 2, "as many as the schedule has"
    assert dict(spec.arguments) == {
        "prompt_2": "a dog",
        "eta": 1.0,
        "clip_skip": 2,
        "target_size": (64, 0),
        "skip_guidance_layers": (0, 3),
        "sigmas": (14.5, 2, 0.5),
        "generator_device": "cpu",
    }


@pytest.mark.parametrize(
    ("fields", "name", "remedy"),
    [
        ({"prompt_2": 3}, "prompt_2", "Give a text"),
        ({"prompt_2": "y" * 101}, "prompt_2", "at most 100 characters"),
        ({"eta": 1.5}, "eta", "a number from 0 to 1"),
        ({"eta": True}, "eta", "a number"),
        ({"eta": [0.5]}, "eta", "a number"),
        ({"clip_skip": 0.5}, "clip_skip", "an integer from 0 to 2"),
        ({"target_size": [64]}, "target_size", "a list of 2 integers from 0 to 64"),
        ({"target_size": [64, 65]}, "target_size", "a list of 2 integers"),
        ({"skip_guidance_layers": []}, "skip_guidance_layers", "a list of integers from 0 to 3"),
        ({"sigmas": [1, 2, 0]}, "sigmas", "falling numbers from 0 to 20, one for each step, and 1 more"),
        ({"sigmas": [1]}, "sigmas", "falling numbers"),
        ({"sigmas": [2, 1], "timesteps": [5]}, "sigmas", "timesteps is given as well"),
        ({"timesteps": [9, 8], "num_inference_steps": 3}, "num_inference_steps", "timesteps has 2 steps"),
        ({"timesteps": [*range(60, 0, -1)]}, "timesteps", "at most 50 steps"),
        ({"generator_device": "cuda"}, "generator_device", 'Give "cpu"'),
        ({"crops": [0, 0]}, "crops", "no such field"),
        ({"guidance_scal": 3}, "guidance_scal", "did you mean guidance_scale?"),
        ({"denoising_end": 0.5}, "denoising_end", "leave it out"),
        ({"background": "transparent"}, "background", '"auto" or "opaque"'),
        ({"size": "64x64", "width": 64}, "size", "width or height is given as well"),
    ],
)
def test_a_field_that_would_change_the_picture_is_refused_by_name(
    server: Served, fields: dict[str, Any], name: str, remedy: str
) -> None:
    before = len(server.engine.requests)
    error = error_of(server.post({"prompt": "x", **fields}))
    assert error["param"] == name
    assert remedy in error["message"]
    assert len(server.engine.requests) == before


def test_width_and_height_are_a_size(server: Served) -> None:
    assert server.post({"prompt": "x", "width": 96}).status_code == 200
    assert (server.engine.specs[-1].width, server.engine.specs[-1].height) == (96, INFO.default_height)


def test_an_argument_that_a_model_needs_is_asked_for() -> None:
    mode = Argument(name="control_mode", kind=ArgumentKind.INTEGER, high=7, required=True)
    with serving(FakeEngine(info=replace(INFO, arguments=(mode,)))) as served:
        error = served.post({"prompt": "a cat"}).json()["error"]
        assert (error["param"], error["code"]) == ("control_mode", "missing_value")
        assert "an integer from 0 to 7" in error["message"]
        assert served.post({"prompt": "a cat", "control_mode": 1}).status_code == 200


def test_a_long_chat_is_told_what_is_too_long() -> None:
    messages = [{"role": "user", "content": f"a red circle, number {number}"} for number in range(300)]
    with serving(FakeEngine(), drain_s=0) as server:
        error = server.http.post("/v1/chat/completions", json={"messages": messages}).json()["error"]
        assert error["param"] == "messages"
        assert "Leave earlier messages out" in error["message"]
