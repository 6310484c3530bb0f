"""The HTTP API over a real socket, driven by OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from PIL import Image

from fake_engine import INFO, FakeEngine, Plan, Served, serving
from tilework.core.request import RefusalCode, Shape
from tilework.server.http.connection import unless_gone
from tilework.server.schema import answers, live, plan, video_answers
from waiting import eventually

KEY = "tw-test-key"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine()) as served:
        yield served


@pytest.fixture(autouse=True)
def _unprogrammed(server: Served) -> None:
    server.engine.plan = Plan()
    server.engine.script.clear()
    server.engine.devices_up = 2
    server.engine.draining = False
    for seen in (server.engine.specs, server.engine.requests, server.engine.cancelled):
        seen.clear()


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)


def picture(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


# What a good call gives.


def test_openai_client_gets_an_image_and_its_timeline(server: Served, client: openai.OpenAI) -> None:
    before_s = int(time.time())
    answer = client.images.generate(
        prompt="a red square",
        size="64x32",  # type: ignore[call-overload]
        extra_body={
            "seed": 200,
            "num_inference_steps": 3,
            "guidance_scale": 2,
            "negative_prompt": "blue",
            "slo_s": 5,
        },
    )
    assert before_s <= answer.created <= time.time()
    image = picture(base64.b64decode(answer.data[0].b64_json))
    assert (image.format, image.size, image.getpixel((0, 0))) == ("PNG", (64, 32), (200, 0, 0))
    assert (answer.size, answer.output_format) == ("64x32", "png")
    timeline = answer.data[0].tilework
    assert timeline["seed"] == 200
    assert timeline["status"] == "done"
    assert timeline["eta_s"] == 0.25
    assert timeline["slo_s"] == 5
    assert timeline["on_time"] is True
    assert 0 <= timeline["latency_s"] < 5
    assert timeline["queue_s"] == 0
    (segment,) = timeline["segments"]
    assert (segment["stage"], segment["devices"], segment["steps"]) == ("diffuse", [0, 1], 3)
    assert 0 == segment["start_s"] <= segment["end_s"] <= timeline["latency_s"]
    (spec,) = server.engine.specs
    assert (spec.prompt, spec.negative_prompt, spec.steps, spec.guidance_scale) == ("a red square", "blue", 3, 2.0)


def test_defaults_are_the_models(server: Served, client: openai.OpenAI) -> None:
    answer = client.images.generate(prompt="x", size="auto", model=INFO.name)
    (spec,) = server.engine.specs
    assert (spec.width, spec.height, spec.steps, spec.guidance_scale) == (48, 64, 4, 4.5)
    assert answer.size == "48x64"
    assert server.engine.requests[0].deadline_ns is None
    assert answer.data[0].tilework["on_time"] is None
    assert answer.data[0].tilework["slo_s"] is None


def test_null_means_absent(server: Served) -> None:
    names = ("model", "n", "size", "response_format", "output_format", "output_compression", "user", "stream", "seed")
    ours = ("num_inference_steps", "guidance_scale", "negative_prompt", "slo_s", "on_miss")
    answer = server.post({"prompt": "x", **dict.fromkeys((*names, *ours))})
    assert answer.status_code == 200
    assert len(answer.json()["data"]) == 1


def test_images_of_one_call_have_consecutive_seeds_and_one_deadline(server: Served, client: openai.OpenAI) -> None:
    answer = client.images.generate(prompt="x", n=3, extra_body={"seed": 10, "slo_s": 2.5, "on_miss": "reject"})
    reds = [picture(base64.b64decode(item.b64_json)).getpixel((0, 0))[0] for item in answer.data]
    assert reds == [10, 11, 12]
    assert [item.tilework["seed"] for item in answer.data] == [10, 11, 12]
    assert len({item.tilework["uid"] for item in answer.data}) == 3
    requests = server.engine.requests
    assert len({request.deadline_ns for request in requests}) == 1
    assert 0 <= requests[0].arrival_ns + 2_500_000_000 - requests[0].deadline_ns < 50_000_000
    assert {request.on_miss for request in requests} == {"reject"}


def test_seed_is_chosen_and_reported(server: Served, client: openai.OpenAI) -> None:
    seeds = [client.images.generate(prompt="x").data[0].tilework["seed"] for _ in range(4)]
    assert seeds == [spec.seed for spec in server.engine.specs]
    assert len(set(seeds)) > 1


def test_late_image_says_so(server: Served, client: openai.OpenAI) -> None:
    server.engine.plan = Plan(delay_s=0.05)
    late = 'tilework_deadlines_total{class="standard",result="late",size="48x64"}'
    answer = client.images.generate(prompt="x", extra_body={"slo_s": 0.01})
    assert answer.data[0].tilework["on_time"] is False
    assert server.metric(late) == 1


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_url_serves_the_file_in_its_format(server: Served, client: openai.OpenAI, output_format: str) -> None:
    answer = client.images.generate(
        prompt="x",
        response_format="url",
        output_format=output_format,  # type: ignore[arg-type]
        extra_body={"seed": 90},
    )
    url = answer.data[0].url
    assert url is not None
    assert url.startswith(server.url)
    assert answer.data[0].b64_json is None
    file = httpx.get(url)
    assert file.headers["content-type"] == f"image/{output_format}"
    image = picture(file.content)
    assert image.format == output_format.upper()
    assert abs(image.convert("RGB").getpixel((9, 9))[0] - 90) < 6
    bare = httpx.head(url)
    assert (bare.status_code, bare.content, bare.headers["content-length"]) == (200, b"", str(len(file.content)))


def test_compression_sets_the_quality(server: Served) -> None:
    sizes = []
    for quality in (0, 100):
        body = {"prompt": "x", "size": "512x512", "output_format": "jpeg", "output_compression": quality}
        sizes.append(len(server.post(body).json()["data"][0]["b64_json"]))
    assert sizes[0] != sizes[1]


def test_async_client_overlaps_its_calls(server: Served) -> None:
    server.engine.plan = Plan(is_held=True)

    async def four() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            calls = [client.images.generate(prompt="x", extra_body={"seed": seed}) for seed in range(4)]
            return [answer.data[0].tilework["seed"] for answer in await asyncio.gather(*calls)]

    def finish_when_all_have_come() -> None:
        eventually(lambda: len(server.engine.requests) == 4)
        for request in list(server.engine.requests):
            server.on_loop(server.engine.finish, request.uid)

    finisher = threading.Thread(target=finish_when_all_have_come)
    finisher.start()
    assert asyncio.run(four()) == [0, 1, 2, 3]
    finisher.join()


def test_a_model_names_the_sizes_that_it_has_not_measured_yet() -> None:
    with serving(FakeEngine(predicted=(Shape(64, 64), Shape(128, 128, 17))), drain_s=0) as server:
        (card,) = server.http.get("/v1/models").json()["data"]
        assert card["tilework"]["predicted_sizes"] == ["64x64", "128x128x17"]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [INFO.name]
    assert client.models.retrieve(INFO.name).owned_by == "tilework"
    card = client.models.retrieve(INFO.name).model_extra
    assert card is not None
    assert (card["tilework"]["policy"], card["tilework"]["default_size"]) == ("edf", "48x64")
    with pytest.raises(openai.NotFoundError, match=INFO.name):
        client.models.retrieve("black-forest/other")


def test_docs_show_the_request_and_an_example(server: Served) -> None:
    page = server.http.get("/docs")
    assert page.status_code == 200
    assert "//" not in re.sub(r"^\s*//.*$", "", page.text, flags=re.M), "it loads nothing from elsewhere"
    for asset in re.findall(r'(?:src|href)="(.*?)"', page.text):
        media_type = {"css": "text/css", "png": "image/png", "js": "text/javascript"}[asset.rpartition(".")[2]]
        assert server.http.get(asset).raise_for_status().headers["content-type"].startswith(media_type), asset
    post = server.http.get("/openapi.json").json()["paths"]["/v1/images/generations"]["post"]
    content = post["requestBody"]["content"]["application/json"]
    assert content["schema"]["required"] == ["prompt"]
    assert {"prompt", "slo_s", "on_miss"} <= content["schema"]["properties"].keys()
    assert server.post(content["schema"]["examples"][0]).status_code == 200


def test_docs_have_an_example_of_every_answer_that_is_true_to_its_schema(server: Served) -> None:
    documented = server.http.get("/openapi.json").json()
    shapes = {**vars(answers), **vars(live), **vars(plan), **vars(video_answers)}.values()
    models = {model.__name__: model for model in shapes if isinstance(model, type)}
    num_checked = 0
    for path, methods in documented["paths"].items():
        for method, operation in methods.items():
            assert "500" in operation["responses"], (path, method)
            for status, answer in operation["responses"].items():
                assert answer["description"], (path, status)
                for media_type, content in answer["content"].items():
                    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
                    examples = [content["example"]] if "example" in content else []
                    examples += documented["components"]["schemas"].get(name, {}).get("examples", [])
                    assert examples, (path, status, media_type)
                    if name:
                        for example in examples:
                            models[name].model_validate(example)
                        num_checked += 1
                    else:
                        assert media_type != "application/json", (path, status)
    assert num_checked > 50
    assert "HTTPValidationError" not in str(documented)


# Refusals and failures.


def test_unreachable_deadline_is_not_retried_and_says_what_can_be_met(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=3)
    server.engine.script = [Plan(refuse_s=3.2504)]
    with pytest.raises(openai.RateLimitError) as caught:
        client.images.generate(prompt="x", extra_body={"slo_s": 1, "on_miss": "reject"})
    assert caught.value.code == "deadline_unreachable"
    assert caught.value.response.headers["retry-after"] == "3"
    error = caught.value.body
    assert isinstance(error, dict)
    assert 3.2504 <= error["earliest_s"] < 3.3
    assert caught.value.response.json() == {"error": error}
    assert "too much is ahead" in error["message"]
    assert "best_effort" in error["message"]
    assert server.engine.script == []
    assert server.engine.specs == [], "the client must not have tried again"


def test_one_refusal_refuses_all_of_the_call(server: Served, client: openai.OpenAI) -> None:
    server.engine.script = [Plan(delay_s=60), Plan(delay_s=60), Plan(refuse_s=9)]
    rejected = 'tilework_requests_total{class="standard",outcome="rejected"}'
    before = server.metric(rejected)
    with pytest.raises(openai.RateLimitError):
        client.images.generate(prompt="x", n=4, extra_body={"slo_s": 1, "on_miss": "reject"})
    assert server.engine.requests == []
    assert server.metric(rejected) == before + 4


def test_one_failure_fails_the_call_and_cancels_the_rest(server: Served, client: openai.OpenAI) -> None:
    server.engine.script = [Plan(delay_s=60), Plan(delay_s=0.02, fail="device 1 ran out of memory"), Plan()]
    with pytest.raises(openai.InternalServerError, match="device 1 ran out of memory") as caught:
        client.images.generate(prompt="x", n=3)
    assert caught.value.type == "server_error"
    assert list(server.engine.cancelled) == [server.engine.requests[0].uid]


def test_a_deadline_that_is_too_short_alone_is_not_worth_a_retry(server: Served) -> None:
    server.engine.script = [Plan(refuse_s=3.25)]
    with pytest.raises(openai.BadRequestError) as caught:
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=3).images.generate(
            prompt="x", extra_body={"slo_s": 1, "on_miss": "drop"}
        )
    assert (caught.value.code, caught.value.param) == ("deadline_unreachable", "slo_s")
    message = "slo_s = 1.0 is not accepted. It cannot be met: too much is ahead. Use slo_s = 3.25"
    error = caught.value.response.json()["error"]
    assert error["message"].startswith(message)
    assert (error["uid"].rpartition("-")[2], error["slo_s"], error["slo_source"]) == ("0", 1.0, "request")
    assert "retry-after" not in caught.value.response.headers
    assert server.engine.specs == []


def test_a_dropped_call_ends_with_its_reason_and_is_not_sent_again(server: Served) -> None:
    server.engine.script = [Plan(expire="it would finish 0.42 s late"), Plan()]
    with pytest.raises(openai.InternalServerError, match=r"0.42 s late") as caught:
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=3).images.generate(
            prompt="x", extra_body={"slo_s": 1, "on_miss": "drop"}
        )
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_missed")
    (request,) = server.engine.requests
    assert request.on_miss == "drop"
    status = server.http.get(f"/v1/requests/{request.uid.rpartition('-')[0]}").json()
    assert (status["status"], status["error"]["code"]) == ("failed", "deadline_missed")
    assert [(image["state"], image["reason"]) for image in status["images"]] == [
        ("failed", "it would finish 0.42 s late")
    ]


def test_bug_is_logged_and_not_shown(server: Served, client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    server.engine.script = [Plan(delay_s=60), Plan(bug=RuntimeError("the password is swordfish"))]
    with pytest.raises(openai.InternalServerError) as caught:
        client.images.generate(prompt="x", n=2)
    assert "swordfish" not in caught.value.response.text
    assert caught.value.code == "internal_error"
    assert "swordfish" in caplog.text
    assert "Traceback" in caplog.text
    assert server.engine.requests == []


def test_bug_in_encoding_is_a_500_too(server: Served, client: openai.OpenAI) -> None:
    server.engine.script = [Plan(num_bytes_short=1)]
    with pytest.raises(openai.InternalServerError) as caught:
        client.images.generate(prompt="x")
    assert caught.value.code == "internal_error"


def test_not_ready_is_503_with_a_reason(server: Served) -> None:
    server.engine.devices_up = 0
    for answer in (server.post({"prompt": "x"}), server.http.get("/ready"), server.http.get("/v1/models")):
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "none of its 2 devices is up" in answer.json()["error"]["message"]
    assert server.http.get("/health").status_code == 200
    server.engine.devices_up, server.engine.draining = 2, True
    answer = server.http.get("/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert "stopping" in answer.json()["error"]["message"]
    server.engine.draining = False
    assert server.http.get("/ready").json() == {
        "status": "ready",
        "devices_up": 2,
        "devices": 2,
        "open_requests": 0,
        "restored_requests": 0,
        "waiting_results": 0,
        "unwritten_s": 0.0,
    }


def test_refusal_without_a_device_is_503(server: Served) -> None:
    server.engine.script = [Plan(code=RefusalCode.NO_DEVICE)]
    answer = server.post({"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


# Clients that go away.


def raw_call(server: Served, body: dict[str, object]) -> socket.socket:
    """Send a call over a bare keep-alive connection and return it with the answer pending."""
    parts = urlsplit(server.url)
    connection = socket.create_connection((parts.hostname, parts.port))
    payload = json.dumps(body).encode()
    connection.sendall(head(len(payload)) + payload)
    return connection


def head(length: int) -> bytes:
    line = "POST /v1/images/generations HTTP/1.1"
    return f"{line}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


def test_disconnect_cancels_every_image_and_leaves_nothing(server: Served) -> None:
    server.engine.plan = Plan(delay_s=60)
    tasks = server.tasks()
    cancelled = 'tilework_requests_total{class="standard",outcome="cancelled"}'
    before = server.metric(cancelled)
    connection = raw_call(server, {"prompt": "x", "n": 2})
    eventually(lambda: len(server.engine.requests) == 2)
    assert server.metric('tilework_jobs_running{class="standard"}') == 2
    connection.close()
    eventually(lambda: len(server.engine.cancelled) == 2)
    assert set(server.engine.cancelled.values()) == {"the client has disconnected"}
    eventually(lambda: tasks.issuperset(server.tasks()))
    assert server.metric(cancelled) == before + 2
    assert server.metric('tilework_jobs_running{class="standard"}') == 0


def test_waiting_leaves_no_task_behind() -> None:
    """uvicorn wakes the watcher once the answer is sent; not every server does."""

    async def waited() -> set[asyncio.Task[None]]:
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        end.set_result(None)
        assert await unless_gone(asyncio.Event().wait, end)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[return-value]

    assert asyncio.run(waited()) == set()


def test_connection_is_kept_and_the_second_call_is_watched_too(server: Served) -> None:
    connection = raw_call(server, {"prompt": "x"})
    received = b""
    while b"x-request-id" not in received or not received.endswith(b"}"):
        received += connection.recv(65536)
    server.engine.plan = Plan(delay_s=60)
    payload = b'{"prompt": "y"}'
    connection.sendall(head(len(payload)) + payload)
    eventually(lambda: len(server.engine.requests) == 2)
    connection.close()
    eventually(lambda: list(server.engine.cancelled) == [server.engine.requests[1].uid])


def test_disconnect_amid_the_body_is_quiet(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    parts = urlsplit(server.url)
    tasks = server.tasks()
    connection = socket.create_connection((parts.hostname, parts.port))
    connection.sendall(head(99) + b"{")
    eventually(lambda: server.tasks() - tasks)  # The server reads the body.
    connection.close()
    eventually(lambda: tasks.issuperset(server.tasks()))
    assert server.post({"prompt": "x"}).status_code == 200
    assert "Traceback" not in caplog.text


# What the server says of itself.


def test_no_answer_names_a_path_of_the_server(tmp_path: Path) -> None:
    engine = FakeEngine(info=replace(INFO, path=str(tmp_path)))
    with serving(engine, drain_s=0) as server:
        uid = server.post({"prompt": "x"}).headers["x-request-id"]
        paths = server.http.get("/openapi.json").json()["paths"]
        routes = [path for path, methods in paths.items() if "get" in methods]
        assert len(routes) > 9
        for route in ["/openapi.json", "/docs", "/v1/models/other", *routes]:
            answer = server.http.get(route.format(uid=uid, video_id=uid, model_id=INFO.name))
            assert str(tmp_path).encode() not in answer.content, route


# Metrics.


def test_metrics_parse_and_move(server: Served) -> None:
    lines = (
        'tilework_requests_total{class="standard",outcome="done"}',
        "tilework_invalid_calls_total",
        'tilework_request_latency_seconds_count{class="standard"}',
        'tilework_request_queue_seconds_count{class="standard"}',
        'tilework_slack_seconds_count{class="standard",size="48x64"}',
    )
    server.post({"prompt": "x", "slo_s": 60})  # The last one shows nothing until there is such an image.
    before = [server.metric(line) for line in lines]
    server.post({"prompt": "x", "n": 2, "num_inference_steps": 7, "slo_s": 60})
    server.post({"prompt": "x", "n": 0})
    after = [server.metric(line) for line in lines]
    assert [late - early for early, late in zip(before, after, strict=True)] == [2, 1, 2, 2, 2]
    assert server.metric("tilework_devices_up") == 2


def test_store_bytes_are_reported(server: Served) -> None:
    before = server.metric("tilework_store_bytes")
    url = server.post({"prompt": "x", "response_format": "url"}).json()["data"][0]["url"]
    assert server.metric("tilework_store_bytes") == before + len(httpx.get(url).content)


# Settings.


def test_results_end_with_their_time_and_their_room(server: Served) -> None:
    ask = {"prompt": "x", "response_format": "url"}
    with serving(FakeEngine(), result_ttl_s=600) as brief:
        url = brief.post(ask).json()["data"][0]["url"]
        brief.skip(500)
        assert httpx.get(url).status_code == 200
        brief.skip(200)
        assert httpx.get(url).status_code == 410
        assert httpx.get(url).json()["error"]["code"] in ("result_expired", "request_not_found")
    size = len(httpx.get(server.post(ask).json()["data"][0]["url"]).content)
    with serving(FakeEngine(), result_bytes=size * 3 // 2) as small:
        urls = [small.post({**ask, "seed": seed}).json()["data"][0]["url"] for seed in (1, 2)]
        assert [httpx.get(url).status_code for url in urls] == [410, 200]
        answer = small.post({**ask, "size": "512x512"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "result_too_large")


def test_key_is_required_except_by_probes() -> None:
    with serving(FakeEngine(), api_key=f"other,{KEY}", public_url="https://images.example.org/") as locked:
        for path in ("/v1/models", "/metrics", "/docs", "/v1/images/x/content", "/nowhere"):
            answer = locked.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        assert locked.http.get("/health").status_code == 200
        assert locked.http.get("/ready").status_code == 200
        for wrong in ("", "Basic " + KEY, "Bearer", "Bearer " + KEY[:-1], "Bearer " + KEY + "x", KEY, "Bearer é"):
            headers = {"Authorization": wrong.encode()}
            assert locked.post({"prompt": "x"}, headers=headers).status_code == 401, wrong
        with pytest.raises(openai.AuthenticationError, match="Bearer"):
            openai.OpenAI(base_url=f"{locked.url}/v1", api_key="guess").images.generate(prompt="x")
        assert locked.engine.requests == []
        client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEY, max_retries=0)
        url = client.images.generate(prompt="x", response_format="url").data[0].url
        assert re.fullmatch(r"https://images\.example\.org/v1/images/[0-9a-f]{32}-0/content", url or "")
