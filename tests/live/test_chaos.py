"""Things that go wrong while real workers serve over HTTP: what the clients saw, above all."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TextIO

import httpx
import numpy as np
import pytest
from PIL import Image

from builders import table
from stages import DIFFUSE
from tilework.control.controller import ControllerConfig
from tilework.control.watchdog import WatchdogConfig
from tilework.core.events import Stopped
from tilework.core.model import ModelSource
from tilework.core.time import NS_PER_MS
from tilework.core.wire.commands import STATES_BYTES
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.event_log.log_file import LogFile
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.server.config import ServerConfig
from tilework.server.main import Signals, serve
from waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.slow
LOSSES = "tilework_device_losses_total"
STUCK_S = 2.0
# Steps of 128 px are predicted to take 0.05 s, about what they take, so that a chunk has a few.
COSTS = table(encode_s=0.02, step_s=0.05, decode_s=0.05, degrees=(1, 2), pipeline="shapes")


@dataclass
class Service:
    """A server in a thread of this process, whose engine and workers a test can reach."""

    url: str
    engine: Engine
    executor: LocalExecutor
    loop: asyncio.AbstractEventLoop
    http: httpx.Client

    def post(self, body: dict[str, Any], **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/images/generations", json=body, timeout=PATIENCE_S, **options)

    def ready(self) -> dict[str, Any]:
        """Raises unless the answer is 200 and comes at once."""
        answer = self.http.get("/ready")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def running(self) -> dict[int, int]:
        """By device that runs steps of a request which has lost no work lately: how many are done."""

        async def look() -> dict[int, int]:
            tracker, found = self.engine._controller.tracker, dict[int, int]()
            for device in tracker.devices:
                for work in device.works[:1]:
                    jobs = tracker.members(work)
                    if work.stage.name == DIFFUSE and jobs and not jobs[0].failures:
                        found[device.device_id] = self.engine._requests[jobs[0].job_id].ticket.steps_done
            return found

        return asyncio.run_coroutine_threadsafe(look(), self.loop).result(PATIENCE_S)

    def signal(self, device_id: int, number: signal.Signals) -> None:
        pid = self.executor.pids.get(str(device_id))
        assert pid is not None
        os.kill(pid, number)

    def until_running(self, least_steps: int = 1) -> list[int]:
        """Returns the devices whose request has so many steps behind it."""
        found: list[int] = []

        def look() -> list[int]:
            found[:] = sorted(device for device, steps in self.running().items() if steps >= least_steps)
            return found

        eventually(look)
        return found

    def until_back(self, num_losses: float) -> None:
        """So many workers have been lost in all, and all are up again, and connected."""
        eventually(lambda: self.metric(LOSSES) >= num_losses and self.metric("tilework_devices_up") == 2)
        eventually(lambda: not self.executor.alone)


@contextmanager
def serving(
    policy: str = "edf",
    log: TextIO | None = None,
    states_bytes: int = STATES_BYTES,
    collectives: str | None = None,
) -> Iterator[Service]:
    """Two workers with `shapes`; what stops for STUCK_S is stuck."""
    config = LocalConfig(
        num_workers=2,
        sources=(ModelSource(path="shapes"),),
        states_bytes=states_bytes,
        collectives=collectives,
        stop_grace_s=2.0,
    )
    executor = LocalExecutor(config)
    watchdog = WatchdogConfig(tick_ns=100 * NS_PER_MS, least_ns=int(STUCK_S * 1e9))
    starting = EngineStart(
        EngineConfig(controller=ControllerConfig(policy=policy), table=COSTS, watchdog=watchdog), executor, log
    )
    signals, started, urls, loops = Signals(), threading.Event(), list[str](), list[asyncio.AbstractEventLoop]()
    engines = list[Engine]()

    def on_ready(url: str, engine: Any) -> None:
        urls.append(url)
        engines.append(engine)
        loops.append(asyncio.get_running_loop())
        started.set()

    def run() -> None:
        try:
            asyncio.run(serve(starting, ServerConfig(port=0, drain_s=5), on_ready=on_ready, signals=signals))
        finally:
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    with httpx.Client(base_url=urls[0]) as http:
        try:
            yield Service(urls[0], engines[0], executor, loops[0], http)
        finally:
            loops[0].call_soon_threadsafe(signals.end)
            thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


def body(seed: int, side: int = 96, steps: int = 16) -> dict[str, Any]:
    prompt = "a large red circle on a blue background"
    return {"prompt": prompt, "size": f"{side}x{side}", "num_inference_steps": steps, "seed": seed}


def pixels(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    (picture,) = answer.json()["data"]
    assert picture["tilework"]["status"] == "done"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["b64_json"]))).convert("RGB"))


def steps_of(answer: httpx.Response) -> int:
    """Of how many steps its picture is made, over all works."""
    segments = answer.json()["data"][0]["tilework"]["segments"]
    return sum(segment["steps"] for segment in segments if segment["stage"] == DIFFUSE)


BODIES = [body(seed, side, steps) for seed, (side, steps) in enumerate([(96, 20), (128, 12), (64, 30)] * 2)]


@pytest.fixture(scope="module")
def undisturbed(service: Service) -> list[np.ndarray]:
    return [pixels(service.post(one)) for one in BODIES]


def test_workers_killed_and_stopped_under_load_cost_no_picture(service: Service, undisturbed: list[np.ndarray]) -> None:
    """Three faults at random steps. Every request gets one picture, the right one; calls are answered meanwhile.

    Each fault meets new requests: those before it may all be done by the time a worker is back.
    """
    rng = Random(0)
    losses, done = service.metric(LOSSES), service.metric("tilework_requests_total")
    faults = rng.sample([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP], 3)
    loads, late = list[list[Future[httpx.Response]]](), list[Future[httpx.Response]]()
    with ThreadPoolExecutor(3 * len(BODIES) + 1) as pool:
        for index, number in enumerate(faults, start=1):
            loads.append([pool.submit(service.post, one) for one in BODIES])
            service.signal(rng.choice(service.until_running(rng.randrange(1, 8))), number)
            assert service.ready()
            late.append(pool.submit(service.post, body(seed=100)))
            service.until_back(losses + index)
    for load in loads:
        for one, answer, expected in zip(BODIES, load, undisturbed, strict=True):
            assert np.array_equal(pixels(answer.result()), expected)
            assert steps_of(answer.result()) == one["num_inference_steps"]
    pictures = [pixels(answer.result()) for answer in late]
    assert all(np.array_equal(picture, pictures[0]) for picture in pictures)
    assert service.metric("tilework_requests_total") == done + 3 * len(BODIES) + len(late)
    assert service.ready()["open_requests"] == 0


def test_workers_killed_while_every_state_spills_cost_no_picture(undisturbed: list[np.ndarray]) -> None:
    """Requests with ever earlier deadlines interrupt those before them, which wait without their tensors."""
    rng, returns, answers = Random(1), 0.0, list[Future[httpx.Response]]()
    with serving(states_bytes=1) as tight, ThreadPoolExecutor(5 * len(BODIES)) as pool:
        for num_kills in range(3):
            for one in BODIES * (2 if num_kills else 1):
                answers.append(pool.submit(tight.post, one | {"slo_s": 60.0 - len(answers)}))
                time.sleep(0.05)
            if num_kills < 2:
                device_id = rng.choice(tight.until_running(rng.randrange(1, 8)))
                returns += tight.metric("tilework_device_returns")
                tight.signal(device_id, signal.SIGKILL)
                tight.until_back(num_kills + 1)
        pictures = [pixels(answer.result()) for answer in answers]
        returns += tight.metric("tilework_device_returns")
        eventually(lambda: not tight.metric("tilework_state_blob_bytes"))
        assert tight.ready()["open_requests"] == 0
    assert all(map(np.array_equal, pictures, undisturbed * 5))
    assert returns, "nothing was put to the test"


def test_a_worker_that_stops_is_found_and_killed(
    service: Service, undisturbed: list[np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    """The request beside it goes on undisturbed."""
    stuck, losses = service.metric("tilework_stuck_works_total"), service.metric(LOSSES)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(service.post, one) for one in BODIES[:2]]
        eventually(lambda: len(service.running()) == 2)
        stopped, other = service.running()
        pid = service.executor.pids.get(str(other))
        service.signal(stopped, signal.SIGSTOP)
        results = [answer.result() for answer in answers]
    for answer, expected in zip(results, undisturbed, strict=False):
        assert np.array_equal(pixels(answer), expected)
    assert service.executor.pids.get(str(other)) == pid
    assert service.metric("tilework_stuck_works_total") >= stuck + 1
    service.until_back(losses + 1)
    limit = re.search(rf"worker {stopped} was lost: it made no progress for ([0-9.]+) s", caplog.text)
    assert limit is not None, caplog.text
    assert float(limit[1]) >= STUCK_S, "longer where a step takes long"


def test_a_suspended_watchdog_reports_no_stuck_work(service: Service) -> None:
    """The whole server stands still for longer than the limit, while its workers stand still, too."""
    losses = service.metric(LOSSES)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(service.post, body(7, steps=60))
        service.until_running()
        for device_id in range(2):
            service.signal(device_id, signal.SIGSTOP)
        service.loop.call_soon_threadsafe(time.sleep, STUCK_S + 1)
        time.sleep(STUCK_S + 1)
        for device_id in range(2):
            service.signal(device_id, signal.SIGCONT)
        assert pixels(answer.result()).shape == (96, 96, 3)
    assert service.metric(LOSSES) == losses


@pytest.mark.parametrize("member", [0, 1])
def test_only_the_suspended_member_of_a_group_is_killed(wide: Service, member: int) -> None:
    """The other says how far it came; the picture is as good, and made of each step once."""
    losses, expected = wide.metric(LOSSES), pixels(wide.post(body(1, side=128, steps=16)))
    other = wide.executor.pids.get(str(1 - member))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(wide.post, body(1, side=128, steps=16))
        wide.until_running(4)
        wide.signal(member, signal.SIGSTOP)
        result = answer.result()
    assert np.abs(pixels(result).astype(int) - expected).max() <= 1
    assert steps_of(result) == 16
    assert wide.executor.pids.get(str(1 - member)) == other
    wide.until_back(losses + 1)


def test_a_member_killed_while_its_group_forms_costs_no_picture(wide: Service) -> None:
    """Both workers are new, so the group has to meet again; one of them is killed as soon as it should."""
    losses = wide.metric(LOSSES)
    for device_id in range(2):
        wide.signal(device_id, signal.SIGKILL)
    wide.until_back(losses + 2)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(wide.post, body(2, steps=12))
        eventually(wide.running)
        wide.signal(1, signal.SIGKILL)
        assert steps_of(answer.result()) == 12
    wide.until_back(losses + 3)


@pytest.fixture(scope="module", params=["sockets", "gloo"])
def wide(request: pytest.FixtureRequest) -> Iterator[Service]:
    """Every request runs on both workers: by sockets, and as with NCCL."""
    with serving("fixed-sp2", collectives=request.param) as service:
        yield service


def connect(service: Service) -> socket.socket:
    host, _, port = service.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def reset(connection: socket.socket) -> None:
    """Go away without a word, as a process that is killed with unread answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def head(length: int) -> bytes:
    return (
        "POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def test_clients_that_drop_their_connections_leave_nothing_behind(
    service: Service, undisturbed: list[np.ndarray]
) -> None:
    """In the middle of their body, of their wait, of a stream, and of the answer."""
    endless = json.dumps(body(1, steps=200)).encode()
    with connect(service) as uploading:
        uploading.sendall(head(len(endless)) + endless[:20])
        time.sleep(0.1)
        reset(uploading)
    with connect(service) as waiting:
        waiting.sendall(head(len(endless)) + endless)
        service.until_running()
        reset(waiting)
    with httpx.stream("POST", f"{service.url}/v1/images/generations", json=body(2, steps=200) | {"stream": True}):
        service.until_running()
    large = json.dumps(body(3, side=192, steps=2) | {"n": 2}).encode()
    with connect(service) as reading:
        reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reading.sendall(head(len(large)) + large)
        assert reading.recv(1)
        reset(reading)
    eventually(lambda: service.ready()["open_requests"] == 0)
    assert np.array_equal(pixels(service.post(BODIES[0])), undisturbed[0])
    eventually(lambda: not service.metric("tilework_state_blob_bytes"))


class Disk(io.StringIO):
    """A file on a disk that is full after so many lines."""

    def __init__(self, num_lines: int) -> None:
        super().__init__()
        self.num_lines, self.kept = num_lines, ""

    def flush(self) -> None:
        if self.num_lines == 0:
            raise OSError(28, "No space left on device")
        self.num_lines -= 1
        self.kept = self.getvalue()


def test_a_full_disk_ends_the_event_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(4)
    with caplog.at_level(logging.WARNING, "tilework"), serving(log=disk) as service:
        assert service.metric("tilework_log_losses_total") == 0
        for seed in range(2):
            assert pixels(service.post(body(seed, side=64, steps=4))).shape == (64, 64, 3)
        assert service.metric("tilework_log_losses_total") == 1
    assert caplog.text.count("No space left on device") == 1, "it is said once"
    assert len(disk.kept.splitlines()) == 4
    assert all(json.loads(line) for line in disk.kept.splitlines()), "what was written is whole"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_log_that_could_not_be_written_does_not_fail_when_it_is_closed() -> None:
    lost: list[bool] = []
    with open("/dev/full", "w", encoding="utf-8") as file:
        log = LogFile(file, lambda: lost.append(True))
        log.begin(lambda _segment, _state: "a line")
        log.add(Stopped(1, 0), (), 0)
    assert lost == [True]
