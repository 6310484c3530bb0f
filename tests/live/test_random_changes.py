"""Random sequences of changes of a running server, with calls, kills and damaged files between: see `changes.py`.

After each step the server is the one that was, unless it was killed; each call has an answer of those that are
documented; a model that is served all the time is drawn as ever, also while steps are made. After a sequence the server
is as before it. A failure prints the seed and the steps that were made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from live import changes
from live.changes import (
    ANCHOR,
    BAD_NAMES,
    CLIPS,
    DAMAGED,
    GOOD,
    MISSING,
    Add,
    AddLora,
    Call,
    Damage,
    KillServer,
    KillWorker,
    Look,
    Remove,
    RemoveLora,
    Repair,
    Step,
    Together,
    cut_off,
    lora_file,
    make_files,
    sequence,
)
from processes import descendants, is_alive, title
from server.picture_files import data_url, plain
from waiting import PATIENCE_S, eventually

ADMIN = {"Authorization": "Bearer admin"}
LENGTH = 8
WEIGHTS_MEMORY = "8MB"
REFUSED = (400, 404, 409)
ANSWERS = (200, 400, 404, 429)
ENDED = {"done", "failed", "cancelled", "completed", "expired"}
PICTURE = data_url(plain(64, 64))
WORKER = re.compile(r"worker \d+ ")


@dataclass
class Lived:
    """A durable server, started again after it was killed, and what its clients know of it.

    `files` are those of each served model, by its name: files and a type; `damaged` are not whole. `seen`
    are images by what they were drawn of.
    """

    root: Path
    files: dict[str, str] = field(default_factory=dict)
    seen: dict[tuple[str, ...], str] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    pids: list[int] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    url: str = ""
    starts: int = 0

    def start(self) -> None:
        options = ["--weights-memory", WEIGHTS_MEMORY, "--devices", "2", "--device", "cpu", "--port", "0"]
        command = ["serve", f"{ANCHOR}={self.root / ANCHOR}", *options, "--durable", str(self.root / "state"), "--json"]
        settings = {"ADMIN_KEY": "admin", "DRAIN_S": "1", "PROFILES": str(self.root / "costs.sqlite")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tilework", *command],
            stdout=subprocess.PIPE,
            stderr=(self.root / "server.log").open("a"),
            text=True,
            env=os.environ | {f"TILEWORK_{name}": value for name, value in settings.items()},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server did not start: {self.messages()}"
        self.url, self.starts = json.loads(line)["url"], self.starts + 1
        eventually(lambda: httpx.get(f"{self.url}/ready").status_code == 200)
        self.pids = self.workers()

    def messages(self) -> str:
        return (self.root / "server.log").read_text("utf-8", "replace")[-3000:]

    def ask(self, method: str, path: str, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
        given = ADMIN | (headers or {})
        return httpx.request(method, f"{self.url}{path}", headers=given, timeout=PATIENCE_S, **options)

    def served(self) -> dict[str, list[str]]:
        """LoRAs by model."""
        return {one["id"]: one["tilework"]["loras"] for one in self.ask("GET", "/v1/models").json()["data"]}

    def metric(self, name: str) -> float:
        lines = self.ask("GET", "/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    # Steps.

    def make(self, step: Step) -> None:
        match step:
            case Together(steps):
                with ThreadPoolExecutor(len(steps)) as pool:
                    for future in [pool.submit(self.make, one) for one in steps]:
                        future.result()
            case Damage(files):
                if (self.root / files).exists():
                    cut_off(self.root / files)
                self.damaged.add(files)
            case Repair():
                self.damaged.clear()
                for files in ("other weights", "other stages"):
                    changes.restore(self.root, files)
            case KillWorker():
                self.kill_worker()
            case KillServer():
                self.kill_server()
            case Look():
                for path in ("/metrics", "/v1/models", "/", "/v1/live", "/v1/requests", "/health"):
                    assert self.ask("GET", path).status_code == 200, path
            case Call():
                self.call(step)
            case _:
                self.change(step)

    def change(self, step: Add | Remove | AddLora | RemoveLora) -> None:
        answer = self.asked(step)
        done = 201 if isinstance(step, Add | AddLora) else 200
        assert answer.status_code in (done, *REFUSED), f"{step}: {answer.status_code} {answer.text}"
        if answer.status_code != done:
            assert answer.json()["error"]["code"], step
        elif isinstance(step, Add):
            assert step.name not in BAD_NAMES or not step.name, f"{step} is served, and can never be removed"
            assert step.files in GOOD, f"{step} is served"
            self.files[answer.json()["id"]] = f"{step.files} {step.fields.get('dtype')}"
        elif isinstance(step, AddLora):
            assert step.file == "ink", f"{step} is served"

    def asked(self, step: Add | Remove | AddLora | RemoveLora) -> httpx.Response:
        match step:
            case Add(files=files, name=name, fields=fields):
                path = "shapes-motion" if files == CLIPS else str(self.root / files)
                folder = {"loras": str(self.root / fields["loras"])} if "loras" in fields else {}
                body = {"path": path, **({"name": name} if name else {}), **fields, **folder}
                return self.ask("POST", "/v1/admin/models", json=body)
            case Remove(name):
                return self.ask("DELETE", f"/v1/admin/models/{name.replace('.', '%2E')}", params={"confirm": name})
            case AddLora(model=model, name=name, file=file):
                body = {"name": name, "path": str(lora_file(self.root, file))}
                return self.ask("POST", f"/v1/admin/models/{model}/loras", json=body)
            case RemoveLora(model=model, name=name):
                return self.ask("DELETE", f"/v1/admin/models/{model}/loras/{name.replace('.', '%2E')}")

    def call(self, one: Call, *, must: bool = False) -> None:
        """Call, and look at the answer, which `must` be an image."""
        body: dict[str, Any] = {"prompt": "a red circle", "model": one.model, "size": "64x64", "seed": 7}
        body |= {"num_inference_steps": 4}
        match one.kind:
            case "promise":
                body |= {"slo_s": 60, "on_miss": "reject"}
            case "exact":
                body |= {"exact": True}
            case "two":
                body |= {"n": 2}
            case "with LoRA":
                body |= {"lora": [{"name": "ink", "scale": 1.0}], "exact": True}
            case "cancelled":
                self.cancel(body)
                return
            case "batch":
                self.batch(body)
                return
            case "edit":
                answer = self.ask("POST", "/v1/images/edits", json=body | {"image": PICTURE})
                assert answer.status_code in ANSWERS, f"{one}: {answer.status_code} {answer.text}"
                return
        before = self.files.get(one.model)
        answer = self.ask("POST", "/v1/images/generations", json=body)
        assert answer.status_code in ANSWERS, f"{one}: {answer.status_code} {answer.text}"
        assert answer.status_code == 200 or not must, f"{one}: {answer.status_code} {answer.text}"
        if answer.status_code == 200 and "exact" in body and before == self.files.get(one.model) is not None:
            self.compare(one, before or "", answer)

    def cancel(self, body: dict[str, Any]) -> None:
        body |= {"num_inference_steps": 40}
        asked = self.ask("POST", "/v1/images/generations", json=body, headers={"Prefer": "respond-async"})
        assert asked.status_code in (202, *ANSWERS), asked.text
        if asked.status_code == 202:
            path = f"/v1/requests/{asked.json()['uid']}"
            assert self.ask("DELETE", path).status_code == 200
            eventually(lambda: self.ask("GET", path).json()["status"] in ENDED)

    def batch(self, body: dict[str, Any]) -> None:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/images/generations", "body": body}
        file = {"file": ("calls.jsonl", json.dumps(line) + "\n")}
        kept = self.ask("POST", "/v1/files", files=file, data={"purpose": "batch"}).json()["id"]
        about = {"endpoint": line["url"], "completion_window": "24h", "input_file_id": kept}
        asked = self.ask("POST", "/v1/batches", json=about)
        assert asked.status_code in ANSWERS, asked.text
        if asked.status_code == 200:
            path = f"/v1/batches/{asked.json()['id']}"
            eventually(lambda: self.ask("GET", path).json()["status"] in ENDED)

    def compare(self, one: Call, files: str, answer: httpx.Response) -> None:
        """An exact image is that of the same files whenever these were drawn first."""
        image = hashlib.sha256(answer.json()["data"][0]["b64_json"].encode()).hexdigest()
        key = files, "LoRA" if one.kind == "with LoRA" else ""
        assert self.seen.setdefault(key, image) == image, f"{one} of {files} is another image than before"

    def kill_worker(self) -> None:
        killed = self.pids[self.starts % len(self.pids)]
        os.kill(killed, signal.SIGKILL)
        others = {*self.pids} - {killed}

        def is_back() -> bool:
            new = {*self.workers()} - {killed}
            return others < new and self.metric("tilework_devices_up") == len(self.pids)

        eventually(is_back)
        self.pids = self.workers()

    def workers(self) -> list[int]:
        """The processes of the server's devices."""
        assert self.process is not None
        return sorted(pid for pid in descendants(self.process.pid) if WORKER.search(title(pid)))

    def kill_server(self) -> None:
        """Its next start serves what it served, of files that are whole, and ends what is late by then."""
        assert self.process is not None
        before, late = self.served(), self.begin_late()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.start()
        after = self.served()
        assert after == {name: loras for name, loras in before.items() if name in after}
        gone = {self.files[name].rpartition(" ")[0] for name in before.keys() - after.keys() if name in self.files}
        assert gone <= self.damaged, f"{gone} are not served again: {self.messages()}"
        self.files = {name: files for name, files in self.files.items() if name in after}
        eventually(lambda: self.ask("GET", f"/v1/requests/{late}").json()["status"] in ENDED)

    def begin_late(self) -> str:
        """A call that is open when the server is killed, and whose deadline passes before it starts again."""
        body = {"prompt": "a red circle", "model": ANCHOR, "size": "64x64", "num_inference_steps": 200}
        for slo_s in (2, 4, 8, 16, 32):  # The first that can be met by the costs that were measured here.
            ask = body | {"slo_s": slo_s, "on_miss": "drop"}
            asked = self.ask("POST", "/v1/images/generations", json=ask, headers={"Prefer": "respond-async"})
            if asked.status_code == 202:
                return str(asked.json()["uid"])
            assert asked.json()["error"]["code"] == "deadline_unreachable", asked.text
        raise AssertionError(asked.text)

    # Checks.

    def check(self) -> None:
        """The server runs, lost no worker that was not killed, and draws what is always served as ever."""
        assert self.process is not None
        assert self.process.poll() is None, f"the server has ended: {self.messages()}"
        assert self.workers() == self.pids, f"a worker was lost: {self.messages()}"
        self.call(Call(ANCHOR, "exact"), must=True)

    def undo(self) -> None:
        """Remove what was added: then all is as at the start."""
        for name in self.served():
            if name != ANCHOR:
                answer = self.asked(Remove(name))
                assert answer.status_code == 200, f"{name} cannot be removed: {answer.text}"
        for lora in self.served()[ANCHOR]:
            assert self.asked(RemoveLora(ANCHOR, lora)).status_code == 200
        self.make(Repair())
        self.files = {ANCHOR: ANCHOR}
        assert self.served() == {ANCHOR: []}

    def stop(self) -> None:
        assert self.process is not None
        children = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0, self.messages()
        eventually(lambda: not any(map(is_alive, children)))


@contextmanager
def living(root: Path) -> Iterator[Lived]:
    lived = Lived(root, {ANCHOR: ANCHOR})
    lived.start()
    try:
        yield lived
    finally:
        assert lived.process is not None
        lived.process.kill()
        lived.process.wait()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lived")
    make_files(place)
    return place


@contextmanager
def load(lived: Lived) -> Iterator[None]:
    """One exact image after another of what is always served. Raises AssertionError at the end if any failed."""
    has_ended = threading.Event()

    def draw() -> None:
        while not has_ended.is_set():
            lived.call(Call(ANCHOR, "exact"), must=True)

    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(draw)
        try:
            yield
        finally:
            has_ended.set()
            drawing.result()


def run(lived: Lived, seed: int, steps: list[Step]) -> None:
    """Raises AssertionError, which says what was done until then."""
    done = list[Step]()
    try:
        for step in steps:
            done.append(step)
            with nullcontext() if isinstance(step, KillServer) else load(lived):
                lived.make(step)
            lived.check()
        lived.undo()
    except Exception as error:
        listed = "\n".join(f"  {one}" for one in done)
        raise AssertionError(f"seed {seed}, after\n{listed}\n{type(error).__name__}: {error}") from error


NUM_SEQUENCES = 12
"""They take five minutes on two busy cores."""


@pytest.mark.slow
def test_sequences_of_changes_end_neither_server_nor_worker(root: Path) -> None:
    with living(root) as lived:
        for seed in range(NUM_SEQUENCES):
            run(lived, seed, sequence(seed, LENGTH))
        lived.stop()
    logs = sorted((root / "state").glob("events-*.jsonl"))
    assert len(logs) == lived.starts
    for log in logs:
        read_by_commands(log)


def read_by_commands(log: Path) -> None:
    """Each command that reads logs reads one of a server to which models were added."""
    for words in (
        ["explain", str(log)],
        ["replay", str(log)],
        ["timeline", str(log), "--out", str(log.with_suffix(".json"))],
    ):
        done = subprocess.run([sys.executable, "-m", "tilework", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"tilework {' '.join(words)}: {done.stdout[-1000:]} {done.stderr[-2000:]}"


def test_steps_are_drawn_from_a_seed() -> None:
    steps = [sequence(seed, LENGTH) for seed in range(100)]
    assert steps == [sequence(seed, LENGTH) for seed in range(100)]
    flat = [step for one in steps for step in one]
    kinds = {type(step) for step in flat}
    assert kinds == {Add, Remove, AddLora, RemoveLora, Call, Damage, Repair, KillWorker, KillServer, Look, Together}
    files = {step.files for step in flat if isinstance(step, Add)}
    assert files == {*GOOD, *DAMAGED, MISSING, "too large"}
