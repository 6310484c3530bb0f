"""Chats that stream: progress as reasoning, then the picture, then the end, as chat user interfaces read them."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from fake_engine import EDITOR, INFO, FakeEngine, Plan, Served, serving
from waiting import PATIENCE_S, eventually

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "a cat"}], "stream": True, "seed": 8}


@pytest.fixture
def server() -> Iterator[Served]:
    with serving(FakeEngine()) as served:
        yield served


def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    """What a stream says, which ends as OpenAI's do."""
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    lines = [line for line in answer.text.splitlines() if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines), "events of chats have no names"
    return [json.loads(line[6:]) for line in lines]


def test_progress_is_told_before_the_picture(server: Served) -> None:
    """Each step is let go only after the one before was told."""
    server.engine.script = [Plan(is_held=True)]
    told = threading.Semaphore(0)

    def steps() -> None:
        eventually(lambda: server.engine.tickets)
        uid = next(iter(server.engine.tickets))
        server.on_loop(server.engine.begin, uid)
        for step in (1, 3):
            assert told.acquire(timeout=PATIENCE_S)
            server.on_loop(server.engine.step, uid, step)
        assert told.acquire(timeout=PATIENCE_S)
        server.on_loop(server.engine.finish, uid)

    stepper = threading.Thread(target=steps)
    stepper.start()
    reasons, content = [], ""
    stream = client(server).chat.completions.create(
        model=INFO.name, messages=ASK["messages"], stream=True, seed=8, extra_body={"steps": 4, "slo_ms": 9000}
    )
    for chunk in stream:
        (choice,) = chunk.choices
        if choice.delta.content:
            content += choice.delta.content
        elif reason := (choice.delta.model_extra or {}).get("reasoning_content"):
            reasons.append(reason)
            assert not content
            if "step" in reason:
                told.release()
        assert (chunk.model, chunk.object) == (INFO.name, "chat.completion.chunk")
    stepper.join(PATIENCE_S)
    assert re.match(r"1 image, about 0\.[0-9] s left\n", reasons[0])
    told_steps = [f"step {step} of 4" for step in (0, 1, 3, 4)]
    assert [re.split("[,\n]", reason)[0] for reason in reasons[1:]] == ["queued", *told_steps]
    assert choice.finish_reason == "stop"
    (served,) = (chunk.model_extra or {})["tilework"]
    assert (served["slo_s"], served["slo_source"], served["on_time"]) == (9, "request", True)
    found = re.fullmatch(r"!\[picture\]\(data:image/png;base64,([^)]*)\)\n", content)
    assert found is not None
    assert Image.open(io.BytesIO(base64.b64decode(found[1]))).getpixel((0, 0)) == (8, 0, 0)


@pytest.mark.slow
def test_each_picture_of_several_is_told_of(server: Served) -> None:
    answer = server.http.post("/v1/chat/completions", json={**ASK, "n": 2, "output_format": "jpeg"})
    assert answer.headers["x-request-id"]
    found = chunks(answer)
    assert len({one["id"] for one in found}) == 1
    content = "".join(one["choices"][0]["delta"].get("content", "") for one in found)
    assert len(re.findall(r"!\[picture\]\(data:image/jpeg;base64,[^)]+\)\n", content)) == 2
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert found[0]["choices"][0]["delta"]["reasoning_content"].startswith("2 images, ")
    assert [one["seed"] for one in found[-1]["tilework"]] == [8, 9]


@pytest.mark.slow
def test_a_failure_in_the_stream_is_raised_by_openais_client(server: Served) -> None:
    server.engine.script = [Plan(fail="out of memory", delay_s=0.02)]
    stream = client(server).chat.completions.create(model=INFO.name, messages=ASK["messages"], stream=True)
    with pytest.raises(openai.APIError, match="out of memory"):
        list(stream)


@pytest.mark.slow
def test_a_refusal_has_its_own_status(server: Served) -> None:
    server.engine.script = [Plan(refuse_s=9)]
    answer = server.http.post("/v1/chat/completions", json={**ASK, "slo_s": 1, "on_miss": "reject"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "deadline_unreachable")
    assert answer.json()["error"]["slo_source"] == "request"


@pytest.mark.slow
def test_a_client_that_leaves_cancels(server: Served) -> None:
    server.engine.script = [Plan(is_held=True)]
    with server.http.stream("POST", "/v1/chat/completions", json=ASK) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    eventually(lambda: list(server.engine.cancelled.values()) == ["the client has disconnected"])


@pytest.mark.slow
def test_a_chat_may_hold_pictures_of_its_history() -> None:
    """User interfaces send earlier answers again, with the picture in their text."""
    picture = f"![picture](data:image/png;base64,{'A' * 4000})"
    history = [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": picture}]
    body = {"messages": [*history, {"role": "user", "content": "in blue"}]}
    for info in (INFO, EDITOR):
        with serving(FakeEngine(info=info), max_body_bytes=1024, max_input_bytes=8192) as server:
            assert server.http.post("/v1/chat/completions", json=body).status_code == 200
            assert server.engine.specs[-1].prompt == "a cat\nin blue"
            large = {"messages": [{"role": "assistant", "content": "A" * 9000}, *body["messages"]]}
            assert server.http.post("/v1/chat/completions", json=large).status_code == 413
