"""SIGHUP and real processes: nothing ends by it, and the server and its front ends go by what was read again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from processes import descendants, is_alive, title
from tilework.cli.local_agents import free_port
from waiting import eventually

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-m", "tilework", "serve", "--backend", "modelled", "--devices", "2")
COSTS = ("--cost", "flux1dev_h100_eager", "--port", "0", "--json")


@contextmanager
def server(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of simulated devices in a session of its own, and its address."""
    command = [*COMMAND, *COSTS, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        assert process.wait() == 0, "it has stopped as it was asked to"


@pytest.mark.parametrize("frontends", [0, 2])
def test_a_key_is_rotated_and_the_log_goes_on_in_a_new_file(tmp_path: Path, frontends: int) -> None:
    settings, log = tmp_path / "tilework.toml", tmp_path / "server.log"
    settings.write_text('api_key = "first"\n')
    with server("--config", settings, "--log-file", log, "--frontends", frontends) as (process, url):

        def status(key: str) -> int:
            return httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

        started = descendants(process.pid)
        assert (status("first"), status("second")) == (200, 401)
        log.rename(tmp_path / "server.log.1")
        settings.write_text('api_key = "second"\nmax_steps = 9\n')
        process.send_signal(signal.SIGHUP)
        eventually(lambda: (status("first"), status("second")) == (401, 200))
        assert "not before the next start: max_steps" in log.read_text()
        settings.write_text('api_key = ""\nmax_steps = "x"\n')
        process.send_signal(signal.SIGHUP)
        eventually(lambda: f"none has changed: {settings}: max_steps (in the file" in log.read_text())
        assert status("second") == 200
        assert all(map(is_alive, started))


def test_no_process_of_a_server_ends_when_its_whole_group_gets_the_signal(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with server("--log-file", log, "--frontends", 1) as (process, url):
        kept = [pid for pid in descendants(process.pid) if "front end" in title(pid) or "worker" in title(pid)]
        assert len(kept) >= 3
        for pid in (process.pid, *kept):
            os.kill(pid, signal.SIGHUP)
        eventually(lambda: "settings were read again" in log.read_text())
        assert all(map(is_alive, kept))
        drawn = httpx.post(f"{url}/v1/images/generations", json={"prompt": "x", "size": "256x256", "steps": 1})
        assert drawn.status_code == 200, drawn.text


def test_a_standby_that_waits_opens_its_log_anew(tmp_path: Path) -> None:
    log = tmp_path / "standby.log"
    durable = ("--durable", tmp_path / "state")
    with server(*durable):
        command = [*COMMAND, *COSTS, *map(str, durable), "--standby", "--log-file", str(log)]
        standby = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        assert standby.stderr is not None
        assert "standing by" in standby.stderr.readline()
        log.rename(tmp_path / "standby.log.1")
        standby.send_signal(signal.SIGHUP)
        eventually(log.exists)
        assert standby.poll() is None
        standby.terminate()
        assert standby.wait() == 0, "it has stopped as it was asked to"


def test_an_agent_opens_its_log_anew(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    command = [sys.executable, "-m", "tilework", "agent", f"127.0.0.1:{free_port()}", "--log-file", str(log)]
    agent = subprocess.Popen(command, start_new_session=True, env=os.environ | {"TILEWORK_CLUSTER_TOKEN": "t"})
    try:
        eventually(lambda: "tilework: agent" in title(agent.pid))
        eventually(log.exists)
        log.rename(tmp_path / "agent.log.1")
        agent.send_signal(signal.SIGHUP)
        eventually(log.exists)
        assert agent.poll() is None
    finally:
        agent.terminate()
        assert agent.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=str)
def test_a_server_that_stops_does_so_by_itself(number: signal.Signals) -> None:
    """Signals do not end it until the process is no more, also in the moments without a loop."""
    with server() as (process, _):
        process.terminate()

        def has_ended() -> bool:
            process.send_signal(number)
            return process.poll() is not None

        eventually(has_ended)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=str)
def test_signals_during_the_imports_do_as_later(number: signal.Signals) -> None:
    process = subprocess.Popen([*COMMAND, *COSTS], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    eventually(lambda: caught_signals(process.pid) & 1 << (number - 1))
    process.send_signal(number)
    if number == signal.SIGHUP:
        assert json.loads(process.stdout.readline())["url"]
        process.terminate()
    assert process.wait() == 0


def caught_signals(pid: int) -> int:
    """A bit for each, the first for signal 1."""
    (line,) = (one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("SigCgt:"))
    return int(line.split()[1], 16)
