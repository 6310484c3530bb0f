"""What the OpenAPI document says is true: schemathesis makes calls from it, and checks every answer against it.

`SCHEMA_CALLS` sets how many random calls it makes of each operation, beside those that cover its schema.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle

import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks

from fake_engine import EDITOR, VIDEOS, FakeEngine, Plan, Served, app_of, serving
from tilework.core.wire.spec import VideoFormat
from tilework.pipelines.video.export import video_file
from tilework.server.config import ServerConfig
from waiting import PATIENCE_S, eventually

NUM_CALLS = int(os.environ.get("SCHEMA_CALLS", "25"))
CALLS = settings(max_examples=NUM_CALLS, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
DONE = Plan(video=video_file(torch.zeros(3, 16, 16, 3, dtype=torch.uint8), VideoFormat(4)).content)
"""Videos are files of which pictures can be made."""

load_all_checks()
# What a schema cannot say makes a call wrong, too: a model's sides, a key that was used before, the time of day.
EXCLUDED = [CHECKS.get_one("positive_data_acceptance")]
schema = schemathesis.openapi.from_dict(app_of(FakeEngine(), ServerConfig()).openapi())


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    model = replace(EDITOR, stages=VIDEOS.stages, default_fps=VIDEOS.default_fps)
    with serving(FakeEngine(plan=DONE, info=model, keeps=False), max_steps=50, drain_s=0) as served:
        yield served
        eventually(lambda: {"done", "failed", "cancelled"}.issuperset(statuses(served)))
        eventually(lambda: served.engine.status.health().num_jobs == 0)


def statuses(served: Served) -> set[str]:
    return {call["status"] for call in served.http.get("/v1/requests?limit=100").json()["data"]}


@pytest.fixture(scope="module")
def next_uid(server: Served) -> Callable[..., str]:
    """Calls that exist, for pictures or, by their route, for videos, in all their states by turns."""
    plans = cycle([DONE, Plan(fail="out of memory"), replace(DONE, delay_s=0.1), Plan(is_held=True)])

    def begin(path: str = "/v1/images/generations") -> str:
        plan = next(plans)
        server.engine.script = [plan]
        answer = server.http.post(path, json={"prompt": "x", "size": "16x16"}, headers={"Prefer": "respond-async"})
        uid: str = answer.headers["x-request-id"]
        if plan.is_held:
            server.http.delete(f"/v1/requests/{uid}")
        return uid

    return begin


@schema.parametrize()
@CALLS
def test_every_answer_is_as_documented(case: schemathesis.Case, server: Served) -> None:
    case.validate_response(case.call(base_url=server.url, timeout=PATIENCE_S), excluded_checks=EXCLUDED)


@schema.include(path_regex="{uid}").parametrize()
@CALLS
def test_every_answer_about_a_call_is_as_documented(
    case: schemathesis.Case, server: Served, next_uid: Callable[..., str]
) -> None:
    case.path_parameters["uid"] = next_uid()
    answer = case.call(base_url=server.url, timeout=PATIENCE_S)
    case.validate_response(answer, excluded_checks=EXCLUDED)
    assert answer.status_code != 404 or case.query


@schema.include(path_regex="{video_id}").parametrize()
@CALLS
def test_every_answer_about_a_video_is_as_documented(
    case: schemathesis.Case, server: Served, next_uid: Callable[..., str]
) -> None:
    case.path_parameters["video_id"] = next_uid("/v1/videos")
    answer = case.call(base_url=server.url, timeout=PATIENCE_S)
    case.validate_response(answer, excluded_checks=EXCLUDED)
    assert answer.status_code != 404
