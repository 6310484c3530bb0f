"""Nothing that a client sends holds the event loop for long: it decides for all requests.

Each route gets the worst bodies of each kind. A pause is the processor time of this process between two rounds of the
loop, or the time that has passed if that is less: threads may work beside it without holding it. The clients are
another process.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fake_engine import EDITOR, VIDEOS, FakeEngine, Served, app_of, serving
from server import worst_bodies
from server.worst_bodies import FORM_BODIES, HEADS, JSON_BODIES, KEY, PICTURE_BODIES, TEXT_FORM_BODIES
from tilework.server.config import ServerConfig

LIMIT_S = 0.020
SLACK = 1.5
"""Large blocks of memory take the kernel longer while others of the machine do the same."""
USUAL_S = 0.008
"""What `calibrate` takes on the machine for which the limit was set."""
MOST_TRIES = 4
KINDS = {
    "json": JSON_BODIES,
    "form": FORM_BODIES,
    "text form": TEXT_FORM_BODIES,
    "head": HEADS,
}
BODIES: dict[str, tuple[str, ...]] = {
    "POST /v1/images/generations": ("json",),
    "POST /v1/images/edits": ("json", "form", "text form"),
    "POST /v1/chat/completions": ("json",),
    "POST /v1/videos": ("json", "form", "text form"),
    "POST /v1/videos/sync": ("json", "form", "text form"),
    "POST /v1/files": ("form",),
    "POST /v1/batches": ("json",),
    "POST /v1/batches/{batch_id}/cancel": (),
    "POST /v1/admin/models": ("json",),
    "POST /v1/admin/models/{model_id:path}/loras": ("json",),
}
"""What each route that takes a body is sent, beside heads. The others take none."""
NOT_WALKED = {"GET /v1/plan"}
"""It starts a process, which takes a processor from this one for seconds."""
FEW = (
    *(
        "fields",
        "values",
        "depth 900",
        "depth 900 as a text",
        "names of the same letters",
        "digits",
        "chunks",
        "wrong messages",
    ),
    *("text of 1 MiB", "values of 1 MiB", "fields in extra_body"),
)


def routes() -> list[str]:
    """Each route of the application, as `METHOD path`."""
    found: list[str] = []
    for one in app_of(FakeEngine(), ServerConfig()).routes:
        methods = getattr(one, "methods", None) or {"GET"}  # Mounted files have none.
        found += [f"{method} {one.path}" for method in methods - {"HEAD"}]  # type: ignore[attr-defined]
    return sorted(set(found))


@dataclass
class Ticker:
    """Measures the longest pause of a loop since `reset`."""

    longest_s: float = 0.0
    num_ticks: int = 0

    async def run(self) -> None:
        while True:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            pause_s = min(time.perf_counter() - wall_s, time.process_time() - cpu_s)
            self.longest_s, self.num_ticks = max(self.longest_s, pause_s), self.num_ticks + 1

    def reset(self) -> None:
        self.longest_s = 0.0


@dataclass
class Walk:
    """A server, what measures its loop, and a process that sends it requests."""

    served: Served
    ticker: Ticker
    sender: subprocess.Popen[str]

    def sent(self, route: str, name: str) -> int:
        """Send one request and return the status of the answer, and 0 if there is none."""
        assert self.sender.stdin is not None
        assert self.sender.stdout is not None
        method, _, path = route.partition(" ")
        for place in ("{uid}", "{video_id}", "{file_id}", "{batch_id}", "{model_id:path}", "{lora}"):
            path = path.replace(place, "x")
        print(method, path, name, file=self.sender.stdin, flush=True)
        return int(self.sender.stdout.readline())

    def pause_s(self, route: str, name: str, limit_s: float) -> tuple[int, float]:
        """The status, and the longest pause: the shortest of some tries, if it is over the limit, since a pause of
        another cause is not there each time."""
        found: list[float] = []
        while True:
            self.served.on_loop(self.ticker.reset)
            status = self.sent(route, name)
            self.served.until_idle()
            found.append(self.served.on_loop(lambda: self.ticker.longest_s))
            if found[-1] <= limit_s or len(found) == MOST_TRIES:
                return status, min(found)


@contextmanager
def walking(durable: Path) -> Iterator[Walk]:
    engine = FakeEngine(
        info=replace(VIDEOS, pictures=EDITOR.pictures, arguments=EDITOR.arguments, name="tiny-shapes"), keeps=False
    )
    with serving(engine, durable=str(durable), drain_s=0, admin_key=KEY) as served:
        ticker = Ticker()
        task = asyncio.run_coroutine_threadsafe(ticker.run(), served.loop)
        address = served.url.removeprefix("http://").split(":")
        command = [sys.executable, worst_bodies.__file__, *address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        gc.collect()
        gc.freeze()  # A collection would walk all that the tests before have loaded.
        try:
            with subprocess.Popen(command, **pipes) as sender:  # type: ignore[call-overload]
                yield Walk(served, ticker, sender)
        finally:
            gc.unfreeze()
            task.cancel()


def calibrate() -> float:
    """The processor time of a fixed loop: the least of some."""
    found: list[float] = []
    for _ in range(7):
        start_s = time.thread_time()
        sum(index * index for index in range(200_000))
        found.append(time.thread_time() - start_s)
    return min(found)


def check(walk: Walk, requests: Iterable[tuple[str, str]]) -> None:
    """Each is answered, and none by a fault of the server; and none holds the loop."""
    limit_s = SLACK * LIMIT_S * max(1.0, calibrate() / USUAL_S)
    found = {(route, name): walk.pause_s(route, name, limit_s) for route, name in requests}
    for (route, name), (status, pause_s) in sorted(found.items(), key=lambda one: -one[1][1])[:20]:
        print(f"{1e3 * pause_s:7.1f} ms  {status}  {route}  {name}")
    assert {key: status for key, (status, _) in found.items() if status >= 500} == {}
    assert {key: f"{1e3 * pause_s:.1f} ms" for key, (_, pause_s) in found.items() if pause_s > limit_s} == {}
    assert walk.ticker.num_ticks > len(found)


def test_each_route_that_takes_a_body_is_listed() -> None:
    with_body = {route for route in routes() if route.split(" ")[0] not in ("GET", "DELETE")}
    assert with_body == BODIES.keys()


def test_a_chat_does_not_hold_the_loop(tmp_path: Path) -> None:
    with walking(tmp_path) as walk:
        check(walk, [("POST /v1/chat/completions", name) for name in FEW])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_request_holds_the_loop(tmp_path: Path, kind: str) -> None:
    takers = [route for route in routes() if kind in BODIES.get(route, ()) or kind == "head"]
    with walking(tmp_path) as walk:
        check(walk, [(route, name) for route in takers if route not in NOT_WALKED for name in KINDS[kind]])


@pytest.mark.slow
def test_no_line_of_a_batch_holds_the_loop(tmp_path: Path) -> None:
    """Nor the call that it makes."""
    names = [name for name, one in JSON_BODIES.items() if not one.has_chunks]
    with walking(tmp_path) as walk:
        check(walk, [("BATCH /v1/images/edits", name) for name in (*names, "JPEG", "base64 of 31 MiB")])


@pytest.mark.slow
def test_no_picture_holds_the_loop(tmp_path: Path) -> None:
    with walking(tmp_path) as walk:
        check(walk, [("POST /v1/images/edits", name) for name in PICTURE_BODIES])
