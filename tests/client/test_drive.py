"""The load client against a small server in this process that does as it is told by the prompt."""

import asyncio
import base64
import contextlib
import cProfile
import json
import re
import socket
import threading

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

import clock
from tilework.client import drive as pool
from tilework.client.dialect import Dialect
from tilework.client.drive import drive
from tilework.client.record import CallEnd
from tilework.core.lora import UsedLora
from tilework.core.request import OnMiss
from tilework.formats.workload import WorkloadRequest
from waiting import PATIENCE_S, eventually, until

TIMELINE = {"uid": "u-1", "eta_s": 0.2, "on_time": True, "segments": []}
seen: list[tuple[dict, dict]] = []
busy = {"now": 0, "peak": 0}
held: set[str] = set()  # Prompts that are not answered until a test takes them out.
ports: set[int] = set()


async def answer(request: Request):
    body = await request.json()
    ports.add(request.client.port)
    seen.append((body, dict(request.headers)))
    busy["now"] += 1
    busy["peak"] = max(busy["peak"], busy["now"])
    await until(lambda: body["prompt"] not in held)
    busy["now"] -= 1
    picture = {"b64_json": base64.b64encode(b"png").decode()}
    match body["prompt"].split()[0]:
        case "draw":
            return {"data": [picture | {"tilework": TIMELINE}]}
        case "plain":
            return {"data": [picture]}
        case "elsewhere":
            error = {"message": "another has room", "code": "queue_full", "type": "x", "param": None}
            link = f'<{body["prompt"].split()[1]}>; rel="alternate"'
            return JSONResponse({"error": error}, 429, {"Link": link})
        case "refuse":
            error = {"message": "earliest is 9 s", "code": "deadline_unreachable", "type": "x", "param": "slo_s"}
            return JSONResponse({"error": error}, 429)
        case "fail":
            return PlainTextResponse("oops", 500)
        case "bare":
            return {"data": [{"url": "http://elsewhere"}]}


async def accept(request: Request):
    seen.append((await request.json(), dict(request.headers)))
    return {"data": [{"b64_json": base64.b64encode(b"elsewhere").decode()}]}


async def answer_video(request: Request):
    body = await request.json()
    seen.append((body, dict(request.headers)))
    match body["prompt"].split()[0]:
        case "refuse":
            return JSONResponse({"error": {"message": "earliest is 9 s", "code": "deadline_unreachable"}}, 429)
        case "draw":
            return Response(b"mp4", media_type="video/mp4", headers={"x-request-id": "v-1"})
        case "plain":
            return Response(b"mp4", media_type="video/mp4")
        case "bare":
            return Response(b"{}", media_type="application/json")


async def video(video_id: str):
    return {"id": video_id, "tilework": {"timeline": TIMELINE}}


@pytest.fixture(scope="module")
def server():
    app = FastAPI()
    app.post("/v1/videos/sync")(answer_video)
    app.get("/v1/videos/{video_id}")(video)
    app.post("/v1/images/generations")(answer)
    app.post("/accepts")(accept)
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level=None))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    eventually(lambda: running.started)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join(PATIENCE_S)


@pytest.fixture(autouse=True)
def fresh():
    seen.clear()
    ports.clear()
    held.clear()
    busy.update(now=0, peak=0)


def request(prompt, arrival_s=0.0, **values):
    size = {"pipeline": "shapes", "height": 64, "width": 96, "steps": 5}
    return WorkloadRequest(arrival_s=arrival_s, prompt=prompt, **(size | values))


def test_every_ending_is_distinguished(server):
    kinds = ["draw", "plain", "refuse", "fail", "bare"]
    told = []
    workload = [request(f"{kind} 0", slo_s=5.0) for kind in kinds]
    records = asyncio.run(drive(server, workload, on_result=told.append))
    endings = [CallEnd.DONE, CallEnd.DONE, CallEnd.REJECTED, CallEnd.FAILED, CallEnd.ERROR]
    assert [record.status for record in records] == endings
    assert [record.timeline for record in records] == [TIMELINE, None, None, None, None]
    assert [record.file for record in records] == [b"png", b"png", None, None, None]
    assert [record.on_time for record in records] == [True, True, False, False, False]
    assert "deadline_unreachable: earliest is 9 s" in records[2].detail
    assert records[3].detail == "HTTP 500"
    assert [record.cause for record in records] == ["", "", "http 429", "http 500", "answer"]
    assert sorted(record.index for record in told) == [0, 1, 2, 3, 4]


def test_the_client_sends_the_workload(server):
    full = request(
        "draw 0", seed=7, slo_s=4.0, on_miss=OnMiss.REJECT, tenant="t", exact=True, loras=(UsedLora("ink", 0.5),)
    )
    asyncio.run(drive(f"{server}/v1/", [full], api_key="secret"))
    body, headers = seen.pop()
    assert headers["authorization"] == "Bearer secret"
    assert body == {
        "model": "shapes",
        "prompt": "draw 0",
        "n": 1,
        "size": "96x64",
        "num_inference_steps": 5,
        "response_format": "b64_json",
        "seed": 7,
        "slo_s": 4.0,
        "on_miss": "reject",
        "user": "t",
        "exact": True,
        "lora": [{"name": "ink", "scale": 0.5}],
    }
    asyncio.run(drive(server, [request("draw 0")], dialect=Dialect(model="other")))
    assert seen[0][0]["model"] == "other"
    assert not {"seed", "slo_s", "on_miss", "user", "exact", "lora"} & seen[0][0].keys()


def test_a_refusal_that_names_another_server_is_followed_so_many_times(server):
    workload = [request("elsewhere /accepts"), request("elsewhere /v1/images/generations"), request("elsewhere x://y")]
    records = asyncio.run(drive(server, workload, max_hops=2, api_key="secret"))
    assert [record.status for record in records] == [CallEnd.DONE, CallEnd.REJECTED, CallEnd.ERROR]
    assert [record.num_hops for record in records] == [1, 2, 0]
    assert records[0].file == b"elsewhere"
    assert [headers["authorization"] for _body, headers in seen] == ["Bearer secret"] * 6
    (record,) = asyncio.run(drive(server, workload[:1]))
    assert (record.status, record.num_hops) == (CallEnd.REJECTED, 0)


def test_clips_are_asked_for_as_files_and_their_timelines_after_them(server):
    workload = [request(f"{kind} 0", frames=17) for kind in ("draw", "plain", "refuse", "bare")]
    records = asyncio.run(drive(server, workload))
    assert [record.status for record in records] == [CallEnd.DONE, CallEnd.DONE, CallEnd.REJECTED, CallEnd.ERROR]
    assert [record.file for record in records] == [b"mp4", b"mp4", None, None]
    assert [record.timeline for record in records] == [TIMELINE, None, None, None]
    assert "holds no video, but application/json" in records[3].detail
    body = next(body for body, _headers in seen if body["prompt"] == "draw 0")
    assert body == {
        "model": "shapes",
        "prompt": "draw 0",
        "size": "96x64",
        "num_frames": 17,
        "num_inference_steps": 5,
    }
    (dropped,) = asyncio.run(drive(server, [request("draw 0", frames=17)], keep_files=False))
    assert (dropped.status, dropped.file, dropped.timeline) == (CallEnd.DONE, None, TIMELINE)


def test_the_loop_is_open_and_arrivals_keep_their_times(server):
    """Thirty requests, none of which is answered before all are in flight, each sent at its arrival and not before."""
    workload = [request("draw held", arrival_s=0.01 * i) for i in reversed(range(30))]
    held.add("draw held")

    async def scenario(loop):
        driving = asyncio.create_task(drive(server, workload))
        await loop.until(lambda: len(seen) == 1)
        for count in range(2, 31):
            loop.advance(0.01)
            await loop.until(lambda count=count: len(seen) >= count)
            assert len(seen) == count
        held.clear()
        return await driving

    records = clock.run(scenario)
    assert busy["peak"] == 30
    assert [record.index for record in records] == list(range(30))
    assert all(record.on_time is None for record in records)


def test_latency_counts_from_the_planned_arrival(server):
    """A client that is held up for 0.4 s past the planned arrival must not hide it."""

    async def late(loop):
        driving = asyncio.create_task(drive(server, [request("draw 0", arrival_s=0.2, slo_s=0.3)]))
        await asyncio.sleep(0)
        loop.advance(0.6)
        return await driving

    (record,) = clock.run(late)
    assert record.status is CallEnd.DONE
    assert record.latency_s == pytest.approx(0.4)
    assert record.on_time is False


def test_the_lag_of_the_client_is_reported_beside_the_latency(server):
    done = []

    async def held_up(loop):
        workload = [request("draw 0", arrival_s=arrival_s) for arrival_s in (0.2, 1.0)]
        driving = asyncio.create_task(drive(server, workload, on_result=done.append))
        await asyncio.sleep(0)
        loop.advance(0.6)
        await loop.until(lambda: len(done) == 1)
        loop.advance(0.4)
        return await driving

    late, punctual = clock.run(held_up)
    assert late.lag_s == late.latency_s == pytest.approx(0.4)
    assert punctual.lag_s == 0


def test_a_connection_serves_one_request_after_the_other(server, monkeypatch):
    """Requests of which each comes after the answer to the former use one connection; at once, each has its own."""
    done = []
    monkeypatch.setattr(pool, "_ONE", httpx.Limits(max_connections=1))  # None is closed after a while.

    async def one_by_one(loop):
        workload = [request("draw 0", arrival_s=0.05 * i) for i in range(20)]
        driving = asyncio.create_task(drive(server, workload, on_result=done.append))
        for count in range(1, 20):
            await loop.until(lambda count=count: len(done) == count)
            loop.advance(0.05)
        return await driving

    records = clock.run(one_by_one)
    assert {record.status for record in records} == {CallEnd.DONE}
    assert len(ports) == 1
    ports.clear()
    held.add("draw held")

    async def answered_when_all_are_there(loop):
        await loop.until(lambda: busy["now"] == 20)
        held.clear()

    async def at_once(loop):
        workload = [request("draw held") for _ in range(20)]
        records, _ = await asyncio.gather(drive(server, workload), answered_when_all_are_there(loop))
        return records

    assert len(clock.run(at_once)) == 20
    assert len(ports) == 20


def test_a_request_costs_the_same_with_few_and_with_many_open_connections():
    """Calls of functions for 20 requests, with the server's, beside 25 and beside 250 that are in flight.

    httpx's own pool walks over all connections, idle ones with a system call each.
    """
    body = json.dumps({"data": [{"b64_json": base64.b64encode(b"png").decode()}]}).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    def num_calls(num_held):
        waiting, all_wait, may_go, done = [], asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def serve(reader, writer):
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    asked = await reader.readexactly(int(re.search(rb"content-length: (\d+)", head.lower())[1]))
                    if b"held" in asked:
                        waiting.append(writer)
                        if len(waiting) == num_held:
                            all_wait.set()
                        await may_go.wait()
                    writer.write(answer)

        async def scenario(loop):
            ended = []

            def note(record):
                ended.append(record)
                if len(ended) == 20:
                    done.set()

            server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            workload = [*[request("draw held")] * num_held, *[request("draw", arrival_s=1.0)] * 20]
            driving = asyncio.create_task(drive(url, workload, on_result=note))
            await all_wait.wait()
            with cProfile.Profile() as profile:
                loop.advance(1.0)
                await done.wait()
            may_go.set()
            assert {record.status for record in await driving} == {CallEnd.DONE}
            server.close()
            return sum(one.callcount for one in profile.getstats())

        return clock.run(scenario)

    assert num_calls(250) < 1.5 * num_calls(25)


def test_waiting_ends_at_the_timeout_counted_from_the_planned_arrival(server):
    workload = [request("draw held", slo_s=9.0), request("draw 0", arrival_s=0.1, slo_s=9.0), request("draw 0")]
    held.add("draw held")
    done = []

    async def scenario(loop):
        driving = asyncio.create_task(drive(server, workload, timeout_s=0.5, on_result=done.append))
        await loop.until(lambda: len(done) == 1)
        loop.advance(0.1)
        await loop.until(lambda: len(done) == 2)
        loop.advance(0.4)
        return await driving

    slow, fast, other = clock.run(scenario)
    assert (slow.status, slow.cause, slow.on_time) == (CallEnd.ERROR, "timeout", False)
    assert "no answer within 0.5 s" in slow.detail
    assert slow.latency_s == pytest.approx(0.5)
    assert fast.status is other.status is CallEnd.DONE


def test_pictures_are_dropped_on_request_and_urls_are_taken_where_they_were_asked_for(server):
    (record,) = asyncio.run(drive(server, [request("draw 0")], keep_files=False))
    assert (record.status, record.file, record.timeline) == (CallEnd.DONE, None, TIMELINE)
    (bare,) = asyncio.run(drive(server, [request("bare 0")], dialect=Dialect(response_format="url")))
    assert (bare.status, bare.file) == (CallEnd.DONE, None)
    assert seen[-1][0]["response_format"] == "url"
    (none,) = asyncio.run(drive(server, [request("draw 0")], dialect=Dialect(response_format="none")))
    assert (none.status, none.file) == (CallEnd.DONE, b"png")
    assert "response_format" not in seen[-1][0]


def test_time_scale_stretches_arrivals_but_not_deadlines(server):
    workload = [request("draw 0"), request("draw 0", arrival_s=0.1, slo_s=1.0)]

    async def scenario(loop):
        driving = asyncio.create_task(drive(server, workload, time_scale=3.0))
        await loop.until(lambda: len(seen) == 1)
        loop.advance(0.29)
        await asyncio.sleep(0)
        loop.advance(0.02)
        return await driving

    (_, record) = clock.run(scenario)
    assert record.arrival_s == pytest.approx(0.3)
    assert record.lag_s == pytest.approx(0.01)
    assert record.slo_s == 1.0


def test_a_server_that_is_not_there_is_an_error_record():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (record,) = asyncio.run(drive(f"http://127.0.0.1:{port}", [request("draw 0", slo_s=1.0)]))
    assert record.status is CallEnd.ERROR
    assert "ConnectError" in record.detail
    assert record.cause == "connection"
    assert record.on_time is False


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port", ""])
def test_a_useless_address_is_refused_at_once(url):
    with pytest.raises(ValueError, match="base_url is"):
        asyncio.run(drive(url, [request("draw 0")]))


def test_a_scale_of_times_below_zero_is_refused_at_once():
    with pytest.raises(ValueError, match="time_scale"):
        asyncio.run(drive("http://127.0.0.1:1", [], time_scale=-1))


def test_a_record_s_request_is_the_workload_s(server):
    workload = [request("draw 0", id="a"), request("draw 0", id="b")]
    records = asyncio.run(drive(server, workload))
    assert [json.dumps(record.request.id) for record in records] == ['"a"', '"b"']
