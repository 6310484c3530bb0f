"""Nodes and servers that are lost on a network that delays and loses, each on a host of its own."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.hosts import Hosts, hosts, log_lines
from suite.network import Way, missing
from suite.stats import exact
from tilework.control.log import BadLog, LogEntry, read_log
from tilework.core.actions import Accept, Finish, RunWork
from tilework.core.events import DeviceLost, NodeLost, Restored

_PATIENCE_S = 180.0
_POLL_S = 0.25
_ENDS = ("done", "failed", "cancelled")
_ANSWER_S = 5.0
_STEPS = 12
_PROMISE = {"slo_s": 20.0, "on_miss": "reject"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BadNetwork:
    """For each of `seeds`: for `seconds`, `rate` calls a second, of which a share `promised` ask for a promise.

    Meanwhile nodes have `faults` (killed and started again, stopped for 2 to 15 s, or cut off for as long), one of them
    is cut off for `long_cut_s`, and the server is killed `kills` times, each time with a standby on another host. So
    many are run `at_once`.
    """

    seeds: tuple[int, ...] = tuple(range(1, 11))
    seconds: float = 150.0
    rate: float = 1.2
    promised: float = 0.25
    nodes: int = 3
    faults: int = 12
    kills: int = 2
    long_cut_s: float = 75.0
    delay_s: float = 0.02
    loss: float = 0.01
    pictures: int = 12
    at_once: int = 3

    @classmethod
    def make(cls, quick: bool) -> BadNetwork:
        return cls(seeds=(1,), seconds=60.0, faults=5, kills=1, long_cut_s=20.0) if quick else cls()

    def measure(self, note: Note) -> Finding:
        if (lacks := missing()) is not None:
            raise CaseFailed(lacks)
        with ThreadPoolExecutor(self.at_once) as pool:
            runs = list(pool.map(partial(self._run, note=note), self.seeds))
        totals = Counter[str]()
        for run in runs:
            totals.update(run)
        rows = tuple(
            (str(seed), *(str(run[name]) for name in _COLUMNS)) for seed, run in zip(self.seeds, runs, strict=True)
        )
        checks = [
            Check(what=what, measured=exact(float(totals[name])), high=0.0)
            for name, what in (
                ("lost", "accepted calls that were lost, or not done"),
                ("twice", "images that ended in two starts of the server"),
                ("different", "pictures that differ from those drawn undisturbed"),
                ("wrongly broken", "promises broken of which no run was on a device or server that was lost"),
            )
        ]
        return Finding(
            checks=tuple(checks),
            method=(
                f"Two servers (one stands by, on the same directory) and {self.nodes} nodes, each in a network "
                f"namespace; a router in user space delays each way by {self.delay_s * 1000:g} ms and loses "
                f"{self.loss:.0%} of packets. The model is `shapes`, {_STEPS} steps, exact; calls are asynchronous, "
                "with keys, and are sent again until they are accepted or refused.",
                "Twice: its end was logged by a server that was killed before it was in the journal, so that no client "
                "was answered, and again by the next one.",
            ),
            tables=(Table(title="By seed", columns=("seed", *_COLUMNS), rows=rows),),
        )

    def _run(self, seed: int, note: Note) -> Counter[str]:
        with TemporaryDirectory(prefix="tilework-badnetwork-") as path:
            way = Way(delay_s=self.delay_s, loss=self.loss)
            options = ["shapes", "--workers", "1"]
            with hosts(Path(path), num_nodes=self.nodes, options=options, seed=seed, way=way) as all_of_it:
                clients = _Clients(all_of_it, Random(seed), self)
                clients.draw_references()
                faults = threading.Thread(target=_Faults(all_of_it, Random(seed + 1000), self, note).run)
                faults.start()
                clients.send()
                faults.join()
                clients.await_ends()
                found = clients.found
            found.update(_of_logs([_entries(lines) for lines in log_lines(all_of_it.state)], clients.late))
        note(f"seed {seed}: " + ", ".join(f"{found[name]} {name}" for name in _COLUMNS))
        return found


_COLUMNS = (
    *("accepted", "done", "refused", "promised", "broken", "wrongly broken"),
    *("lost", "twice", "different", "sent again"),
)


@dataclass(kw_only=False)
class _Clients:
    hosts: Hosts
    rng: Random
    case: BadNetwork
    found: Counter[str] = field(default_factory=Counter)
    uids: dict[str, int] = field(default_factory=dict)
    """What was accepted: the number of its picture."""
    late: set[str] = field(default_factory=set)
    """Promised images that were late."""
    pictures: dict[int, str] = field(default_factory=dict)
    _promised: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._http = httpx.Client(timeout=_ANSWER_S, trust_env=False)
        self._at = 0

    def draw_references(self) -> None:
        for picture in range(self.case.pictures):
            uid = self._send(f"reference {picture}", picture, {})
            assert uid is not None
            self._await(uid)
            self.pictures[picture] = self._digest(uid)

    def send(self) -> None:
        """Send calls at random times, and note what becomes of each."""
        end_s = time.monotonic() + self.case.seconds
        number = 0
        while time.monotonic() < end_s:
            picture, is_promise = self.rng.randrange(self.case.pictures), self.rng.random() < self.case.promised
            uid = self._send(f"call {number}", picture, _PROMISE if is_promise else {})
            number += 1
            if uid is None:
                self.found["refused"] += 1
            else:
                self.uids[uid] = picture
                self.found["accepted"] += 1
                if is_promise:
                    self._promised.add(uid)
                    self.found["promised"] += 1
            time.sleep(self.rng.expovariate(self.case.rate))

    def await_ends(self) -> None:
        for uid, picture in self.uids.items():
            status = self._await(uid)
            if status is None or status["status"] != "done":
                self.found["lost"] += 1
                continue
            self.found["done"] += 1
            self.found["different"] += self._digest(uid) != self.pictures[picture]
            if uid in self._promised and not status["images"][0]["timeline"]["on_time"]:
                self.found["broken"] += 1
                self.late.add(f"{uid}-0")

    def _send(self, key: str, picture: int, more: dict[str, Any]) -> str | None:
        """The uid of a call once it is accepted; None if it is refused."""
        what = {"prompt": "a red circle", "seed": picture, "exact": True} | more
        body = {"size": "64x64", "num_inference_steps": _STEPS} | what
        headers = {"Prefer": "respond-async", "Idempotency-Key": key}
        while True:
            answer = self._ask("POST", "/v1/images/generations", json=body, headers=headers)
            if answer.status_code == 202:
                return str(answer.headers["x-request-id"])
            if answer.status_code not in {409, 503} or (answer.status_code == 503 and more):
                return None  # Of a promise, too, for which no device is sure.
            self.found["sent again"] += 1
            time.sleep(_POLL_S)

    def _await(self, uid: str) -> Any:
        end_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end_s:
            answer = self._ask("GET", f"/v1/requests/{uid}")
            if answer.status_code == 404:
                return None
            if answer.status_code == 200 and answer.json()["status"] in _ENDS:
                return answer.json()
            time.sleep(_POLL_S)
        return None

    def _digest(self, uid: str) -> str:
        answer = self._ask("GET", f"/v1/images/{uid}-0/content")
        return hashlib.sha256(answer.content).hexdigest() if answer.status_code == 200 else f"{answer.status_code}"

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """The answer of the server that serves, whichever that is. Raises CaseFailed if none does for long."""
        end_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end_s:
            server = self.hosts.servers[self._at % len(self.hosts.servers)]
            try:
                return self._http.request(method, self.hosts.url(server) + path, **more)
            except httpx.TransportError:
                self._at += 1
                self.found["sent again"] += method == "POST"
                time.sleep(0.05)
        said = "\n".join(f"{one}: {self.hosts.said(one)[-2000:]}" for one in self.hosts.servers)
        raise CaseFailed(f"no server has answered for {_PATIENCE_S:g} s\n{said}")


@dataclass
class _Faults:
    hosts: Hosts
    rng: Random
    case: BadNetwork
    note: Note

    def run(self) -> None:
        """All faults, at random times, those of one node one after another."""
        began_s = time.monotonic()
        planned = [(self.rng.uniform(3, self.case.seconds - 10), self._node) for _ in range(self.case.faults)]
        planned += [
            ((at + 1) * self.case.seconds / (self.case.kills + 1), self._kill_server) for at in range(self.case.kills)
        ]
        planned.append((self.rng.uniform(0.1, 0.4) * self.case.seconds, self._cut_long))
        self._busy = {node: threading.Lock() for node in self.hosts.nodes}
        threads = []
        for at_s, fault in sorted(planned, key=lambda one: one[0]):
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))
            threads.append(threading.Thread(target=fault))
            threads[-1].start()
        for one in threads:
            one.join()

    def _node(self) -> None:
        node, kind, length_s = self.rng.choice(self.hosts.nodes), self.rng.randrange(3), self.rng.uniform(2, 15)
        with self._busy[node]:
            if kind == 0:
                self.hosts.signal(node, signal.SIGKILL)
                time.sleep(2)
                self.hosts.start_agent(node)
            elif kind == 1:
                self.hosts.signal(node, signal.SIGSTOP)
                time.sleep(length_s)
                self.hosts.signal(node, signal.SIGCONT)
            else:
                self._cut(node, length_s)

    def _cut_long(self) -> None:
        node = self.rng.choice(self.hosts.nodes)
        with self._busy[node]:
            self._cut(node, self.case.long_cut_s)

    def _cut(self, node: str, length_s: float) -> None:
        self.hosts.network.cut(node)
        time.sleep(length_s)
        self.hosts.network.join(node)

    def _kill_server(self) -> None:
        """Kill the server that serves; the other one stands by, and the killed one does when it is started again."""
        serving = next(one for one in self.hosts.servers if self._serves(one))
        self.note(f"the server on {serving} is killed")
        self.hosts.signal(serving, signal.SIGKILL)
        time.sleep(1)
        self.hosts.start_server(serving)

    def _serves(self, host: str) -> bool:
        try:
            return httpx.get(f"{self.hosts.url(host)}/health", timeout=_ANSWER_S, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


def _entries(lines: list[str]) -> list[LogEntry]:
    """What is in a log; its server may have been killed while it wrote, even the first line."""
    found: list[LogEntry] = []
    with suppress(BadLog):
        for entry in read_log(lines)[1]:
            found.append(entry)
    return found


def _of_logs(logs: list[list[LogEntry]], late: set[str]) -> Counter[str]:
    """What the logs of all starts say: images that ended in two of them, and promises broken without a loss.

    A late image is excused if a device of one of its runs was lost while it was open, or if the server was.
    """
    ends = Counter(one.uid for entries in logs for entry in entries for one in entry.actions if isinstance(one, Finish))
    excused = {entry.event.request.uid for entries in logs for entry in entries if isinstance(entry.event, Restored)}
    for entries in logs:
        devices: dict[int, set[int]] = {}
        uids: dict[int, str] = {}
        for entry in entries:
            if isinstance(entry.event, DeviceLost | NodeLost):
                lost = set(entry.event.device_ids)
                excused |= {uids[job_id] for job_id, where in devices.items() if where & lost and job_id in uids}
            for one in entry.actions:
                if isinstance(one, Accept):
                    uids[one.job_id] = one.uid
                elif isinstance(one, RunWork):
                    for job_id in one.work.job_ids:
                        devices.setdefault(job_id, set()).update(one.work.devices)
                elif isinstance(one, Finish):
                    devices.pop(one.job_id, None)
    return Counter({"twice": sum(num > 1 for num in ends.values()), "wrongly broken": len(late - excused)})
