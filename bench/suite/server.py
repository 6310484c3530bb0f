"""A server of our own, started as a user starts it: `python -m tilework serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

import httpx

from suite.case import CaseFailed
from suite.children import end_with_parent

READY_TIMEOUT_S = 300.0
"""Large models load for a minute."""
_STOP_TIMEOUT_S = 60.0
_PROFILES = TemporaryDirectory(prefix="tilework-bench-")  # Not the user's: what was measured long ago is no part of it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that is ready. `ready_s` counts from before its process was started to the first 200 of /ready."""

    url: str
    ready_s: float
    pid: int


@contextmanager
def serving(
    workers: int,
    log: Path | None = None,
    settings: Mapping[str, object] | None = None,
    policy: str | None = None,
    model: str = "shapes",
    device: str = "cpu",
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """A shipped model, or one in a directory, on `workers` processes of one thread each; `settings` are the server's,
    by their names, and `options` others of the command.

    Raises CaseFailed if it does not start.
    """
    others = [*([] if log is None else ["--log", str(log)]), *([] if policy is None else ["--policy", policy])]
    with _started([*serve_arguments(workers, model, device), *others, *options], settings) as server:
        yield server


@contextmanager
def serving_simulated(
    devices: int, table: Path, policy: str, log: Path, settings: Mapping[str, object] | None = None
) -> Iterator[Server]:
    """Workers that take as long as the cost table says; `settings` are the server's, by their names.

    Raises CaseFailed if it does not start.
    """
    backend = ["--backend", "modelled", "--devices", str(devices), "--cost", str(table)]
    options = ["--policy", policy, "--log", str(log), "--port", "0", "--json"]
    with _started(["-m", "tilework", "serve", *backend, *options], settings) as server:
        yield server


@contextmanager
def _started(arguments: Sequence[str], settings: Mapping[str, object] | None = None) -> Iterator[Server]:
    start_s = time.perf_counter()
    values = {"profiles": f"{_PROFILES.name}/costs.sqlite", **(settings or {})}
    environment = os.environ | {f"TILEWORK_{name.upper()}": str(value) for name, value in values.items()}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=end_with_parent,  # noqa: PLW1509  It would keep its device's memory from the next one.
    )
    limit = Timer(READY_TIMEOUT_S, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        limit.cancel()
        if not line:
            raise CaseFailed(f"the server did not start within {READY_TIMEOUT_S:g} s; its message stands above")
        url = json.loads(line)["url"]
        _await_ready(url)
        yield Server(url=url, ready_s=time.perf_counter() - start_s, pid=process.pid)
    finally:
        limit.cancel()
        _stop(process)


def serve_arguments(workers: int, model: str = "shapes", device: str = "cpu") -> list[str]:
    place = ["--workers", str(workers), "--device", device, "--threads", "1"]
    return ["-m", "tilework", "serve", model, *place, "--port", "0", "--json"]


def cpu_s(pids: Sequence[int]) -> float:
    """The CPU time that processes have used so far, of all their threads and in the kernel, too."""
    fields = [Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def tilework_json(arguments: Sequence[str], ends_with: Collection[int] = (0,)) -> dict[str, Any]:
    """Run a `tilework` command with --json and read its answer. Raises CaseFailed for other exit codes than these."""
    run = [sys.executable, "-m", "tilework", *arguments, "--json"]
    done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in ends_with:
        raise CaseFailed(f"tilework {arguments[0]} ended with exit code {done.returncode}; its message stands above")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _await_ready(url: str) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.01)
    raise CaseFailed(f"/ready did not become 200 within {READY_TIMEOUT_S:g} s")


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
