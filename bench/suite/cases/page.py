"""What the page at `/` costs the browser that shows it, with 128 devices and 10,000 tiles in view."""

from __future__ import annotations

import json
import shutil
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from itertools import pairwise
from random import Random
from typing import Any

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.stats import bootstrap, median, p99

FRAME, TASK, PLOT = "FireAnimationFrame", "RunTask", "plot"
BUDGET_MS = 8.0
PERIOD_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFrames:
    """Headless Chromium shows the view *Live* of a made-up server for `seconds`, `parts` times, in each of two ways.

    `tiles` runs lie in the latest `span_s` seconds on `devices`, as many end in each further span, and `requests` wait.
    The view follows the clock; then it is moved and zoomed without pause, so that all tiles are drawn anew.
    """

    devices: int = 128
    tiles: int = 10_000
    requests: int = 200
    span_s: float = 30.0
    seconds: float = 10.0
    parts: int = 3
    width: int = 1600
    height: int = 1000
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> PageFrames:
        return cls(seconds=3.0, parts=1) if quick else cls()

    def measure(self, note: Note) -> Finding:
        chromium = shutil.which("chromium")
        if chromium is None:
            raise CaseFailed("there is no chromium: apt-get install chromium")
        found: dict[str, list[float]] = {"follows the clock": [], "is moved and zoomed": []}
        drawn: dict[str, list[float]] = {name: [] for name in found}
        with _served(Made(self)) as url, _page(chromium, self, url) as page:
            version = page.context.browser.version
            for part in range(self.parts):
                for name in found:
                    frames_ms, plots_ms = self._part(page, is_moved=name == "is moved and zoomed")
                    found[name] += frames_ms
                    drawn[name] += plots_ms
                    note(f"{name}, part {part + 1}: {len(frames_ms)} frames, p99 {p99(frames_ms):.2f} ms")
        return Finding(
            checks=tuple(
                Check(
                    what=f"{name}: main thread of a frame, {which}",
                    measured=bootstrap(values, self.seed, statistic),
                    high=BUDGET_MS,
                    unit="ms",
                )
                for name, values in found.items()
                for which, statistic in (("median", median), ("p99", p99))
            ),
            method=self._method(),
            tables=(_table(found, drawn),),
            facts={"chromium": version},
        )

    def _part(self, page: Any, *, is_moved: bool) -> tuple[list[float], list[float]]:
        page.keyboard.press("End")
        page.wait_for_timeout(1_000)
        session = page.context.new_cdp_session(page)
        events: list[dict[str, Any]] = []
        done = threading.Event()
        session.on("Tracing.dataCollected", lambda told: events.extend(told["value"]))
        session.on("Tracing.tracingComplete", lambda _: done.set())
        categories = "toplevel,devtools.timeline,blink.user_timing,disabled-by-default-devtools.timeline"
        session.send("Tracing.start", {"categories": categories, "transferMode": "ReportEvents"})
        end_s = time.monotonic() + self.seconds
        keys = ["-", "+", "ArrowLeft", "ArrowRight"]
        while time.monotonic() < end_s:
            if is_moved:
                page.keyboard.press(keys[0])
                keys = keys[1:] + keys[:1]
            page.wait_for_timeout(15)
        session.send("Tracing.end")
        while not done.is_set():
            page.wait_for_timeout(50)
        session.detach()
        return frame_times(events), _plots(events)

    def _method(self) -> tuple[str, ...]:
        return (
            f"A made-up server sends {self.devices} devices, {self.tiles} tiles in {self.span_s:g} s of view, "
            f"{self.requests} open requests, and what is new twice a second. The page is that of the package, in "
            f"Chromium without a screen and without a GPU, {self.width}x{self.height}.",
            "By Chromium's own tracing: processor time of the renderer's main thread from one frame to the next, with "
            "everything that it does: events of the stream, script, style, layout, paint. What the compositor and the "
            "raster threads do beside it is not in it.",
            "Moved and zoomed: a key every 15 ms, so that all tiles are drawn anew. Frames of all parts are taken "
            "together; intervals are bootstrapped.",
        )


@dataclass(slots=True, eq=False)
class Made:
    """The frames of a server that there is not: `schema.live.LiveState`."""

    case: PageFrames

    def states(self) -> Iterator[dict[str, Any]]:
        """The first with the past, then each with what has happened since the one before it."""
        now_s = time.monotonic()
        yield self._state(now_s, now_s - self.case.span_s, is_first=True)
        while True:
            since_s, now_s = now_s, time.monotonic()
            yield self._state(now_s, since_s, is_first=False)

    def _state(self, now_s: float, since_s: float, *, is_first: bool) -> dict[str, Any]:
        case = self.case
        run_s = case.span_s * case.devices / case.tiles
        starts = [(device, run_s * device / case.devices) for device in range(case.devices)]
        tiles = [
            self._tile(device, shift_s + run_s * number, run_s)
            for device, shift_s in starts
            for number in range(int((since_s - shift_s) / run_s), int((now_s - shift_s) / run_s))
        ]
        tiles.sort(key=lambda tile: tile["end_s"])
        planned = [self._tile(device, now_s - now_s % run_s + run_s * n, run_s) for device, _ in starts for n in (0, 1)]
        counts = {"on_time": 10, "late": 2, "others": 0, "refused": 1, "recent_on_time": 3, "recent_late": 1}
        return {
            "type": "tilework.live",
            "now_s": now_s,
            "policy": "tilework",
            "backlog_s": 100.0,
            "num_open": case.requests,
            "num_own": case.requests,
            "missed": 0,
            "planned": planned,
            "tiles": tiles,
            "requests": [self._request(number, now_s) for number in range(case.requests)],
            "ended": [],
            "attainment": [{"by": by, "name": "a", **counts} for by in ("class", "tenant", "model")],
            "attainment_window_s": 600.0,
            "devices": [self._device(device) for device in range(case.devices)] if is_first else None,
        }

    def _tile(self, device: int, start_s: float, run_s: float) -> dict[str, Any]:
        return {
            "start_s": start_s,
            "end_s": start_s + run_s * 0.95,
            "devices": [device],
            "stage": "steps",
            "requests": [device * 7 % self.case.requests],
            "first_step": 0,
            "steps": 2,
            "ending": "done",
        }

    def _request(self, number: int, now_s: float) -> dict[str, Any]:
        return {
            "number": number,
            "uid": f"{number:032x}-0",
            "model": "flux",
            "size": Random(number).choice(["256x256", "512x512", "1024x1024", "2048x2048"]),
            "steps": 28,
            "class": "standard",
            "tenant": "default",
            "arrival_s": now_s - 10,
            "deadline_s": now_s + number / self.case.requests * 20 - 5,
            "is_promise": False,
            "status": "running",
            "steps_done": int(now_s) % 28,
            "eta_s": now_s + 5,
            "finish_s": None,
            "on_time": None,
        }

    def _device(self, device: int) -> dict[str, Any]:
        components = [{"models": ["flux"], "name": name, "bytes": 10**9} for name in ("transformer", "vae")]
        memory = {"used_bytes": 10**10, "weights_bytes": 4 * 10**10, "weights_free_bytes": 10**10}
        return {"device": device, "node": device // 8, "kind": "accelerator", **memory, "components": components}


def frame_times(events: Sequence[dict[str, Any]]) -> list[float]:
    """Milliseconds of processor time that the main thread of the renderer used for each frame and until the next."""
    begins = sorted((event["ts"], event["pid"], event["tid"]) for event in events if event["name"] == FRAME)
    if not begins:
        raise CaseFailed("Chromium has traced no frame")
    threads = Counter(one[1:] for one in begins)
    thread = threads.most_common(1)[0][0]
    on_thread = [event for event in events if (event["pid"], event["tid"]) == thread and event["name"] == TASK]
    tasks = sorted((event["ts"], event.get("tdur", 0)) for event in on_thread)  # One that is cut off has none.
    starts = [start for start, _ in tasks]
    firsts = [bisect_right(starts, ts) - 1 for ts, *_ in begins]  # The tasks that the frames begin in.
    return [sum(used for _, used in tasks[one:other]) / 1e3 for one, other in pairwise(firsts) if other > one]


def _plots(events: Sequence[dict[str, Any]]) -> list[float]:
    """Milliseconds by the clock that the page says it took to draw the timeline."""
    begins = {event["id2"]["local"]: event["ts"] for event in events if event["name"] == PLOT and event["ph"] == "b"}
    ends = {event["id2"]["local"]: event["ts"] for event in events if event["name"] == PLOT and event["ph"] == "e"}
    return [(ends[one] - begin) / 1e3 for one, begin in begins.items() if one in ends]


@contextmanager
def _page(chromium: str, case: PageFrames, url: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": case.width, "height": case.height})
        page.goto(f"{url}/#live")
        page.wait_for_selector(".plot canvas")
        page.locator(".plot").focus()
        page.wait_for_timeout(3_000)
        yield page
        browser.close()


@contextmanager
def _served(made: Made) -> Iterator[str]:
    """The page and its stream, on a thread."""
    built = files("tilework.server.page") / "built"
    kinds = {"index.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/live":
                self._stream()
                return
            name = self.path.removeprefix("/page/").strip("/") or "index.html"
            is_there = name in kinds
            self.send_response(200 if is_there else 404)
            self.send_header("Content-Type", kinds.get(name, "text/plain"))
            self.end_headers()
            self.wfile.write((built / name).read_bytes() if is_there else b"")

        def _stream(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with suppress(OSError):  # The browser has gone.
                for state in made.states():
                    self.wfile.write(f"data: {json.dumps(state)}\n\n".encode())
                    time.sleep(PERIOD_S)

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _table(found: dict[str, list[float]], drawn: dict[str, list[float]]) -> Table:
    return Table(
        title="Milliseconds of a frame",
        columns=("the view", "frames", "median", "p99", "most", "within 8 ms", "script of the timeline, median (wall)"),
        rows=tuple(
            (
                name,
                str(len(values)),
                f"{median(values):.2f}",
                f"{p99(values):.2f}",
                f"{max(values):.2f}",
                f"{sum(one <= BUDGET_MS for one in values) / len(values):.1%}",
                f"{median(drawn[name]):.2f}" if drawn[name] else "none",
            )
            for name, values in found.items()
        ),
    )
