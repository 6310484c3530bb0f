"""Calls for videos, and a server that takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx

from fake_engine import CLIPS, INFO, VIDEOS, FakeEngine, Served, serving
from waiting import eventually

FPS = 4.0


@contextmanager
def serving_videos() -> Iterator[Served]:
    """A server of a model for clips, and of others."""
    engine = FakeEngine(info=VIDEOS, others=(INFO, replace(CLIPS, default_fps=FPS)))
    with serving(engine, max_pixels=64 * 48 * 13, max_previews=4, drain_s=0) as served:
        yield served


def post(server: Served, body: Any, path: str = "/v1/videos", **more: Any) -> httpx.Response:
    return server.http.post(path, json=body, **more)


def created(server: Served, body: Any, **more: Any) -> dict[str, Any]:
    answer = post(server, body, **more)
    assert answer.status_code == 200, answer.text
    job: dict[str, Any] = answer.json()
    return job


def when_done(server: Served, video_id: str, status: str = "completed") -> dict[str, Any]:
    eventually(lambda: server.http.get(f"/v1/videos/{video_id}").json()["status"] == status)
    job: dict[str, Any] = server.http.get(f"/v1/videos/{video_id}").json()
    return job
