"""Clients that were written for other servers: each sends what it sends there, and reads the answer as it does there.

Sources: vllm-omni `benchmarks/diffusion/backends.py`, sglang `multimodal_gen/benchmarks/bench_serving.py`, and the
official `openai` library. Their other dependencies stay out: requests are made by httpx, field by field as theirs.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from fake_engine import INFO, FakeEngine, Plan, Served, serving
from tilework.core.model import ModelInfo
from tilework.core.request import OnMiss
from tilework.server.api.app import create_app
from tilework.server.api.chat import image_part
from tilework.server.config import ServerConfig
from tilework.server.schema.answers import RequestTimeline, SegmentModel
from waiting import PATIENCE_S, eventually

KEYLESS = {"Authorization": "Bearer EMPTY"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with serving(FakeEngine(info=replace(INFO, path=str(tmp_path)))) as served:
        yield served


@pytest.fixture(scope="module")
def refusing() -> Iterator[Served]:
    """For requests that are refused: they leave nothing behind."""
    with serving(FakeEngine()) as served:
        yield served


@dataclass(frozen=True)
class Modelled:
    """A server as a user starts it to try a client: real workers that pretend to draw. `log` is its stderr."""

    url: str
    log: Path


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Modelled]:
    flags = ["--backend", "modelled", "--devices", "2", "--cost", "flux1dev_h100_eager", "--port", "0", "--json"]
    log = tmp_path_factory.mktemp("serve") / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tilework", "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TILEWORK_LOG_LEVEL": "info"},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        yield Modelled(json.loads(line)["url"], log)
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def simulated_url(modelled: Modelled) -> str:
    return modelled.url


# vLLM-Omni.


@dataclass
class OmniOutput:
    """What its benchmark keeps of a request (`RequestFuncOutput`)."""

    success: bool = False
    error: str = ""
    stage_durations: dict[str, float] = field(default_factory=dict)
    peak_memory_mb: float = 0.0
    content: list[Any] = field(default_factory=list)


def omni_chat(url: str, prompt: str, model: str, **extra: Any) -> OmniOutput:
    """As `async_request_chat_completions` does for text: a literal `extra_body`, and no key at all."""
    payload = {"model": model, "messages": [{"role": "user", "content": prompt}], "extra_body": extra}
    response = httpx.post(f"{url}/v1/chat/completions", json=payload, timeout=60)
    output = OmniOutput()
    if response.status_code != 200:
        output.error = f"HTTP {response.status_code}: {response.text}"
        return output
    answer = response.json()
    output.success = True
    output.content = answer.get("choices", [])[0].get("message", {}).get("content", [])
    first_item = output.content[0]
    output.stage_durations = first_item.get("stage_durations") or {}
    output.peak_memory_mb = first_item.get("peak_memory_mb", 0.0)
    return output


def picture(data_url: str) -> Image.Image:
    head, _, data = data_url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


@pytest.mark.slow
def test_omni_chat_back_end(simulated_url: str) -> None:
    model = httpx.get(f"{simulated_url}/v1/models").json()["data"][0]["id"]
    fields = {"height": 256, "width": 512, "num_frames": 1, "num_inference_steps": 4, "seed": 3, "fps": 8}
    output = omni_chat(simulated_url, "a red circle", model, **fields)
    assert output.success, output.error
    assert output.content[0]["type"] == "image_url"
    assert picture(output.content[0]["image_url"]["url"]).size == (512, 256)
    assert list(output.stage_durations) == ["encode", "diffuse", "decode"]
    assert all(seconds > 0 for seconds in output.stage_durations.values())
    assert output.peak_memory_mb == 0.0


def test_omni_chat_fields_reach_the_engine(server: Served) -> None:
    fields = {
        "width": 96,
        "num_inference_steps": 3,
        "seed": 9,
        "guidance": 2.5,
        "negative_prompt": "blue",
        "slo_ms": 75_000,
    }
    assert omni_chat(server.url, "a cat", INFO.name, **fields, num_outputs_per_prompt=2).success
    first, second = server.engine.specs
    assert (first.prompt, first.negative_prompt, first.seed, second.seed) == ("a cat", "blue", 9, 10)
    assert (first.width, first.height, first.steps, first.guidance_scale) == (96, INFO.default_height, 3, 2.5)
    request = server.engine.requests[0]
    assert request.deadline_ns is not None
    assert request.deadline_ns - request.arrival_ns == pytest.approx(75 * 10**9, rel=0.1)


def test_omni_stage_durations_are_the_sums_of_the_timeline(server: Served) -> None:
    server.engine.plan = Plan(delay_s=0.05)
    item = omni_chat(server.url, "a cat", INFO.name).content[0]
    spans = [part["end_s"] - part["start_s"] for part in item["tilework"]["segments"]]
    assert item["stage_durations"] == {"diffuse": pytest.approx(sum(spans))}
    assert item["stage_durations"]["diffuse"] >= 0.05


def test_omni_stage_durations_count_every_piece_of_a_stage() -> None:
    spans = [("encode", 0.0, 0.25), ("diffuse", 0.5, 1.5), ("diffuse", 2.0, 2.125), ("decode", 3.0, 3.5)]
    segments = [
        SegmentModel(stage=stage, devices=[0], steps=1, start_s=start_s, end_s=end_s) for stage, start_s, end_s in spans
    ]
    timeline = RequestTimeline(
        uid="u-0",
        seed=1,
        status="done",
        eta_s=4.0,
        latency_s=3.5,
        queue_s=0.0,
        slo_s=None,
        on_time=None,
        exact=False,
        segments=segments,
    )
    part = image_part(b"\x00", timeline, "image/webp")
    assert part.stage_durations == {"encode": 0.25, "diffuse": 1.125, "decode": 0.5}
    assert part.image_url.url == "data:image/webp;base64,AA=="


def test_omni_image_back_end(server: Served) -> None:
    """As `async_request_openai_image_generations`; its `extra_body` is spread over the body."""
    payload = {"model": INFO.name, "prompt": "a cat", "n": 1, "size": "64x32", "response_format": "b64_json"}
    payload |= {
        "seed": 4,
        "num_inference_steps": 2,
        "vae_use_tiling": False,
        "generator_device": "cpu",
    }
    answer = server.http.post("/v1/images/generations", json=payload, headers=KEYLESS)
    assert answer.status_code == 200
    assert "peak_memory_mb" not in answer.json().get("usage", {})
    assert Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))).size == (64, 32)
    for name, value in {"true_cfg_scale": 4.0, "vae_use_tiling": True}.items():
        refused = server.http.post("/v1/images/generations", json=payload | {name: value}, headers=KEYLESS)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), "it asks for another picture"


@pytest.mark.parametrize(
    ("body", "param", "remedy"),
    [
        ({"stream": "yes"}, "stream", "true for chunks"),
        ({"extra_body": {"num_frames": 81}}, "num_frames", "single images"),
        ({"extra_body": {"num_frames": 0}}, "num_frames", "give 1"),
        ({"extra_body": {"slo_ms": -1}}, "slo_ms", "above 0"),
        ({"extra_body": {"slo_ms": 5}, "slo_s": 1}, "slo_s", "slo_ms is given as well"),
        ({"slo_ms": 5, "deadline": "2030-01-01T12:00:00Z"}, "deadline", "slo_ms is given as well"),
        ({"slo_ms": 1e12}, "slo_ms", "at most 604800000 milliseconds"),
        ({"extra_body": {"size": "64x64", "width": 64}}, "size", "width or height is given as well"),
        ({"extra_body": {"height": 100}}, "size", '"48x96"'),
        ({"extra_body": {"height": "64px"}}, "height", "an integer"),
        ({"extra_body": [1]}, "extra_body", "an object"),
        ({"extra_body": {"n": 99}}, "n", "1 to 10"),
        ({"priority": "urgent"}, "priority", "standard"),
        ({"messages": []}, "messages", "user"),
        ({"messages": None}, "messages", "messages"),
        ({"messages": [{"role": "system", "content": "be brief"}]}, "messages", "user"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages", "the prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "text"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "x"},
                            {"type": "image_url", "image_url": {"url": "data:x"}},
                        ],
                    }
                ]
            },
            "image",
            "from text alone",
        ),
    ],
    ids=str,
)
def test_omni_chats_that_cannot_be_served(refusing: Served, body: dict[str, Any], param: str, remedy: str) -> None:
    sent = {"messages": [{"role": "user", "content": "x"}], **body}
    answer = refusing.http.post("/v1/chat/completions", json=sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert remedy in error["message"]
    assert refusing.engine.requests == []


def test_omni_chat_without_messages(server: Served) -> None:
    answer = server.http.post("/v1/chat/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_value")


def test_omni_chat_reads_the_texts_of_the_user_only(server: Served) -> None:
    parts = [{"type": "text", "text": "a cat"}, {"type": "text", "text": "on a mat"}]
    messages = [
        {"role": "system", "content": "draw well"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]},
        {"role": "user", "content": "in blue"},
    ]
    assert server.http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert server.engine.specs[0].prompt == "a cat\non a mat\nin blue"


def test_omni_chat_is_admitted_cancelled_and_joined_like_any_call(server: Served) -> None:
    refused = server.engine
    refused.script = [Plan(refuse_s=9)]
    body = {"messages": [{"role": "user", "content": "x"}], "extra_body": {"slo_ms": 10, "on_miss": "reject"}}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "deadline_unreachable")
    answers = [server.http.post("/v1/chat/completions", json=body, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert [one.headers.get("Idempotent-Replayed") for one in answers] == [None, "true"]
    assert answers[0].json() == answers[1].json()
    assert answers[0].json()["id"] == f"chatcmpl-{answers[0].headers['x-request-id']}"
    assert [request.on_miss for request in server.engine.requests] == [OnMiss.REJECT]
    assert server.http.get(f"/v1/requests/{answers[0].headers['x-request-id']}").json()["status"] == "done"
    server.engine.script = [Plan(is_held=True)]
    server.engine.requests.clear()
    payload = json.dumps(body).encode()
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + payload)
        eventually(lambda: server.engine.requests)
    eventually(lambda: list(server.engine.cancelled.values()) == ["the client has disconnected"])


def test_omni_chat_waits_for_the_models() -> None:
    class Loading(FakeEngine):
        @property
        def info(self) -> ModelInfo:  # type: ignore[override]
            raise AttributeError("the engine has not started")

        @info.setter
        def info(self, value: ModelInfo) -> None: ...

    async def ask() -> httpx.Response:
        engine = Loading()
        app = create_app(engine, ServerConfig())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


# SGLang.


def test_sglang_benchmark(server: Served, tmp_path: Path) -> None:
    """`benchmark`: it waits for /health, names its model as /v1/model_info does, in each request, too."""
    assert server.http.get("/health").status_code == 200
    info = server.http.get("/v1/model_info").json()
    model = info["model_path"]
    assert not os.path.exists(model), "no answer names a path of the server"
    payload = {"model": model, "prompt": "a cat", "n": 1, "response_format": "b64_json", "size": "64x32"}
    payload |= {"quality": "auto", "background": "auto", "enable_teacache": False, "diffusers_kwargs": {}}
    answer = server.http.post("/v1/images/generations", json=payload)
    assert answer.status_code == 200
    assert "peak_memory_mb" not in answer.json()
    assert answer.json()["data"][0]["b64_json"]
    assert server.http.get(f"/v1/models/{model}").json()["id"] == INFO.name


@pytest.mark.slow
def test_sglang_model_without_a_path_goes_by_its_name(simulated_url: str) -> None:
    name = httpx.get(f"{simulated_url}/v1/models").json()["data"][0]["id"]
    assert httpx.get(f"{simulated_url}/v1/model_info").json() == {"model_path": name}
    answer = httpx.post(f"{simulated_url}/v1/images/generations", json={"prompt": "x", "model": "nowhere/" + name})
    assert answer.status_code == 404


# OpenAI's library.


@pytest.mark.slow
def test_openai_user_is_in_the_log(modelled: Modelled) -> None:
    client = openai.OpenAI(base_url=f"{modelled.url}/v1", api_key="EMPTY", max_retries=0)
    call = client.images.with_raw_response.generate(prompt="secret wish", user="anna\n7", size="256x256")
    uid = call.headers["x-request-id"]
    eventually(lambda: uid in modelled.log.read_text())
    line = next(line for line in modelled.log.read_text().splitlines() if uid in line)
    assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z INFO tilework\.server\.calls: call uid=", line)
    assert line.endswith(r'user="anna\n7"')
    assert "secret wish" not in modelled.log.read_text()


def test_openai_images(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)
    answer = client.images.generate(
        prompt="a cat", model=INFO.name, n=2, size="64x32", extra_body={"seed": 5}, user="u"
    )
    assert answer.data is not None
    colours = [Image.open(io.BytesIO(base64.b64decode(one.b64_json or ""))).getpixel((0, 0)) for one in answer.data]
    assert colours == [(5, 0, 0), (6, 0, 0)]


def test_openai_async_images(server: Served) -> None:
    server.engine.plan = Plan(delay_s=0.05)

    async def three() -> list[int | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
            calls = [client.images.generate(prompt="x", extra_body={"seed": seed}) for seed in (1, 2, 3)]
            answers = await asyncio.gather(*calls)
        return [answer.data[0].model_extra["tilework"]["seed"] for answer in answers]  # type: ignore[index]

    assert asyncio.run(three()) == [1, 2, 3]


def test_openai_stream(server: Served) -> None:
    """Each step is let go only after the picture of the one before was read."""
    server.engine.script = [Plan(is_held=True)]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)
    stepper = threading.Thread(target=_step, args=(server, seen := threading.Semaphore(0)))
    stepper.start()
    events = client.images.generate(
        prompt="x", stream=True, partial_images=1, extra_body={"num_inference_steps": 4, "seed": 8}
    )
    kinds = []
    for event in events:
        kinds.append(event.type)
        seen.release()
    stepper.join(PATIENCE_S)
    assert kinds == ["image_generation.partial_image", "image_generation.completed"]
    assert Image.open(io.BytesIO(base64.b64decode(event.b64_json))).getpixel((0, 0)) == (8, 0, 0)


def _step(server: Served, seen: threading.Semaphore) -> None:
    eventually(lambda: server.engine.tickets)
    uid = next(iter(server.engine.tickets))
    server.on_loop(server.engine.begin, uid)
    server.on_loop(server.engine.step, uid, 2)
    assert seen.acquire(timeout=PATIENCE_S)
    server.on_loop(server.engine.finish, uid)


def test_openai_chat_spreads_the_extra_body(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)
    answer = client.chat.completions.create(
        model=INFO.name,
        messages=[{"role": "user", "content": "a cat"}],
        seed=3,
        extra_body={"size": "64x32", "num_inference_steps": 2, "priority": "interactive", "slo_s": 30},
    )
    content: Any = answer.choices[0].message.content
    assert picture(content[0]["image_url"]["url"]).getpixel((0, 0)) == (3, 0, 0)
    assert (answer.object, answer.usage and answer.usage.total_tokens) == ("chat.completion", 0)
    assert (server.engine.specs[0].steps, server.engine.requests[0].priority) == (2, "interactive")


def test_openai_chat_errors_are_their_exceptions(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="Chats have no such field"):
        client.chat.completions.create(
            model=INFO.name, messages=[{"role": "user", "content": "x"}], extra_body={"preview_every": 1}
        )
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "x"}])


# Open WebUI.


def test_open_webui(server: Served) -> None:
    """Its image engine "openai" (`routers/images.py`), and what its chats pass on to a model (`routers/openai.py`)."""
    payload = {"model": "", "prompt": "a cat", "n": 1, "size": "64x32", "response_format": "b64_json"}
    answer = server.http.post("/v1/images/generations", json=payload | {"model": INFO.name}, headers=KEYLESS)
    assert answer.json()["data"][0]["b64_json"]
    chat = {
        "model": INFO.name,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a cat"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "max_tokens": 128,
        "session_id": "s",
        "chat_id": "c",
    }
    answer = server.http.post("/v1/chat/completions", json=chat, headers=KEYLESS)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.text.rstrip().endswith("data: [DONE]")
    last = json.loads(answer.text.rstrip().splitlines()[-3][6:])
    (served,) = last["tilework"]
    assert [one.partition('"')[2].partition('"')[0] for one in served["warnings"]] == ["session_id", "chat_id"]
    assert server.engine.specs[-1].prompt == "a cat"
