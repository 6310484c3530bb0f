"""`tilework serve --durable`, killed and started again: every picture is there, once, and the same as ever."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from redis import Redis

from builders import table
from stages import DIFFUSE
from store.redis_server import redis_server, skip_without_redis
from tilework.control.log import LogEntry, read_log, replay
from tilework.core.actions import Accept, RunWork
from tilework.core.events import Restored
from tilework.cost.table_file import table_json
from tilework.store.epochs import JOURNAL, folder_of, newest
from waiting import eventually

ASYNC = {"Prefer": "respond-async"}
STEPS = 24


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    restored: int

    def post(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        body = {"size": "96x96", "num_inference_steps": STEPS, **body}
        return httpx.post(f"{self.url}/v1/images/generations", json=body, headers=headers, timeout=60)

    def later(self, seed: int, n: int = 1, key: str | None = None) -> httpx.Response:
        headers = ASYNC if key is None else ASYNC | {"Idempotency-Key": key}
        answer = self.post({"prompt": "a red circle", "seed": seed, "n": n}, **headers)
        assert answer.status_code in (200, 202), answer.text
        return answer

    def status(self, uid: str) -> Any:
        return httpx.get(f"{self.url}/v1/requests/{uid}").json()

    def calls(self) -> list[str]:
        """Newest first."""
        return [call["uid"] for call in httpx.get(f"{self.url}/v1/requests").json()["data"]]

    def await_step(self, uid: str, index: int, step: int) -> None:
        eventually(lambda: self.status(uid)["images"][index]["step"] >= step)

    def pictures(self, uid: str) -> list[bytes]:
        """As soon as they are done."""
        eventually(lambda: self.status(uid)["status"] == "done")
        files = [f"{self.url}/v1/images/{image['uid']}/content" for image in self.status(uid)["images"]]
        return [httpx.get(file).content for file in files]

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@contextmanager
def serving(state: Path, costs: Path, *more: str) -> Iterator[Server]:
    options = [*more, "--durable", str(state), "--workers", "1", "--port", "0", "--cost", str(costs), "--json"]
    environ = os.environ | {"TILEWORK_DRAIN_S": "0.2"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tilework", "serve", "shapes", *options], stdout=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "the server did not start"
        ready = json.loads(line)
        yield Server(process, ready["url"], ready["restored"])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def entries(state: Path, number: int) -> list[LogEntry]:
    return list(read_log((state / f"events-{number}.jsonl").read_text().splitlines())[1])


def own_blobs(state: Path) -> list[Path]:
    roots = [Path("/dev/shm"), Path("/tmp")]
    owners = [owner for root in roots for owner in root.glob("tilework-*/owner")]
    return [owner.parent for owner in owners if owner.read_text() == str(state.resolve())]


@pytest.mark.slow
def test_a_killed_server_finishes_what_it_had_accepted(tmp_path: Path) -> None:
    """The stop by SIGTERM, which leaves what is open to the next start, is in `test_durable`."""
    state, step = tmp_path / "state", Random().randrange(4, STEPS - 4)
    print(f"killed at step {step}")
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(table_json(table(0.02, 0.02, 0.02, pipeline="shapes"))))
    with serving(state, costs) as server:
        undisturbed = [server.pictures(uid_of(server.later(seed, n))) for seed, n in ((10, 2), (20, 1), (30, 1))]
        running, keyed = uid_of(server.later(10, 2)), uid_of(server.later(20, key="k"))
        waits = threading.Thread(target=lose, args=(server, 30))
        waits.start()
        eventually(lambda: len(server.calls()) == 6)
        server.await_step(running, 0, step)
        kill_amid(server.process.pid, lambda: kept_step(state, f"{running}-0") > 0)
        waits.join()
    assert len(own_blobs(state)) == 1
    with serving(state, costs) as server:
        assert server.restored == 4
        assert httpx.get(f"{server.url}/ready").json()["restored_requests"] == 4
        lost = server.calls()[0]
        assert [server.pictures(uid) for uid in (running, keyed, lost)] == undisturbed
        answer = server.later(20, key="k")
        assert (answer.headers["x-request-id"], answer.headers["Idempotent-Replayed"]) == (keyed, "true")
        segments = server.status(running)["images"][0]["timeline"]["segments"]
        num_steps = sum(one["steps"] for one in segments if one["stage"] == "diffuse")
        assert num_steps < STEPS, "it went on from a checkpoint"
        assert server.stop(signal.SIGTERM) == 0
    assert own_blobs(state) == [], "nothing is left in the memory that the workers share"
    check_logs(state, f"{running}-0")


@pytest.mark.slow
def test_what_a_killed_server_could_not_write_to_redis_is_there_after_its_next_start(tmp_path: Path) -> None:
    skip_without_redis()
    state, costs = tmp_path / "state", tmp_path / "costs.json"
    costs.write_text(json.dumps(table_json(table(0.02, 0.02, 0.02, pipeline="shapes"))))
    with redis_server(tmp_path) as (url, redis):
        with serving(state, costs, "--results", url) as server:
            redis.kill()
            redis.wait()
            uid = uid_of(server.later(10, 2))
            pictures = server.pictures(uid)
            assert all(picture.startswith(b"\x89PNG") for picture in pictures)
            server.stop(signal.SIGKILL)
        with serving(state, costs, "--results", url) as server:
            assert server.pictures(uid) == pictures, "while Redis is down"
            assert httpx.get(f"{server.url}/ready").json()["waiting_results"] == 2
            with redis_server(tmp_path, port=int(url.removesuffix("/0").rpartition(":")[2])):
                eventually(lambda: httpx.get(f"{server.url}/ready").json()["waiting_results"] == 0)
                with closing(Redis.from_url(url)) as client:
                    found = [client.get(f"tilework:{{default/{uid}-{index}}}:0") for index in range(2)]
                assert found == pictures


def uid_of(answer: httpx.Response) -> str:
    return answer.headers["x-request-id"]


def lose(server: Server, seed: int) -> None:
    """A call whose client waits until the server is no more."""
    with pytest.raises(httpx.TransportError):
        server.post({"prompt": "a red circle", "seed": seed, "n": 1})


def kill_amid(pid: int, is_amid: Callable[[], bool]) -> None:
    stop_amid(pid, is_amid)
    os.kill(pid, signal.SIGKILL)


def stop_amid(pid: int, is_amid: Callable[[], bool]) -> None:
    """Stop a server in a state that passes, of which its directory tells: it stands still while that is looked at."""

    def is_caught() -> bool:
        if not is_amid():
            return False
        os.kill(pid, signal.SIGSTOP)
        if is_amid():
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    eventually(is_caught)


def kept_step(state: Path, uid: str) -> int:
    """The step of an image's latest checkpoint, as the next start would find it; 0 if it has none."""
    with closing(sqlite3.connect(f"file:{folder_of(state, newest(state)) / JOURNAL}?mode=ro", uri=True)) as journal:
        (position,) = journal.execute("SELECT max(position) FROM state WHERE uid = ?", (uid,)).fetchone()
    return steps_done(position or 0)


def steps_done(position: int) -> int:
    """The encode is the first position."""
    return max(0, position - 1)


def check_logs(state: Path, running: str) -> None:
    """Each start has a log that can be replayed, on a clock that goes on; what it took over went on from where its
    checkpoint says, and at the kill that of the running image said something."""
    logs = [entries(state, number) for number in (1, 2)]
    times_ns = [entry.now_ns for log in logs for entry in log]
    assert times_ns == sorted(times_ns)
    reached = kept_steps(logs[1])
    assert all(reached[uid] == step for uid, step in first_steps(logs[1]).items())
    assert reached[running] > 0
    for number in (1, 2):
        assert replay((state / f"events-{number}.jsonl").read_text().splitlines())[1] is None


def kept_steps(log: list[LogEntry]) -> dict[str, int]:
    """What was taken over, by uid: the steps of the state that was kept."""
    events = (entry.event for entry in log)
    return {event.request.uid: steps_done(event.position) for event in events if isinstance(event, Restored)}


def first_steps(log: list[LogEntry]) -> dict[str, int]:
    """By uid, at which step the first work with steps began."""
    actions = [action for entry in log for action in entry.actions]
    uids = {action.job_id: action.uid for action in actions if isinstance(action, Accept)}
    works = [action.work for action in actions if isinstance(action, RunWork) and action.work.stage.name == DIFFUSE]
    return {uids[work.job_ids[0]]: work.members[0].first_step for work in reversed(works)}
