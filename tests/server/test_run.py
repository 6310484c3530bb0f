"""A server's life: start, drain, stop, and what its process must not import."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from fake_engine import FakeEngine, Plan, Served, app_of, serving
from tilework.server.config import ServerConfig
from tilework.server.frontends.supervisor import FrontEnds
from tilework.server.http.server import AddressInUse, HttpServer, bind
from tilework.server.main import Signals, serve
from waiting import PATIENCE_S, eventually

TESTS = Path(__file__).parents[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Caller(threading.Thread):
    """Sends one call from a thread of its own and keeps its answer."""

    def __init__(self, server: Served) -> None:
        super().__init__()
        self.server = server
        self.answer: httpx.Response | None = None
        self.start()
        eventually(lambda: server.engine.requests)

    def run(self) -> None:
        self.answer = httpx.post(f"{self.server.url}/v1/images/generations", json={"prompt": "x"})

    def status(self) -> int:
        self.join(PATIENCE_S)
        assert self.answer is not None
        return self.answer.status_code


def test_running_request_finishes_before_the_engine_stops() -> None:
    with serving(FakeEngine(plan=Plan(is_held=True)), drain_s=600) as server:
        caller = Caller(server)
        server.stop()
        eventually(lambda: server.engine.log == ["started", "draining"])
        assert httpx.get(f"{server.url}/health").status_code == 200, "new connections are served"
        server.on_loop(server.engine.finish, server.engine.requests[0].uid)
        assert caller.status() == 200
    assert server.engine.log[:3] == ["started", "draining", "stopped"]
    assert server.engine.cancelled == {}


def test_request_longer_than_the_drain_ends_with_503() -> None:
    with serving(FakeEngine(plan=Plan(delay_s=9999)), drain_s=600) as server:
        caller = Caller(server)
        server.stop()
        eventually(lambda: server.engine.draining)
        server.skip(500)
        assert "stopped" not in server.engine.log
        server.skip(150)
        assert caller.status() == 503
    assert list(server.engine.cancelled.values()) == ["the engine has stopped"]


def test_drain_refuses_new_calls_and_answers_everything_else() -> None:
    """A client that asked for its picture later comes for it, on a new connection, and the server waits for it."""
    key = {"Idempotency-Key": "k"}
    later = {"Prefer": "respond-async"}
    with serving(FakeEngine(plan=Plan(is_held=True)), drain_s=600) as server:
        uid = server.post({"prompt": "x"}, headers={**key, **later}).json()["uid"]
        server.stop()
        eventually(lambda: server.engine.draining)
        url = f"{server.url}/v1/requests/{uid}"
        refused = httpx.post(f"{server.url}/v1/images/generations", json={"prompt": "y"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert (refused.headers["connection"], int(refused.headers["retry-after"])) == ("close", 5)
        unready = httpx.get(f"{server.url}/ready")
        assert (unready.status_code, unready.json()["error"]["status"]) == (503, "stopping")
        assert unready.json()["error"]["open_requests"] == 1
        assert "1 call open, 0 images not fetched" in unready.json()["error"]["message"]
        joined = httpx.post(f"{server.url}/v1/images/generations", json={"prompt": "x"}, headers={**key, **later})
        assert (joined.status_code, joined.json()["uid"]) == (202, uid), "it is no new call"
        assert httpx.get(url).json()["status"] == "queued"
        server.on_loop(server.engine.finish, f"{uid}-0")
        eventually(lambda: httpx.get(url).json()["status"] == "done")
        server.skip(500)
        assert "stopped" not in server.engine.log, "the picture has not been fetched yet"
        assert httpx.get(f"{url}/content").status_code == 200
        eventually(lambda: "stopped" in server.engine.log)
    assert server.engine.cancelled == {}


def test_a_stop_says_what_it_waits_for_and_an_idle_one_says_nothing() -> None:
    shown: list[str] = []
    with serving(FakeEngine(plan=Plan(is_held=True)), on_progress=shown.append, drain_s=600) as server:
        uid = server.post({"prompt": "x"}, headers={"Prefer": "respond-async"}).json()["uid"]
        server.stop()
        eventually(lambda: bool(shown))
        httpx.delete(f"{server.url}/v1/requests/{uid}")
    assert shown == ["draining: 1 call open, 0 images not fetched, at most 600 s; Ctrl-C again stops at once"]
    with serving(FakeEngine(), on_progress=shown.append) as server:
        server.stop()
    assert len(shown) == 1


def test_drain_does_not_wait_for_pictures_without_end() -> None:
    with serving(FakeEngine(), drain_s=600) as server:
        server.post({"prompt": "x"}, headers={"Prefer": "respond-async"})
        server.stop()
        eventually(lambda: server.engine.draining)
        server.skip(500)
        assert "stopped" not in server.engine.log
        server.skip(150)
        eventually(lambda: "stopped" in server.engine.log)


ASYNC = {"Prefer": "respond-async"}


def test_drain_does_not_wait_for_pictures_that_have_expired() -> None:
    with serving(FakeEngine(), drain_s=6000, result_ttl_s=600) as server:
        url = f"{server.url}/v1/requests/{server.post({'prompt': 'x'}, headers=ASYNC).json()['uid']}"
        eventually(lambda: httpx.get(url).json()["status"] == "done")
        server.stop()
        eventually(lambda: server.engine.draining)
        server.skip(500)
        assert "stopped" not in server.engine.log, "it can still be fetched"
        server.skip(150)
        eventually(lambda: "stopped" in server.engine.log)


def test_drain_does_not_wait_for_pictures_that_made_room_for_newer_ones() -> None:
    with serving(FakeEngine(plan=Plan(is_noise=True)), drain_s=6000, result_bytes=1 << 20) as server:
        pictures: list[str] = []
        for _ in range(2):
            uid = server.post({"prompt": "x", "size": "512x512"}, headers=ASYNC).json()["uid"]
            pictures.append(f"{server.url}/v1/requests/{uid}/content")
            eventually(lambda: httpx.head(pictures[-1]).status_code == 200)
        assert httpx.head(pictures[0]).status_code == 410
        assert httpx.get(pictures[1]).status_code == 200
        server.stop()
        eventually(lambda: "stopped" in server.engine.log)


def test_drain_does_not_wait_for_pictures_that_were_deleted() -> None:
    with serving(FakeEngine(), drain_s=6000) as server:
        url = f"{server.url}/v1/requests/{server.post({'prompt': 'x'}, headers=ASYNC).json()['uid']}"
        eventually(lambda: httpx.get(url).json()["status"] == "done")
        httpx.delete(url)
        server.stop()
        eventually(lambda: "stopped" in server.engine.log)


def test_head_has_no_effects() -> None:
    """HEAD of a picture leaves it to be fetched; HEAD of events answers at once, not at the end of the call."""
    with serving(FakeEngine(plan=Plan(is_held=True)), drain_s=600) as server:
        uid = server.post({"prompt": "x"}, headers=ASYNC).json()["uid"]
        url = f"{server.url}/v1/requests/{uid}"
        events = server.http.head(f"{url}/events")
        assert (events.status_code, events.headers["content-type"]) == (200, "text/event-stream")
        assert server.http.get(url).status_code == 200, "the connection is free for the next request"
        server.on_loop(server.engine.finish, f"{uid}-0")
        eventually(lambda: httpx.head(f"{url}/content").status_code == 200)
        server.stop()
        eventually(lambda: server.engine.draining)
        server.skip(500)
        assert "stopped" not in server.engine.log, "the picture has not been fetched yet"
        assert httpx.get(f"{url}/content").status_code == 200
        eventually(lambda: "stopped" in server.engine.log)


def test_all_waits_of_a_stop_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that does not end takes up the drain; then an answer that no client takes gets `CLOSE_S` only."""
    monkeypatch.setattr("tilework.server.main.CLOSE_S", 600)
    monkeypatch.setattr("tilework.server.http.server._KEEP_ALIVE_S", 10**6)
    engine = FakeEngine(plan=Plan(is_noise=True))
    with socket.socket() as reader, serving(engine, drain_s=6000, send_timeout_s=86400) as server:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        body = b'{"prompt": "x", "size": "512x512", "n": 10}'
        head = f"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        reader.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        assert reader.recv(1)
        server.engine.plan = Plan(is_held=True)
        server.post({"prompt": "x"}, headers=ASYNC)
        server.stop()
        eventually(lambda: server.engine.draining)
        server.skip(5900)
        assert "stopped" not in server.engine.log
        server.skip(200)
        eventually(lambda: "stopped" in server.engine.log)
        for _ in range(5):  # Until it waits for the last answer.
            server.on_loop(lambda: None)
        server.on_loop(server.loop.skip, 700)  # Less than another drain.


def test_pictures_that_came_with_the_answer_need_not_be_fetched() -> None:
    """Pictures that were sent with the answer to an asynchronous call count as fetched."""
    with serving(FakeEngine(), drain_s=60) as server:
        assert server.post({"prompt": "x"}, headers={"Prefer": "respond-async, wait=9"}).status_code == 200
        server.stop()
        eventually(lambda: "stopped" in server.engine.log)


def test_reader_of_events_sees_the_end_of_a_drain() -> None:
    with serving(FakeEngine(plan=Plan(is_held=True)), drain_s=600) as server:
        uid = server.post({"prompt": "x"}, headers={"Prefer": "respond-async"}).json()["uid"]
        with httpx.stream("GET", f"{server.url}/v1/requests/{uid}/events", timeout=30) as answer:
            server.stop()
            eventually(lambda: server.engine.draining)
            server.skip(601)
            lines = [line for line in answer.iter_lines() if line.startswith("event: ")]
    assert lines[-1] == "event: tilework.failed"


def test_until_the_engine_has_started_the_server_says_so() -> None:
    engine = FakeEngine(starts=False)
    signals = Signals()
    port = free_port()
    thread = threading.Thread(
        target=lambda: asyncio.run(serve(engine, ServerConfig(port=port), signals=signals)), daemon=True
    )
    thread.start()
    loop_url = f"http://127.0.0.1:{port}"

    def is_alive() -> bool:
        try:
            return httpx.get(f"{loop_url}/health").status_code == 200
        except httpx.ConnectError:
            return False

    eventually(is_alive)
    answers = [
        httpx.get(f"{loop_url}/ready"),
        httpx.get(f"{loop_url}/metrics"),
        httpx.get(f"{loop_url}/v1/models"),
        httpx.post(f"{loop_url}/v1/images/generations", json={"prompt": "x"}),
        httpx.get(f"{loop_url}/v1/requests/{'0' * 32}"),  # It may be known once calls are taken over.
        httpx.get(f"{loop_url}/v1/images/{'0' * 32}/content"),
        httpx.get(f"{loop_url}/v1/videos/{'0' * 32}"),
    ]
    assert [answer.status_code for answer in answers] == [503] * len(answers)
    assert {answer.json()["error"]["status"] for answer in answers} == {"starting"}
    assert "loading the model" in answers[0].json()["error"]["message"]
    engine_loop = engine.loop
    assert engine_loop is not None
    engine_loop.call_soon_threadsafe(signals.end)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert engine.log == ["stopped"]


def test_when_the_engine_fails_the_server_stops() -> None:
    """It does not wait for pictures to be fetched, or for what never ends."""
    engine = FakeEngine(plan=Plan(is_held=True))

    async def scenario() -> None:
        url = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(engine, ServerConfig(port=0, drain_s=600), on_ready=lambda at, _engine: url.set_result(at))
        )
        async with httpx.AsyncClient() as client:
            body = {"prompt": "x"}
            answer = await client.post(
                f"{await url}/v1/images/generations", json=body, headers={"Prefer": "respond-async"}
            )
            assert answer.status_code == 202
        engine.failure = "the scheduler failed (AssertionError: no)"
        engine.failed.set()
        await serving

    asyncio.run(scenario())
    assert engine.log[-1] == "stopped"


def test_second_signal_does_not_wait() -> None:
    with serving(FakeEngine(plan=Plan(delay_s=60)), drain_s=60) as server:
        caller = Caller(server)
        server.stop()
        server.stop()
        assert caller.status() == 503


def test_port_in_use_names_it_and_does_not_start_the_engine() -> None:
    engine = FakeEngine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port} .*another port"):
            asyncio.run(serve(engine, ServerConfig(port=port)))
    assert "started" not in engine.log


def test_unknown_host_is_named() -> None:
    with pytest.raises(AddressInUse, match=r"host = '256\.1\.1\.1'"):
        asyncio.run(serve(FakeEngine(), ServerConfig(host="256.1.1.1", port=0)))


SCRIPT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from fake_engine import FakeEngine, Plan
from tilework.server.config import ServerConfig
from tilework.server.main import serve
class Engine(FakeEngine):
    async def start(self, observer):
        print("begun", flush=True)
        return await super().start(observer)
engine = Engine(plan=Plan(delay_s=0.5), starts=sys.argv[2] == "True")
asyncio.run(serve(engine, ServerConfig(port=0), on_ready=lambda url, _engine: print(url, flush=True)))
print("torch" in sys.modules, *engine.log, flush=True)
"""


def start_process(starts: bool) -> subprocess.Popen[str]:
    """A server whose engine has begun to start, and does or does not; signals are handled."""
    command = [sys.executable, "-c", SCRIPT, str(TESTS), str(starts)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_drains_a_process_that_never_imports_torch(number: signal.Signals) -> None:
    process = start_process(starts=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    answers: list[httpx.Response] = []
    caller = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/images/generations", json={"prompt": "x"}))
    )
    caller.start()
    eventually(lambda: httpx.get(f"{url}/v1/requests").json()["data"])
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    caller.join(PATIENCE_S)
    assert [answer.status_code for answer in answers] == [200]
    assert out.split()[:4] == ["False", "started", "draining", "stopped"]
    assert (process.returncode, err) == (0, "")


def test_signal_while_the_engine_starts_stops_it() -> None:
    process = start_process(starts=False)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert out.split() == ["False", "stopped"]
    assert (process.returncode, err) == (0, "")


def takes_connections(listener: socket.socket) -> bool:
    with socket.socket() as client:
        return client.connect_ex(listener.getsockname()) == 0


def test_the_port_takes_no_connection_before_the_application_has_begun() -> None:
    """A probe would wait for an answer, and a proxy would send requests there."""

    async def scenario() -> None:
        begins, may_begin = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await JSONResponse({})(scope, receive, send)
                return
            assert (await receive())["type"] == "lifespan.startup"
            begins.set()
            await may_begin.wait()
            await send({"type": "lifespan.startup.complete"})
            assert (await receive())["type"] == "lifespan.shutdown"
            await send({"type": "lifespan.shutdown.complete"})

        with bind("127.0.0.1", 0) as listener:
            server = HttpServer(app, listener, ServerConfig(), 9)
            serving = asyncio.create_task(server.listen())
            await begins.wait()
            assert not takes_connections(listener)
            may_begin.set()
            await server.listening.wait()
            host, port = listener.getsockname()
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"http://{host}:{port}/health")).status_code == 200
            server.close()
            assert not asyncio.get_running_loop().remove_reader(listener), "it takes no connection any more, at once"
            await serving

    asyncio.run(scenario())


def test_the_port_takes_no_connection_before_a_front_end_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        begins, never = asyncio.Event(), asyncio.Event()

        async def start(*_command: str, **_options: Any) -> Any:
            begins.set()
            await never.wait()

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        config = ServerConfig()
        with bind("127.0.0.1", 0) as listener:
            app = app_of(FakeEngine(), config)
            front_ends = FrontEnds(app, listener, config, 9, 1, standing=lambda: None, on_answered=lambda _: None)
            serving = asyncio.create_task(front_ends.listen())
            await begins.wait()
            assert not takes_connections(listener)
            serving.cancel()
            await asyncio.wait({serving})

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "settings", [{}, {"probe_port": 0}, pytest.param({"frontends": 2}, marks=pytest.mark.slow)], ids=str
)
def test_an_address_that_another_process_takes_meanwhile_is_named(
    settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two may have bound a port, of which one can listen: the other sees it only then."""
    others: list[socket.socket] = []

    def bind_both(host: str, port: int) -> socket.socket:
        ours = bind(host, port)
        if not others:
            others.append(bind(*ours.getsockname()))
            others[0].listen()
        return ours

    monkeypatch.setattr("tilework.server.main.bind", bind_both)
    if "probe_port" in settings:
        monkeypatch.setattr("tilework.server.main.bind", bind)
        monkeypatch.setattr("tilework.server.http.probe_port.bind", bind_both)
    engine = FakeEngine()
    with pytest.raises(AddressInUse, match="cannot be listened on: Address already in use"):
        asyncio.run(asyncio.wait_for(serve(engine, ServerConfig(port=0, **settings)), PATIENCE_S))
    others[0].close()
    assert "started" not in engine.log
