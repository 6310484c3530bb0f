"""A server's life: start, drain, stop, and what its process must not import."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from fake_engine import FakeEngine, Plan, Served, eventually, serving
from tilework.server.config import ServerConfig
from tilework.server.main import AddressInUse, serve

TESTS = Path(__file__).parent


class Caller(threading.Thread):
    """Sends one call from a thread of its own and keeps its answer."""

    def __init__(self, server: Served) -> None:
        super().__init__()
        self.server = server
        self.answer: httpx.Response | None = None
        self.start()
        eventually(lambda: server.engine.requests)

    def run(self) -> None:
        self.answer = httpx.post(f"{self.server.url}/v1/images/generations", json={"prompt": "x"}, timeout=20)

    def status(self) -> int:
        self.join(15)
        assert self.answer is not None
        return self.answer.status_code


def test_running_request_finishes_before_the_engine_stops() -> None:
    with serving(FakeEngine(plan=Plan(delay_s=0.6)), drain_s=10) as server:
        caller = Caller(server)
        server.stop()
        time.sleep(0.3)
        assert server.engine.log == ["started", "draining"]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        assert caller.status() == 200
    assert server.engine.log[:3] == ["started", "draining", "stopped"]
    assert server.engine.cancelled == {}


def test_request_longer_than_the_drain_ends_with_503() -> None:
    with serving(FakeEngine(plan=Plan(delay_s=60)), drain_s=0.3) as server:
        caller = Caller(server)
        server.stop()
        assert caller.status() == 503
    assert list(server.engine.cancelled.values()) == ["the engine has stopped"]


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
engine = FakeEngine(plan=Plan(delay_s=0.5), start_s=float(sys.argv[2]))
print("begun", flush=True)
asyncio.run(serve(engine, ServerConfig(port=0), on_ready=lambda url: print(url, flush=True)))
print("torch" in sys.modules, *engine.log, flush=True)
"""


def start_process(start_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(TESTS), str(start_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_a_process_that_never_imports_torch(number: signal.Signals) -> None:
    process = start_process(0)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    answers: list[httpx.Response] = []
    caller = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/images/generations", json={"prompt": "x"}))
    )
    caller.start()
    time.sleep(0.25)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=15)
    caller.join(5)
    assert [answer.status_code for answer in answers] == [200]
    assert out.split()[:4] == ["False", "started", "draining", "stopped"]
    assert (process.returncode, err) == (0, "")


def test_signal_while_the_engine_starts_stops_it() -> None:
    process = start_process(60)
    time.sleep(0.2)
    process.terminate()
    out, err = process.communicate(timeout=10)
    assert out.split() == ["False", "stopped"]
    assert (process.returncode, err) == (0, "")
