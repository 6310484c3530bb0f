"""`tilework serve --frontends`: front ends are killed under load, then the server itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from builders import table
from processes import title
from tilework.control.log import read_log, replay
from tilework.core.actions import Accept, Finish
from tilework.cost.table_file import table_json
from waiting import PATIENCE_S, eventually

CLIENTS, CALLS, KILLS = 4, 8, 3
BODY = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 4}


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def front_ends(self) -> list[int]:
        """Process ids."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if "front end" in title(pid)]

    def get(self, path: str) -> httpx.Response:
        """On a connection of its own, so that either front end may take it."""
        return httpx.get(self.url + path, timeout=60)

    def num_open(self) -> int:
        return sum(call["status"] != "done" for call in self.get("/v1/requests").json()["data"])


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    costs = folder / "costs.json"
    costs.write_text(json.dumps(table_json(table(0.02, 0.02, 0.02, pipeline="shapes"))))
    options = ["--workers", "1", "--port", "0", "--cost", str(costs), "--frontends", "2", "--json"]
    command = [sys.executable, "-m", "tilework", "serve", "shapes", *options, "--durable", str(folder / "state")]
    environ = os.environ | {"TILEWORK_DRAIN_S": "0.2"}
    with (folder / "stderr").open("w") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environ)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "the server did not start"
        yield Server(process, json.loads(line)["url"])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Client(threading.Thread):
    """Sends calls with keys, one after another, and again if its connection breaks. Every other one waits for it."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__()
        self.url, self.number = url, number
        self.uids: list[str] = []
        self.num_broken = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=120) as http:
            for call in range(CALLS):
                later = {"Prefer": "respond-async"} if call % 2 else {}
                self._send(http, {"Idempotency-Key": f"{self.number}-{call}", **later}, call)

    def _send(self, http: httpx.Client, headers: dict[str, str], call: int) -> None:
        while True:
            try:
                answer = http.post("/v1/images/generations", json=BODY | {"seed": call}, headers=headers)
            except httpx.TransportError:
                self.num_broken += 1
                continue
            if answer.status_code not in (200, 202):
                self.wrong.append(answer.text)
            self.uids.append(answer.headers["x-request-id"])
            return


def lose(url: str) -> None:
    """A call whose client waits until the server is no more. Its front end says so."""
    answer = httpx.post(f"{url}/v1/images/generations", json=BODY | {"num_inference_steps": 100}, timeout=120)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_lost")


def ended(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """How often each image was accepted, and how often it ended, by the log of the first start."""
    lines = (folder / "state" / "events-1.jsonl").read_text().splitlines()
    assert replay(lines)[1] is None
    actions: list[Any] = [action for entry in read_log(lines)[1] for action in entry.actions]
    accepted = {action.job_id: action.uid for action in actions if isinstance(action, Accept)}
    finished = Counter(action.uid for action in actions if isinstance(action, Finish))
    return Counter(accepted.values()), finished


@pytest.mark.slow
def test_what_a_killed_front_end_had_taken_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        clients = [Client(server.url, number) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        killed: list[int] = []
        for kill in range(KILLS):
            wanted = (kill + 1) * CLIENTS * CALLS // (KILLS + 2)
            eventually(lambda wanted=wanted: sum(len(client.uids) for client in clients) >= wanted)
            eventually(lambda: len(server.front_ends()) == 2)
            killed.append(server.front_ends()[kill % 2])
            os.kill(killed[-1], signal.SIGKILL)
        for client in clients:
            client.join(120)
        assert [client.wrong for client in clients] == [[]] * CLIENTS
        uids = {uid for client in clients for uid in client.uids}
        assert len(uids) == CLIENTS * CALLS, "each key leads to one call"
        assert sum(client.num_broken for client in clients) >= 1, "no connection was broken: nothing is shown"
        for uid in uids:
            eventually(lambda uid=uid: server.get(f"/v1/requests/{uid}").json()["status"] == "done")
            assert server.get(f"/v1/images/{uid}-0/content").status_code == 200
        eventually(lambda: len(set(server.front_ends()) - set(killed)) == 2)
        last = server.front_ends()
        waiting = ThreadPoolExecutor(CLIENTS)
        lost = [waiting.submit(lose, server.url) for _ in range(CLIENTS)]
        eventually(lambda: server.num_open() == CLIENTS)
        server.process.kill()
        server.process.wait()
        for one in lost:
            one.result()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in last))
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    accepted, finished = ended(tmp_path)
    assert {uid for uid, times in accepted.items() if times == finished[uid] == 1} == {f"{uid}-0" for uid in uids}
    assert (len(accepted), len(finished)) == (len(uids) + CLIENTS, len(uids)), "each ends exactly once"
    with serving(tmp_path) as server:
        assert all(server.get(f"/v1/requests/{uid}").json()["status"] == "done" for uid in uids)
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in (tmp_path / "stderr").read_text()


@pytest.mark.slow
def test_a_client_that_waits_without_a_key_is_gone_with_its_front_end(tmp_path: Path) -> None:
    """As with any connection that breaks: its call costs no further device time."""
    with serving(tmp_path) as server:
        broken: list[BaseException] = []

        def wait() -> None:
            try:
                httpx.post(f"{server.url}/v1/images/generations", json=BODY | {"num_inference_steps": 200}, timeout=60)
            except httpx.TransportError as error:
                broken.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: server.get("/v1/requests").json()["data"])
        for pid in server.front_ends():
            os.kill(pid, signal.SIGKILL)
        waiting.join(30)
        assert len(broken) == 1
        (call,) = server.get("/v1/requests").json()["data"]
        eventually(lambda: server.get(f"/v1/requests/{call['uid']}").json()["status"] == "cancelled")
