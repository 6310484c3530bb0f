"""A server over two agents that is killed again and again, while a standby waits to take over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from suite.case import CaseFailed
from tilework.cli.local_agents import free_port, local_agents
from tilework.cli.options.nodes import TOKEN
from tilework.control.log import read_log
from tilework.core.actions import Finish, RunWork
from tilework.core.events import Restored

_SECRET = "for this bench"
_PATIENCE_S = 300.0
_POLL_S = 0.005
_STEPS = 24
_BODY = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": _STEPS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """One kill: seconds until the standby answered, and until all that had been accepted was done.

    Of the requests some were `lost`, and some done `twice`. `steps_again` of those that had been made were made again.
    """

    answers_s: float
    done_s: float
    lost: int
    twice: int
    steps_again: int


@dataclass(slots=True)
class Servers:
    """Servers that use one durable directory, one after the other, and two agents."""

    directory: Path
    agents_port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> None:
        """Start a server, which stands by while there is another one."""
        where = ["--nodes", "2", "--workers", "1", "--agents", f"127.0.0.1:{self.agents_port}"]
        options = ["--port", str(self.http_port), "--durable", str(self.directory / "state"), "--standby", "--json"]
        command = [sys.executable, "-m", "tilework", "serve", "shapes", *where, *options]
        environment = os.environ | {TOKEN: _SECRET, "TILEWORK_PROFILES": str(self.directory / "costs.sqlite")}
        with self._said.open("a") as said:
            self.processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment)
            )

    @property
    def _said(self) -> Path:
        return self.directory / "servers.log"

    def await_ready(self) -> None:
        """Wait until the server that was started last serves."""
        output = self.processes[-1].stdout
        assert output is not None
        if not output.readline():
            raise CaseFailed(f"a server did not start: {self._said.read_text()[-2000:]}")

    def take_over(self, num_calls: int, after_s: float) -> Takeover:
        """Send calls, kill the server `after_s` after the first has begun, and wait until the standby has done all."""
        self.start()
        _await(lambda: self._said.read_text().count("standing by") == len(self.processes) - 1)
        uids = [self._call(seed) for seed in range(num_calls)]
        _await(lambda: self._step(uids[0]) > 0)
        time.sleep(after_s)
        made = {uid: self._step(uid) for uid in uids}
        self.processes[-2].kill()
        killed_s = time.monotonic()
        _await(lambda: self._answers(uids[-1]))
        answers_s = time.monotonic() - killed_s
        _await(lambda: all(self._status(uid)["status"] in ("done", "failed", "cancelled") for uid in uids))
        done_s = time.monotonic() - killed_s
        self.await_ready()
        lost = sum(self._status(uid)["status"] != "done" for uid in uids)
        twice, kept = self._of_logs()
        again = sum(max(0, step - kept[uid]) for uid, step in made.items() if uid in kept)
        return Takeover(answers_s=answers_s, done_s=done_s, lost=lost, twice=twice, steps_again=again)

    def _call(self, seed: int) -> str:
        route, headers = f"{self._url}/v1/images/generations", {"Prefer": "respond-async"}
        answer = httpx.post(route, json=_BODY | {"seed": seed}, headers=headers, trust_env=False)
        if answer.status_code != 202:
            raise CaseFailed(f"a call was refused: {answer.text}")
        return answer.headers["x-request-id"]

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def _status(self, uid: str) -> Any:
        return httpx.get(f"{self._url}/v1/requests/{uid}", trust_env=False).json()

    def _step(self, uid: str) -> int:
        return int(self._status(uid)["images"][0]["step"])

    def _answers(self, uid: str) -> bool:
        try:
            return httpx.get(f"{self._url}/v1/requests/{uid}", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def _of_logs(self) -> tuple[int, dict[str, int]]:
        """By the logs of the last two servers: how many requests were done twice, and the steps that each had kept."""
        logs = sorted((self.directory / "state").glob("events-*.jsonl"), key=lambda path: int(path.stem[7:]))
        before, after = (list(read_log(path.read_text().splitlines())[1]) for path in logs[-2:])
        ended = {one.uid for entry in before for one in entry.actions if isinstance(one, Finish)}
        restored = {one.event.request.uid: one.event.position for one in after if isinstance(one.event, Restored)}
        jobs = dict(enumerate(restored))  # The next server counts its jobs anew, in the order in which they come.
        works = [one.work for entry in after for one in entry.actions if isinstance(one, RunWork)]
        begun = {jobs[job_id] for work in works if work.stage.has_steps for job_id in work.job_ids if job_id in jobs}
        kept = {uid.rpartition("-")[0]: max(0, position - 1) for uid, position in restored.items()}
        return len(ended & begun), kept


def _await(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise CaseFailed(f"nothing happened within {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)


@contextmanager
def servers() -> Iterator[Servers]:
    """A server that serves `shapes` over two agents on this machine."""
    with TemporaryDirectory(prefix="tilework-takeover-") as path, ExitStack() as stack:
        started = Servers(Path(path))
        stack.enter_context(local_agents(2, port=started.agents_port, token=_SECRET, log=Path(path) / "agents.log"))
        try:
            started.start()
            started.await_ready()
            yield started
        finally:
            for process in started.processes:
                process.kill()
                process.wait()
