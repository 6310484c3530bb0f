"""The page of the API is what the server says of itself, and every example in it works as printed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from fake_engine import EDITOR, VIDEOS, FakeEngine, Plan, Served, app_of, serving
from server.test_plan import DOCUMENT
from tilework.server.api.examples import ERRORS, UID
from tilework.server.config import ServerConfig
from tilework.server.planning.planner import CapacityPlanner, PlanJob
from tilework.server.planning.recent import TrafficLines
from tools.api_reference import in_lines, reference
from waiting import eventually

FIXED = {"object", "type", "role", "status", "state", "kind", "code"}  # Fields that have the printed value.


@dataclass(frozen=True)
class Example:
    """One of a route: what to send, and what comes back (JSON, or text)."""

    route: str
    status: int
    command: str
    kind: str | None
    answer: str


@cache
def page() -> str:
    """The page, as `make site` writes it."""
    return reference(app_of(FakeEngine(), ServerConfig()).openapi())


def examples() -> list[Example]:
    found = []
    for section in re.split(r"^## ", page(), flags=re.M)[1:]:
        if not section.startswith("`"):
            continue
        route = section.split("`")[1]
        parts = re.split(r"^\*\*(\d+)\*\* ", section, flags=re.M)[1:]
        for status, part in zip(parts[::2], parts[1::2], strict=True):
            blocks = re.findall(r"^```(\w+)\n(.*?)^```", part, flags=re.M | re.S)
            assert blocks[0][0] == "console", route
            kind, answer = blocks[1] if len(blocks) > 1 else (None, "")
            found.append(Example(route, int(status), blocks[0][1].removeprefix("$ "), kind, answer))
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    clips = replace(VIDEOS, name="shapes", pictures=EDITOR.pictures, arguments=EDITOR.arguments, max_frames=81)
    with serving(FakeEngine(info=clips), drain_s=0) as served:
        yield served


def test_the_page_has_every_route_and_its_links_lead_somewhere() -> None:
    paths = app_of(FakeEngine(), ServerConfig()).openapi()["paths"]
    routes = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    assert list(dict.fromkeys(example.route for example in examples())) == routes
    text = page()
    titles = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.*)$", text, re.M)
    }
    assert set(re.findall(r"\]\(#(.*?)\)", text)) == titles


def test_the_page_shows_every_way_to_be_answered_and_every_error() -> None:
    shown = [(example.status, example.kind) for example in examples() if example.route == "POST /v1/images/generations"]
    assert shown == [(200, "json"), (200, "text"), (202, "json")]
    table = page().partition("## Errors")[2]
    assert [int(status) for status in re.findall(r"^\| (\d+) \|", table, flags=re.M)] == sorted(ERRORS)
    assert 405 in ERRORS


PLAN = PlanJob(
    target=0.95,
    traffic=TrafficLines(lines="", num_requests=20, num_due=20, num_met=10, span_s=1.0),
    num_devices=2,
    document=DOCUMENT,
    ended_ns=1,
)
"""One that is made: a server needs traffic and time for that."""


@pytest.mark.parametrize("example", examples(), ids=lambda one: f"{one.route} {one.status} {one.kind}")
def test_the_example_works_as_printed(server: Served, example: Example) -> None:
    server.engine.plan = Plan(delay_s=1.0 if example.kind == "text" else 0.0)  # A stream shows what comes in between.
    uid = begin(server, example.route)
    with ThreadPoolExecutor(1) as pool, patch.object(CapacityPlanner, "plan", lambda _self, target: PLAN):
        sending = pool.submit(send, server, example.command.replace(UID, uid))
        if example.route.endswith("/events"):
            eventually(lambda: server.engine.tickets[f"{uid}-0"]._watchers)
            server.on_loop(server.engine.finish, f"{uid}-0")
        answer = sending.result()
    assert answer.status_code == example.status, answer.text
    if example.kind == "json":
        check_shape(json.loads(example.answer), answer.json(), example.route)
    elif example.route == "GET /metrics":
        name = example.answer.split("{")[0]
        assert f"# TYPE {name} counter" in answer.text
    elif example.kind == "text":
        check_events(example.answer, answer.text)
    elif "/videos" in example.route:
        assert answer.headers["content-type"] == "video/mp4"
    else:
        assert answer.headers["content-type"] == "image/png"
        assert answer.content.startswith(b"\x89PNG")


def begin(server: Served, route: str) -> str:
    """A call in the state that the example tells of: done where its picture is fetched, otherwise under way."""
    plan = Plan(is_held=not route.endswith("/content"))
    server.engine.script = [plan]
    headers = {"Prefer": "respond-async"}
    path = "/v1/videos" if "/videos" in route else "/v1/images/generations"
    answer = server.http.post(path, json={"prompt": "x", "slo_s": 30}, headers=headers)
    uid: str = answer.headers["x-request-id"]
    if plan.is_held:
        server.on_loop(server.engine.begin, f"{uid}-0")
    else:
        eventually(lambda: server.http.get(f"/v1/requests/{uid}").json()["status"] == "done")
    return uid


def send(server: Served, command: str) -> httpx.Response:
    """What the printed command sends: as curl reads it, a body is posted unless it says otherwise."""
    words = shlex.split(command.replace("$URL", server.url))
    assert words[:1] == ["curl"]
    assert words[1] in ("-s", "-sN")
    url = next(word for word in words if word.startswith("http"))
    given = {flag: value for flag, value in pairwise(words) if flag in ("-X", "-d")}
    method = given.get("-X", "POST" if "-d" in given else "GET")
    headers = dict(value.split(": ") for flag, value in pairwise(words) if flag == "-H")
    return server.http.request(method, url, content=given.get("-d"), headers=headers)


def check_shape(printed: Any, real: Any, where: str) -> None:
    """The same fields everywhere, with values of the same type; null may stand for any.

    The names in some objects are data: stages and caches of the model, degrees that were used.
    """
    if printed is None or real is None or where.endswith(("stage_durations", "cache_settings", "degrees")):
        return
    if isinstance(printed, dict):
        assert isinstance(real, dict), where
        assert list(printed) == list(real), where
        for name, value in printed.items():
            if name in FIXED:
                assert value == real[name], f"{where} {name}"
            check_shape(value, real[name], f"{where} {name}")
    elif isinstance(printed, list):
        assert isinstance(real, list), where
        for first, second in zip(printed[:1], real[:1], strict=False):
            check_shape(first, second, where)
    elif isinstance(printed, int | float) and not isinstance(printed, bool):
        assert isinstance(real, int | float), where
    else:
        assert type(printed) is type(real), where


def check_events(printed: str, real: str) -> None:
    """Every printed event came, with the same fields."""
    told = [json.loads(one) for one in re.findall(r"^data: (\{.*)$", real, flags=re.M)]
    shown = [json.loads(one) for one in re.findall(r"^data: (\{.*)$", printed, flags=re.M)]
    assert shown
    for one in shown:
        alike = [other for other in told if all(other.get(name) == one[name] for name in FIXED & one.keys())]
        alike = [other for other in alike if said(other) == said(one)]
        assert alike, f"no event like {one}"
        check_shape(one, alike[0], one.get("type", "chunk"))


def said(event: dict[str, Any]) -> list[str]:
    """What a chunk of a chat adds to its message; nothing in other events."""
    return [name for choice in event.get("choices", ()) for name in choice["delta"]]


def test_values_are_broken_where_they_do_not_fit() -> None:
    assert in_lines({"a": [1, None]}) == '{"a": [1, null]}'
    long = {"a": ["x" * 60, "y" * 60], "b": {}}
    assert json.loads(in_lines(long)) == long
    assert max(map(len, in_lines(long).splitlines())) < 80
