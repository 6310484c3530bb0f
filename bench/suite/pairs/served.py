"""One start of `tilework serve`: refused with a sentence, or called for one of everything, and stopped."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread, Timer

from suite.children import end_with_parent
from suite.pairs.calls import answers
from tilework.cli.local_agents import free_port, local_agents, session

READY_S, STOP_S = 240.0, 90.0
"""Far beyond what a busy machine takes: what is not there by then hangs."""
_EXAMPLES = Path(__file__).parents[3] / "examples"
_REFUSED = 2
"""The exit code of a command that is refused."""
_BAD_LINES = ("Traceback", "ERROR ", "CRITICAL ", "Task exception", "never retrieved", "never awaited")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a start ended. With a `sentence` it was refused; else `answers` say what each call got.

    `faults` are what neither may have: an empty tuple is a start as it should be.
    """

    sentence: str = ""
    answers: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


class _Collector(BaseHTTPRequestHandler):
    """Takes traces and webhooks."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  The name is the library's.
        pass


@contextmanager
def _collector() -> Iterator[int]:
    """Its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


_SERVE = (sys.executable, "-m", "tilework", "serve")


def start(arguments: Sequence[str], files: Path, profiles: Path, command: Sequence[str] = _SERVE) -> Outcome:
    """Start a server with these arguments, in which `{files}`, `{own}`, `{port}`, `{probes}`, `{agents}`, `{collector}`
    and `{key}` are filled in. It keeps what it measures in `profiles`."""
    with ExitStack() as stack:
        own = Path(stack.enter_context(TemporaryDirectory(prefix="pairs-")))
        places = {
            "files": str(files),
            "own": str(own),
            "port": str(free_port()),
            "probes": str(free_port()),
            "agents": str(free_port()),
            "collector": str(stack.enter_context(_collector())),
            "key": secrets.token_hex(8),
        }
        given = [word.format(**places) for word in arguments]
        token = secrets.token_hex(8)
        if "--nodes" in given:
            number, log = int(given[given.index("--nodes") + 1]), own / "agents.log"
            stack.enter_context(local_agents(number, port=int(places["agents"]), token=token, log=log))
        return _Started([*command, *given], own, files, profiles, token).outcome()


def _cause(lines: Sequence[str]) -> str:
    """Where a traceback ends, and in what."""
    after = next((place for place, line in enumerate(lines) if not line.startswith(" ")), len(lines))
    return " ".join(line.strip() for line in lines[max(0, after - 2) : after + 1])


class _Started:
    def __init__(self, command: list[str], own: Path, files: Path, profiles: Path, token: str) -> None:
        self._command = command
        self._own = own
        self._files = files
        for name in ("home", "tmp", "here"):
            (own / name).mkdir()
        python_path = [str(files), str(_EXAMPLES), os.environ.get("PYTHONPATH", "")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TILEWORK_")}
        self._environment = kept | {
            "HOME": str(own / "home"),
            "XDG_CACHE_HOME": str(profiles),
            "TMPDIR": str(own / "tmp"),
            "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
            "TILEWORK_WEBHOOK_SECRET": "a secret of this bench",
            "TILEWORK_CLUSTER_TOKEN": token,
        }
        self._faults = list[str]()

    def outcome(self) -> Outcome:
        port = [] if "--port" in self._command else ["--port", "0"]
        command = [*self._command, *port, "--json"]
        log = self._own / "stderr"
        with (
            log.open("wb") as stderr,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=self._environment,
                cwd=self._own / "here",
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509
            ) as process,
        ):
            try:
                return self._of(process, log)
            finally:
                for pid in session(process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def _of(self, process: subprocess.Popen[bytes], log: Path) -> Outcome:
        assert process.stdout is not None
        limit = Timer(READY_S, process.kill)
        limit.start()
        line = process.stdout.readline()
        limit.cancel()
        if not line:
            code = process.wait()
            sentence = log.read_text("utf-8", "replace").strip()
            if code != _REFUSED or "Traceback" in sentence or "this is a bug" in sentence:
                self._faults.append(f"it ended with exit code {code}: {sentence[-600:]}")
            self._look_after(process.pid, [])
            for path, name in ((self._own, "{own}"), (self._files, "{files}")):
                sentence = sentence.replace(str(path), name)
            sentence = sentence.replace("\n", " ")
            return Outcome(sentence=sentence, faults=tuple(self._faults))
        url = json.loads(line)["url"]
        got, faults = answers(url, self._command)
        self._faults += faults
        shared = _shared_memory(session(process.pid))
        process.send_signal(signal.SIGTERM)
        try:
            if code := process.wait(STOP_S):
                self._faults.append(f"SIGTERM: exit code {code}")
        except subprocess.TimeoutExpired:
            self._faults.append(f"SIGTERM: still there after {STOP_S:g} s")
            process.kill()
            process.wait()
        said = log.read_text("utf-8", "replace").splitlines()
        self._faults += [
            f"log: {text}{_cause(said[place + 1 :]) if 'Traceback' in text else ''}"
            for place, text in enumerate(said)
            if any(one in text for one in _BAD_LINES)
        ]
        self._look_after(process.pid, shared)
        self._check_port(url)
        return Outcome(answers=got, faults=tuple(self._faults))

    def _look_after(self, pid: int, shared: Sequence[str]) -> None:
        """Nothing is left of a server that has ended, but what its options ask for."""
        end_s = time.monotonic() + 5
        while (left := session(pid)) and time.monotonic() < end_s:  # The kernel takes a moment.
            time.sleep(0.05)
        self._faults += [f"left behind: process {one}" for one in left]
        self._faults += [f"left behind: {path}" for path in shared if Path(path).exists()]
        for name in ("home", "tmp", "here"):
            folder = self._own / name
            self._faults += [f"left behind: {path.relative_to(self._own)}" for path in sorted(folder.rglob("*"))]

    def _check_port(self, url: str) -> None:
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind(("127.0.0.1", int(url.rpartition(":")[2])))
            except OSError as error:
                self._faults.append(f"port: {error.strerror}")


def _shared_memory(pids: Sequence[int]) -> list[str]:
    """The folders of shared memory that these processes hold a lock in."""
    found = set[str]()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = Path(os.readlink(link))
            except OSError:
                continue
            if target.is_relative_to("/dev/shm/") and target.name == "lock":
                found.add(str(target.parent))
    return sorted(found)
