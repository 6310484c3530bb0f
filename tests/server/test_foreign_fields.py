"""Fields of other servers' clients on every route: other names of ours, what is refused, and what is ignored."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_engine import INFO, VIDEOS, FakeEngine, Served, serving
from tilework.core.model import Argument, ArgumentKind
from tilework.core.time import s_from_ns
from tilework.pipelines.support.record import Record, read_record
from tilework.server.schema.foreign_fields import OTHER_NAMES, SILENT, WITHOUT_CHOICE, WITHOUT_EFFECT, is_of_the_picture
from tilework.server.schema.image_request import ImageRequest

IMAGES, CHATS, CLIPS = "/v1/images/generations", "/v1/chat/completions", "/v1/videos"
FOREIGN = WITHOUT_CHOICE.keys() | WITHOUT_EFFECT.keys() | SILENT


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(info=VIDEOS), drain_s=0) as served:
        yield served


def sent(server: Served, route: str, **fields: object) -> httpx.Response:
    what = {"messages": [{"role": "user", "content": "x"}]} if route == CHATS else {"prompt": "x"}
    return server.http.post(route, json={**what, **fields})


def timeline(server: Served, answer: httpx.Response) -> Mapping[str, Any]:
    assert answer.status_code == 200, answer.text
    status: dict[str, Any] = server.http.get(f"/v1/requests/{answer.headers['x-request-id']}").json()
    return status


@pytest.mark.parametrize("route", [IMAGES, CHATS, CLIPS])
@pytest.mark.parametrize("is_literal", [False, True])
def test_other_names_mean_the_same_on_every_route(server: Served, route: str, is_literal: bool) -> None:
    fields = {"steps": 3, "guidance": 2.5, "width": 64, "height": 32, "slo_ms": 90_000, "num_images": 1}
    fields |= {"n": None, "num_steps": None}
    answer = sent(server, route, **({"extra_body": fields} if is_literal else fields))
    status = timeline(server, answer)
    spec, request = server.engine.specs[-1], server.engine.requests[-1]
    assert (spec.steps, spec.guidance_scale, spec.width, spec.height) == (3, 2.5, 64, 32)
    assert request.deadline_ns is not None
    assert s_from_ns(request.deadline_ns - request.arrival_ns) == pytest.approx(90, abs=0.1)
    assert (status["slo_s"], status["slo_source"], status["warnings"]) == (90, "request", [])
    assert (answer.headers["x-tilework-slo-s"], answer.headers["x-tilework-slo-source"]) == ("90", "request")


def test_every_other_name_is_one_of_a_field() -> None:
    assert set(OTHER_NAMES.values()) <= ImageRequest.model_fields.keys()
    assert not (OTHER_NAMES.keys() | FOREIGN) & ImageRequest.model_fields.keys()
    assert not OTHER_NAMES.keys() & FOREIGN


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"num_images": 2, "n": 2}, "n"),
        ({"steps": 2, "num_steps": 2}, "num_steps"),
        ({"slo_ms": 9, "slo_s": 9}, "slo_s"),
    ],
)
def test_a_field_by_two_names_is_refused(server: Served, fields: dict[str, object], param: str) -> None:
    error = sent(server, IMAGES, **fields).json()["error"]
    assert error["param"] == param
    assert "is given as well: leave one of them out" in error["message"]


def test_what_the_model_itself_calls_so_is_its_own() -> None:
    own = Argument(name="guidance", kind=ArgumentKind.NUMBER, high=9.0)
    with serving(FakeEngine(info=replace(INFO, arguments=(own,)))) as server:
        assert sent(server, IMAGES, guidance=7).status_code == 200
        assert dict(server.engine.specs[-1].arguments) == {"guidance": 7.0}
        assert server.engine.specs[-1].guidance_scale == INFO.default_guidance_scale


@pytest.mark.parametrize("route", [IMAGES, CHATS, CLIPS])
@pytest.mark.parametrize("name", ["control_image_2", "ipAdapterScale", "sampler", "num_inference_stepz", "slo_sec"])
def test_a_field_that_would_change_the_picture_is_refused_by_name(server: Served, route: str, name: str) -> None:
    before = len(server.engine.requests)
    answer = sent(server, route, **{name: 1})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_value")
    assert len(server.engine.requests) == before


@pytest.mark.parametrize("route", [IMAGES, CHATS, CLIPS])
def test_another_field_is_ignored_with_a_warning(server: Served, route: str) -> None:
    before = server.metric("tilework_warnings_total")
    answer = sent(server, route, session_id="abc", trace=None, **{"é" * 200: 1})
    warnings = timeline(server, answer)["warnings"]
    assert warnings[0] == '"session_id" is no field here, and was ignored.'
    assert len(warnings) == 2, "null is absent"
    assert len(warnings[1]) < 150
    told = json.dumps(answer.json())
    assert all(json.dumps(one)[1:-1] in told for one in warnings), "they are in the answer, too"
    assert server.metric("tilework_warnings_total") == before + 2


def test_of_many_ignored_fields_the_first_are_named(server: Served) -> None:
    warnings = timeline(server, sent(server, IMAGES, **{f"x{index}": 1 for index in range(190)}))["warnings"]
    assert (len(warnings), warnings[-1]) == (11, "180 more fields ignored.")


def test_a_stream_tells_of_what_was_ignored(server: Served) -> None:
    answer = sent(
        server, IMAGES, stream=True, tilework_events=True, session_id=1, num_frames=1, slo_s=9, on_miss="reject"
    )
    first, *_ = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert (first["type"], first["slo_s"], first["slo_source"]) == ("tilework.accepted", 9, "request")
    assert first["is_promised"]
    assert first["warnings"] == ['"session_id" is no field here, and was ignored.']


def test_a_strict_server_refuses_what_it_would_ignore() -> None:
    with serving(FakeEngine(), strict=True) as server:
        error = sent(server, IMAGES, session_id="abc").json()["error"]
        assert (error["param"], error["code"]) == ("session_id", "unsupported_value")
        assert sent(server, IMAGES, metadata={"a": "b"}, user="u").status_code == 200
        assert sent(server, CHATS, temperature=1).status_code == 200


# Which fields change the picture.

INNOCENT = {"callback", "generator", "output_type", "return_dict", "self", "use_kv_cache"}
"""Arguments of stock calls that no client sends, or that change no picture."""


@pytest.mark.slow
def test_arguments_of_all_stock_calls_count_as_such() -> None:
    """So the list of words is complete for the classes of diffusers that are looked at (`pipelines.support`)."""
    names = {name for found in stock_calls(read_record()).values() for name in found}
    assert len(names) > 150
    known = ImageRequest.model_fields.keys() | OTHER_NAMES.keys() | FOREIGN
    assert {name for name in names - known if not is_of_the_picture(name)} == INNOCENT


def stock_calls(record: Record) -> Mapping[str, set[str]]:
    """The arguments of the call of each class, read without importing it."""
    found = find_spec("diffusers")
    assert found is not None
    files = Path((found.submodule_search_locations or ["."])[0], "pipelines").rglob("pipeline_*.py")
    classes = (one for file in files for one in ast.parse(file.read_text()).body if isinstance(one, ast.ClassDef))
    return {
        one.name: {each.arg for each in (*call.args.args, *call.args.kwonlyargs)}
        for one in classes
        if one.name in record.classes
        for call in one.body
        if isinstance(call, ast.FunctionDef) and call.name == "__call__"
    }
