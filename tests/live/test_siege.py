"""Floods of connections on a whole server that may have 1,024 files open: all that it accepted ends as it would have.

Each lasts `SIEGE_S` seconds (default 10).
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from builders import table
from tilework.cost.table_file import table_json
from waiting import eventually

SIEGE_S = float(os.environ.get("SIEGE_S", "10"))
NUM_FILES = 1024
NUM_CALLS = 20
MOST_GROWTH = 1.05
_AT_ONCE, _PAUSE_S = 20, 0.02  # At most 1,000 connections a second: more is a question of cores.
KEYS = '[tenants.one]\nkeys = ["key-one"]\n[tenants.other]\nkeys = ["key-other"]\n'
OTHER = {"Authorization": "Bearer key-other"}
BODY = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 2}


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def later(self, seed: int) -> str:
        headers = OTHER | {"Prefer": "respond-async"}
        answer = httpx.post(f"{self.url}/v1/images/generations", json={**BODY, "seed": seed}, headers=headers)
        assert answer.status_code == 202, answer.text
        return answer.headers["x-request-id"]

    def status(self, uid: str) -> str:
        return str(httpx.get(f"{self.url}/v1/requests/{uid}", headers=OTHER).json()["status"])

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()


@contextmanager
def serving(place: Path) -> Iterator[Server]:
    """A server whose processes may have 1,024 files open, softly and at all."""
    costs, tenants, log = place / "costs.json", place / "tenants.toml", place / "log"
    costs.write_text(json.dumps(table_json(table(0.02, 0.02, 0.02, pipeline="shapes"))))
    tenants.write_text(KEYS)
    options = ["--durable", str(place / "state"), "--workers", "1", "--port", "0", "--cost", str(costs), "--json"]
    process = subprocess.Popen(
        [
            *("bash", "-c", f'ulimit -n {NUM_FILES}; exec "$@"', "bash"),
            *(sys.executable, "-m", "tilework", "serve", "shapes", *options, "--log-file", str(log)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TILEWORK_DRAIN_S": "0.2", "TILEWORK_TENANTS": str(tenants)},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "the server did not start"
        yield Server(process, json.loads(line)["url"], log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


@dataclass
class Flood:
    """Connections without a key from one thread, opened anew as the server closes them; each begins with `first`."""

    server: Server
    first: bytes
    number: int = 1500
    num_opened: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Flood:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()

    def _run(self) -> None:
        held: dict[int, socket.socket] = {}
        watched = select.poll()
        while not self.over.is_set():
            for _ in range(_AT_ONCE):
                if len(held) < self.number and (one := self._connect()) is not None:
                    held[one.fileno()] = one
                    watched.register(one, select.POLLIN)
            for number, _ in watched.poll(0):
                watched.unregister(number)
                held.pop(number).close()
            self.over.wait(_PAUSE_S)
        for one in held.values():
            one.close()

    def _connect(self) -> socket.socket | None:
        one = socket.socket()
        one.settimeout(1)
        try:
            one.connect(self.server.address)
            one.sendall(self.first)
        except OSError:
            one.close()
            return None
        self.num_opened += 1
        return one


@pytest.fixture
def files() -> Iterator[None]:
    """This process may open more of them than the server."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def seconds_of(ask: Callable[[], Any]) -> float:
    begin_s = time.monotonic()
    ask()
    return time.monotonic() - begin_s


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"], ids=["silent", "slow heads"])
def test_a_flood_of_connections(tmp_path: Path, files: None, first: bytes) -> None:
    with serving(tmp_path) as server:
        besiege(server, first, seconds=1)  # What it has from then on, it needs: threads, caches, records.
        before_bytes = server.resident_bytes()
        print(besiege(server, first, SIEGE_S))
        print(f"memory: {before_bytes >> 20} to {server.resident_bytes() >> 20} MiB")
        eventually(lambda: server.resident_bytes() <= MOST_GROWTH * before_bytes)
        lines = server.log.read_text().splitlines()
        assert len(lines) <= 200, lines[:50]


def besiege(server: Server, first: bytes, seconds: float) -> str:
    """Make calls and probes under a flood, and see each call end as it would have; returns what was measured."""
    refused, probes_s, uids = 0, list[float](), list[str]()
    with Flood(server, first) as flood:
        eventually(lambda: flood.num_opened > 1000)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s or len(uids) < NUM_CALLS:
            try:
                probes_s.append(seconds_of(lambda: httpx.get(f"{server.url}/health").raise_for_status()))
                if len(uids) < NUM_CALLS:
                    uids.append(server.later(len(uids)))
            except httpx.HTTPError:
                refused += 1
        eventually(lambda: all(server.status(uid) == "done" for uid in uids))
    for uid in uids:
        assert httpx.get(f"{server.url}/v1/requests/{uid}/content", headers=OTHER).status_code == 200
    assert refused <= 0.02 * len(probes_s), "one may lose its place before its head has come, but seldom"
    return (
        f"{flood.num_opened} connections without a key, {len(uids)} calls done, {len(probes_s)} probes of median"
        f" {1000 * median(probes_s):.1f} and at most {1000 * max(probes_s):.1f} ms, {refused} refused"
    )
