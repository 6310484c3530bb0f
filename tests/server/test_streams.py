"""Streams: OpenAI's own client reads them, and a client that leaves or reads slowly costs nothing."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from fake_engine import FakeEngine, Plan, Served, serving
from tilework.core.request import RefusalCode
from waiting import eventually

HELD = Plan(is_held=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(), drain_s=0, keep_alive_s=0.2) as served:
        yield served


@pytest.fixture(autouse=True)
def _unprogrammed(server: Served) -> None:
    server.engine.plan = Plan()
    server.engine.script.clear()
    for seen in (server.engine.specs, server.engine.requests, server.engine.cancelled):
        seen.clear()


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)


def red(text: str) -> int:
    return Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB").getpixel((0, 0))[0]


def streamed(server: Served, **ask: Any) -> Iterator[dict[str, Any]]:
    """The events of a streamed call, as they come."""
    body = {"prompt": "x", "stream": True, **ask}
    with server.http.stream("POST", "/v1/images/generations", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream"
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def test_openai_client_reads_partial_and_completed_images(server: Served, client: openai.OpenAI) -> None:
    server.engine.plan = HELD
    with client.images.generate(
        prompt="x",
        stream=True,
        partial_images=3,
        size="64x32",  # type: ignore[call-overload]
        extra_body={"seed": 200, "num_inference_steps": 8},
    ) as stream:
        uid, told = server.engine.requests[0].uid, []
        server.on_loop(server.engine.begin, uid)
        for step in (2, 4, 6):
            server.on_loop(server.engine.step, uid, step)
            told.append(next(iter(stream)))
        server.on_loop(server.engine.finish, uid)
        told += list(stream)
    assert [one.type for one in told] == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert [one.partial_image_index for one in told[:3]] == [0, 1, 2]
    assert [red(one.b64_json) for one in told] == [2, 4, 6, 200], "the red of a preview is its step"
    last = told[-1]
    assert (last.size, last.output_format, last.background, last.quality) == ("64x32", "png", "opaque", "auto")
    assert last.usage.total_tokens == 0
    assert last.tilework["seed"] == 200
    assert server.engine.cancelled == {}


def test_async_openai_client_reads_a_stream_with_our_events(server: Served) -> None:
    server.engine.plan = HELD

    async def read() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            extra = {"tilework_events": True, "preview_every": 2, "num_inference_steps": 5}
            stream = await client.images.generate(prompt="x", stream=True, output_format="webp", extra_body=extra)
            told = [await anext(stream)]
            uid = server.engine.requests[0].uid
            server.on_loop(server.engine.begin, uid)
            for step in range(1, 5):
                server.on_loop(server.engine.step, uid, step)
                while getattr(told[-1], "step", 0) < step or told[-1].type != "tilework.progress":
                    told.append(await anext(stream))
            server.on_loop(server.engine.finish, uid)
            return told + [one async for one in stream]

    told = asyncio.run(read())
    kinds = [one.type for one in told]
    assert kinds[0] == "tilework.accepted"
    assert kinds[-2:] == ["image_generation.completed", "tilework.done"]
    assert kinds.count("tilework.preview") == 2
    assert "image_generation.partial_image" not in kinds, "they were not asked for"
    steps = [one.step for one in told if one.type == "tilework.progress"]
    assert steps == sorted(steps)
    assert steps[-1] == 5
    assert told[-1].timeline["status"] == "done"
    assert told[-2].output_format == "webp"


def test_every_image_of_a_call_comes(server: Served) -> None:
    told = list(streamed(server, n=3, seed=7))
    assert [one["type"] for one in told] == ["image_generation.completed"] * 3
    assert [red(one["b64_json"]) for one in told] == [7, 8, 9]
    assert [one["tilework"]["uid"][-2:] for one in told] == ["-0", "-1", "-2"]


def most_even(steps: int, asked: int) -> list[int]:
    """By trying every interval: as many unfinished pictures as it gives of those asked for, none too many."""
    tried = [[step for step in range(1, steps) if step % every == 0] for every in range(1, steps + 1)]
    fitting = [shown for shown in tried if len(shown) <= asked]
    return min(fitting, key=lambda shown: (-len(shown), max(b - a for a, b in pairwise([0, *shown, steps]))))


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_partial_images_are_spread_evenly_and_none_is_drawn_in_vain(server: Served, asked: int) -> None:
    server.engine.plan = HELD
    for steps in range(1, 61):
        seen = most_even(steps, asked)
        events = streamed(server, partial_images=asked, num_inference_steps=steps, tilework_events=True)
        assert next(events)["type"] == "tilework.accepted"
        told = (one for one in events if one["type"].startswith("image_generation."))
        request = server.engine.requests.pop()
        every = request.preview_every
        assert [step for step in range(1, steps) if every and step % every == 0] == seen, f"drawn of {steps} steps"
        server.on_loop(server.engine.begin, request.uid)
        for step in seen:  # Each only when the reader has seen the one before.
            server.on_loop(server.engine.step, request.uid, step)
            one = next(told)
            assert (one["type"], red(one["b64_json"])) == ("image_generation.partial_image", step)
        server.on_loop(server.engine.finish, request.uid)
        assert [one["type"] for one in told] == ["image_generation.completed"]


def test_streams_and_chats_do_not_heed_prefer(server: Served) -> None:
    """RFC 7240 lets a server ignore a preference; that nothing was applied, it says by the header's absence."""
    later = {"Prefer": "respond-async"}
    stream = server.post({"prompt": "x", "stream": True}, headers=later)
    chat = server.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, headers=later
    )
    assert [answer.status_code for answer in (stream, chat)] == [200, 200]
    assert "image_generation.completed" in stream.text
    assert chat.json()["object"] == "chat.completion"
    assert not any("preference-applied" in answer.headers for answer in (stream, chat))


def test_refusal_comes_before_the_stream(server: Served, client: openai.OpenAI) -> None:
    server.engine.script = [Plan(refuse_s=9), Plan(code=RefusalCode.QUEUE)]
    with pytest.raises(openai.RateLimitError) as caught:
        client.images.generate(prompt="x", stream=True, extra_body={"slo_s": 1, "on_miss": "reject"})
    assert caught.value.code == "deadline_unreachable"
    with pytest.raises(openai.RateLimitError) as caught:
        client.images.generate(prompt="x", stream=True)
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    with pytest.raises(openai.BadRequestError, match="leave it out"):
        client.images.generate(prompt="x", stream=True, response_format="url")


def test_failure_within_a_stream_is_raised_by_the_openai_client(server: Served, client: openai.OpenAI) -> None:
    server.engine.plan = Plan(delay_s=0.05, fail="device 1 ran out of memory")
    stream = client.images.generate(prompt="x", stream=True, extra_body={"tilework_events": True})
    told: list[str] = []
    with pytest.raises(openai.APIError, match="device 1 ran out of memory") as caught:
        told.extend(one.type for one in stream)
    assert caught.value.code == "generation_failed"
    assert told[0] == "tilework.accepted"
    assert told[-1] == "tilework.failed"


def test_cancelling_from_outside_ends_the_stream(server: Served, client: openai.OpenAI) -> None:
    server.engine.plan = HELD
    stream = client.images.generate(prompt="x", stream=True, extra_body={"tilework_events": True})
    uid = next(iter(stream)).uid
    httpx.delete(f"{server.url}/v1/requests/{uid}")
    with pytest.raises(openai.APIError, match="cancelled"):
        list(stream)


def test_closing_the_stream_cancels_and_leaves_nothing(server: Served, client: openai.OpenAI) -> None:
    server.engine.plan = HELD
    tasks = server.tasks()
    stream = client.images.generate(prompt="x", n=2, stream=True, extra_body={"tilework_events": True})
    assert next(iter(stream)).type == "tilework.accepted"
    watchers = [len(ticket._watchers) for ticket in server.engine.tickets.values() if not ticket.outcome.done()]
    assert watchers == [1, 1]
    stream.close()
    client.close()
    eventually(lambda: len(server.engine.cancelled) == 2)
    assert set(server.engine.cancelled.values()) == {"the client has disconnected"}
    eventually(lambda: server.tasks() <= tasks)
    assert all(not ticket._watchers for ticket in server.engine.tickets.values())


def test_silence_is_filled_with_comments(server: Served) -> None:
    server.engine.plan = HELD
    body = {"prompt": "x", "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/images/generations", json=body) as answer:
        lines = answer.iter_lines()
        assert [next(lines), next(lines), next(lines)] == [": keep-alive", "", ": keep-alive"]


def test_a_reader_that_comes_late_to_the_steps_sees_the_latest_only(server: Served) -> None:
    """A thousand steps while the loop is busy elsewhere are one event, not a thousand."""
    server.engine.plan = HELD
    told = streamed(server, tilework_events=True, num_inference_steps=200, preview_every=13)
    next(told)
    uid = server.engine.requests[0].uid

    def hurry() -> None:
        server.engine.begin(uid)
        for step in range(1, 200):
            server.engine.step(uid, step)

    server.on_loop(hurry)
    server.on_loop(server.engine.finish, uid)
    after = [(one["type"], one.get("step")) for one in told]
    assert len(after) <= 6, after
    assert ("tilework.progress", 200) in after
