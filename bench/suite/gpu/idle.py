"""Where the device of a served model idles, and what the host does meanwhile."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import httpx

from suite.case import CaseFailed, Finding, Note, Table
from suite.gpu.idle_gaps import Recorded
from suite.gpu.models import TOY, folder_of, on_gpu
from suite.server import Server, serving

_HOOK = Path(__file__).parent / "recorder"
_TIMEOUT_S = 120.0
_US, _MS = 1e3, 1e6
_BOUNDS = ((0.0, 10.0), (10.0, 100.0), (100.0, 1000.0), (1000.0, float("inf")))
"""Lengths of gaps that are counted together, in microseconds."""
_LONGEST, _CAUSES, _WIDTH = 12, 12, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """`clients` ask a server with one worker for pictures, one after another, while it records `seconds`, twice.

    The second time the worker waits for each step before it launches the next.
    """

    device: str
    model: str
    side: int
    steps: int
    seconds: float
    clients: int = 3
    guidance_scale: float = 5.0
    prompt: str = "a large red circle on a blue background"

    @classmethod
    def make(cls, quick: bool) -> Idle:
        if not on_gpu():
            return cls(device="cpu", model=TOY.model, side=TOY.side, steps=TOY.steps, seconds=1.0)
        return cls(device="cuda", model="SDXL", side=1024, steps=30, seconds=1.0 if quick else 2.0)

    def measure(self, note: Note) -> Finding:
        folder = folder_of(self.model, note)
        with TemporaryDirectory(prefix="tilework-bench-") as temporary:
            file = Path(temporary) / "recording.json"
            with _recorder(file, self.seconds), serving(1, model=folder, device=self.device) as server:
                note(f"ready after {server.ready_s:.1f} s")
                self._draw(server.url, 0)  # Warms up, and ends before anything is recorded.
                recorded = self._record(server, file)
                os.kill(_worker_of(server.pid), signal.SIGUSR1)
                waiting = self._record(server, file)
            note("recorded")
        return self._found(recorded, waiting)

    def _record(self, server: Server, file: Path) -> Recorded:
        """Ask for pictures until the recording of some of them is there."""
        file.unlink(missing_ok=True)
        ended = Event()
        with ThreadPoolExecutor(self.clients) as pool:
            asking = [pool.submit(self._draw_until, server.url, seed, ended) for seed in range(self.clients)]
            try:
                os.kill(_worker_of(server.pid), signal.SIGUSR2)
                while not file.exists():
                    if done := wait(asking, timeout=0.1, return_when="FIRST_EXCEPTION").done:
                        done.pop().result()
            finally:
                ended.set()
        return Recorded.read(json.loads(file.read_text("utf-8")))

    def _draw_until(self, url: str, seed: int, ended: Event) -> None:
        while not ended.is_set():
            self._draw(url, seed)

    def _draw(self, url: str, seed: int) -> None:
        body = {
            "prompt": self.prompt,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance_scale,
            "seed": seed,
            "size": f"{self.side}x{self.side}",
        }
        answer = httpx.post(f"{url}/v1/images/generations", json=body, timeout=_TIMEOUT_S, trust_env=False)
        if answer.status_code != 200:
            raise CaseFailed(f"the server answered HTTP {answer.status_code}: {answer.text[:200]}")

    def _found(self, recorded: Recorded, waiting: Recorded) -> Finding:
        idle_ns = recorded.idle_ns or 1
        by_length = [[gap for gap in recorded.gaps if low * _US <= gap.num_ns < high * _US] for low, high in _BOUNDS]
        longest = sorted(recorded.gaps, key=lambda gap: -gap.num_ns)[:_LONGEST]
        return Finding(
            checks=(),
            method=(
                f"`tilework serve {self.model}`, one worker; {self.clients} clients ask for pictures, each one after "
                "another. The worker records what torch's profiler (CPU and CUDA) sees, and every 2 ms the function in "
                "which its main thread is. The profiler slows the host, so that the device idles more than without it.",
                "Busy: the device runs a kernel or copies. A gap lies between two of these. The host did what its "
                "innermost operator or call of CUDA was in the middle of the gap; else the sampled function.",
                "Of short steps the host launches one before the last is done; for the second row it is told not to.",
                *(() if self.device == "cuda" else ("Without a GPU, the host's outermost operators are its device.",)),
            ),
            tables=(
                Table(
                    title=f"{self.model}, {self.side} px, {self.steps} steps",
                    columns=("the host", "recorded, s", "busy", "events of the device", "gaps", "idle, s"),
                    rows=(_row("runs ahead by a step", recorded), _row("waits for each step", waiting)),
                ),
                Table(
                    title="Gaps by length",
                    columns=("µs", "gaps", "share of the idle time"),
                    rows=tuple(
                        (
                            f"from {low:g}" if high == float("inf") else f"{low:g} to {high:g}",
                            str(len(some)),
                            f"{sum(gap.num_ns for gap in some) / idle_ns:.3f}",
                        )
                        for (low, high), some in zip(_BOUNDS, by_length, strict=True)
                    ),
                ),
                Table(
                    title="What the host did",
                    columns=("in the middle of gaps", "gaps", "share of the idle time"),
                    rows=tuple(
                        (what, str(count), f"{num_ns / idle_ns:.3f}")
                        for what, count, num_ns in recorded.causes()[:_CAUSES]
                    ),
                ),
                Table(
                    title="The longest gaps",
                    columns=("ms", "after", "before", "the host"),
                    rows=tuple(
                        (f"{gap.num_ns / _MS:.2f}", gap.before[:_WIDTH], gap.after[:_WIDTH], gap.did) for gap in longest
                    ),
                ),
            ),
        )


def _row(host: str, recorded: Recorded) -> tuple[str, ...]:
    return (
        host,
        f"{recorded.num_ns / 1e9:.2f}",
        f"{1 - recorded.idle_ns / (recorded.num_ns or 1):.3f}",
        str(recorded.num_events),
        str(len(recorded.gaps)),
        f"{recorded.idle_ns / 1e9:.3f}",
    )


@contextmanager
def _recorder(file: Path, seconds: float) -> Iterator[None]:
    """Servers that are started meanwhile can record."""
    paths = [str(_HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    changes = {"PYTHONPATH": os.pathsep.join(paths), "BENCH_RECORD_FILE": str(file), "BENCH_RECORD_S": str(seconds)}
    before: dict[str, Any] = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _worker_of(server: int) -> int:
    """The process of the worker of a server: its title says what it is."""
    group = os.getpgid(server)
    for place in Path("/proc").glob("[0-9]*"):
        try:
            title = (place / "cmdline").read_bytes()
            if title.startswith(b"tilework: worker ") and os.getpgid(int(place.name)) == group:
                return int(place.name)
        except OSError:
            continue  # It has ended meanwhile.
    raise CaseFailed("no worker of the server is found in /proc")
