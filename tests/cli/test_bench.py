"""`tilework bench` against a small image server in this process whose latencies and faults are known.

Where figures are compared, both run on one loop, whose time passes as the server says (`timed`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from PIL import Image
from starlette.types import Receive, Scope, Send
from typer.main import get_command
from typer.testing import CliRunner

import clock
from tilework.cli import bench_run
from tilework.cli import console as output
from tilework.cli.app import app
from tilework.client import drive
from tilework.client.record import Record
from tilework.core.request import Shape
from tilework.formats.schedule import read_schedule
from tilework.formats.workload import WorkloadRequest, read_workload, write_workload
from waiting import PATIENCE_S, eventually

CARD = {"id": "fake", "tilework": {"default_size": "96x64", "default_steps": 7}}
PICTURE = "cGljdHVyZQ=="


class Fake:
    """Draws in `delays_s` by width, all at once or `one_by_one`; a prompt that names a fault gets it."""

    def __init__(self) -> None:
        self.url = ""
        self.app = FastAPI()
        self.app.post("/v1/images/generations")(self.draw)
        self.app.get("/v1/models")(self.models)
        self.app.get("/ready")(self.ready)
        self.reset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
        self.num_drawn += scope["type"] == "http" and scope["method"] == "POST"

    async def models(self) -> Any:
        return {"data": self.cards}

    async def ready(self) -> Any:
        return {"devices": 3}

    def reset(self) -> None:
        self.delays_s: dict[int, float] = {}
        self.one_by_one = False
        self.cards: list[dict[str, Any]] = [{"id": "fake"}]
        self.seen: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.num_drawn = 0
        self.turn = asyncio.Lock()

    async def draw(self, http: Request) -> Any:
        body = await http.json()
        self.seen.append(body)
        self.keys.add(http.headers.get("authorization"))
        width = int(body["size"].split("x")[0])
        async with self.turn if self.one_by_one else nullcontext():
            match self.delays_s.get(width):
                case None:
                    pass
                case math.inf:
                    await asyncio.Event().wait()
                case delay_s:
                    await clock.sleep(delay_s)
        return await self.answer(body)

    async def answer(self, body: dict[str, Any]) -> Any:
        match body["prompt"]:
            case "busy":
                return JSONResponse({"error": {"code": "deadline_unreachable", "message": "later"}}, 429)
            case "broken":
                return PlainTextResponse("oops", 503)
            case "garbage":
                return PlainTextResponse("<html>")
            case "cut":
                return Response(b"x", headers={"content-length": "100"})
            case "hang":
                await asyncio.Event().wait()
        picture = {"url": "http://x/1"} if body.get("response_format") == "url" else {"b64_json": PICTURE}
        timeline = {"queue_s": 0.01, "segments": self.segments()} if "tilework" in self.cards[0] else None
        return {"data": [picture | ({} if timeline is None else {"tilework": timeline})]}

    def segments(self) -> list[dict[str, Any]]:
        return [
            {"stage": "encode", "devices": [0], "steps": 0, "start_s": 0.01, "end_s": 0.02},
            {"stage": "diffuse", "devices": [0], "steps": 1, "start_s": 0.02, "end_s": 0.04},
            {"stage": "diffuse", "devices": [0, 1], "steps": 3, "start_s": 0.04, "end_s": 0.05},
        ]


@pytest.fixture(scope="module")
def running() -> Any:
    fake = Fake()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(fake, log_config=None, log_level=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield fake
    server.should_exit = server.force_exit = True
    thread.join(PATIENCE_S)


@pytest.fixture
def fake(running: Fake) -> Fake:
    running.reset()
    return running


@pytest.fixture
def timed(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The server is on the loop of its client, whose time leaps, so that each latency is what the server makes it."""
    run_on(clock.LeapingLoop, monkeypatch)
    monkeypatch.setattr(drive, "Connections", lambda _tls: httpx.ASGITransport(fake))
    return fake


def run_on(loop_factory: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main)

    monkeypatch.setattr(bench_run, "asyncio", SimpleNamespace(run=run, CancelledError=asyncio.CancelledError))


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for console in (output.out, output.console):
        monkeypatch.setattr(console, "_force_terminal", False)
        monkeypatch.setattr(console, "width", 100)


def bench(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def measured(*arguments: object) -> dict[str, Any]:
    result = bench(*arguments, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    return json.loads(result.stdout)


def refused(*arguments: object) -> str:
    result = bench(*arguments)
    assert isinstance(result.exception, output.UserError), result.output + repr(result.exception)
    return str(result.exception).replace("\\[", "[")


def trace(path: Path, *prompts: str, slo_s: float | None = None) -> Path:
    base = {"pipeline": "elsewhere", "height": 64, "width": 64, "steps": 3, "slo_s": slo_s}
    write_workload(path, [WorkloadRequest(arrival_s=0.02 * i, prompt=p, **base) for i, p in enumerate(prompts)])
    return path


def test_figures_are_those_of_the_server_by_size_and_in_all(timed):
    """64 px in 0.05 s within 0.3 s; 128 px in 0.45 s, never within 0.3 s."""
    timed.delays_s = {64: 0.05, 128: 0.45}
    arguments = ["--rate", 40, "--num-requests", 20, "--sizes", "64:3,128", "--slo", "0.3", "--warmup", 0]
    result = measured(timed.url, *arguments)["result"]
    small, large = result["by_size"]["64x64"], result["by_size"]["128x128"]
    assert (small["requests"], small["on_time"], large["requests"], large["on_time"]) == (15, 15, 5, 0)
    assert (result["attainment"], small["attainment"], large["attainment"]) == (0.75, 1.0, 0.0)
    assert small["latency_s"]["p50"] == pytest.approx(0.05)
    assert large["latency_s"]["p99"] == pytest.approx(0.45)
    assert result["goodput_per_s"] == pytest.approx(0.75 * result["throughput_per_s"])
    megapixels = (15 * 64 * 64 + 5 * 128 * 128) / 1e6
    assert result["megapixels_per_s"] == pytest.approx(megapixels * result["throughput_per_s"] / 20)
    assert small["throughput_per_s"] == pytest.approx(0.75 * result["throughput_per_s"])


def test_a_queue_in_the_server_shows_in_latency(timed):
    """One at a time, 0.1 s each, but 50 per second arrive: request i waits for i others, whatever the client saw."""
    timed.delays_s, timed.one_by_one = {64: 0.1}, True
    arguments = ["--rate", 50, "--arrivals", "constant", "--num-requests", 10, "--sizes", 64, "--warmup", 0]
    latency = measured(timed.url, *arguments)["result"]["latency_s"]
    expected = [0.1 * (i + 1) - 0.02 * i for i in range(10)]
    assert latency["mean"] == pytest.approx(sum(expected) / 10)
    assert expected[-2] < latency["p99"] < expected[-1] + 1e-6


def test_every_failure_is_counted_by_its_cause_and_counts_as_late(fake, tmp_path, monkeypatch):
    """The time of those that hang is over when all others have ended."""
    see = bench_run._Live.see

    def see_and_skip(live: bench_run._Live, record: Record) -> None:
        see(live, record)
        if len(live.records) == 6:
            asyncio.get_running_loop().skip(600.0)

    run_on(clock.SkippingLoop, monkeypatch)
    monkeypatch.setattr(bench_run._Live, "see", see_and_skip)
    faults = ("busy", "broken", "garbage", "cut", "hang", "hang")
    path = trace(tmp_path / "t.jsonl", *faults, "fine", "fine", slo_s=500.0)
    result = measured(fake.url, "--requests", path, "--timeout", 600, "--warmup", 0)
    expected = {"http 429": 1, "http 503": 1, "answer": 1, "connection": 1, "timeout": 2}
    assert result["causes"] == expected
    assert result["result"]["not_done"] == {"error": 4, "failed": 1, "rejected": 1}
    assert result["result"]["attainment"] == 2 / 8
    text = bench(fake.url, "--requests", path, "--timeout", 600, "--warmup", 0).stdout
    assert "1 x http 429: HTTP 429 deadline_unreachable: later" in text
    assert "2 x timeout" in text


@pytest.mark.slow
def test_the_seed_decides_what_is_sent_and_the_file_of_requests_sends_it_again(fake, tmp_path):
    arguments = ["--rate", 500, "--num-requests", 12, "--sizes", "64,96x64:2", "--slo", 9, "--warmup", 0]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        measured(fake.url, *arguments, "--seed", seed, "--out", tmp_path / name)
    texts = {name: (tmp_path / name / "requests.jsonl").read_text() for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]
    measured(fake.url, "--requests", tmp_path / "a" / "requests.jsonl", "--warmup", 0, "--out", tmp_path / "d")
    assert (tmp_path / "d" / "requests.jsonl").read_text() == texts["a"]
    assert {r.shape for r in read_workload(tmp_path / "a" / "requests.jsonl")} == {Shape(64, 64), Shape(64, 96)}


def test_a_tilework_server_gets_the_deadline_and_is_asked_for_its_defaults(fake, tmp_path):
    fake.cards = [CARD]
    arguments = [fake.url + "/v1", "--rpm", 12000, "--num-requests", 4, "--slo", 2, "--slo-scale", 1.5]
    result = measured(*arguments, "--on-miss", "reject", "--out", tmp_path)
    (warmup, *sent) = fake.seen
    assert "slo_s" not in warmup
    assert len(sent) == 4
    for body in sent:
        told = {key: body[key] for key in ("model", "size", "num_inference_steps", "slo_s", "on_miss", "n")}
        assert told == {
            "model": "fake",
            "size": "96x64",
            "num_inference_steps": 7,
            "slo_s": 3.0,
            "on_miss": "reject",
            "n": 1,
        }
    assert result["config"]["plain"] is False
    assert result["server"]["num_devices"] == 3
    assert result["served"]["steps_by_degree"] == {"1": 4, "2": 12}
    assert result["served"]["mean_degree"] == 7 / 4
    assert result["served"]["device_s"]["mean"] == pytest.approx(0.01 + 0.02 + 2 * 0.01)
    schedule = read_schedule(tmp_path / "schedule.jsonl")
    assert [work.devices for work in schedule.works if work.requests == (2,)] == [(0,), (0,), (0, 1)]
    assert [line.on_time for line in schedule.requests] == [True] * 4


@pytest.mark.slow
def test_another_server_gets_no_field_that_only_tilework_knows(fake, tmp_path):
    arguments = [fake.url, "--rate", 100, "--num-requests", 2, "--sizes", 64, "--slo", 2, "--warmup", 0]
    result = measured(*arguments, "--out", tmp_path)
    assert result["config"]["plain"] is True
    assert result["result"]["attainment"] == 1.0
    assert result["served"] is None
    assert not (tmp_path / "schedule.jsonl").exists()
    assert not any({"slo_s", "on_miss"} & body.keys() for body in fake.seen)
    measured(*arguments, "--tilework")
    assert fake.seen[-1]["slo_s"] == 2.0
    fake.cards = [CARD]
    measured(*arguments, "--plain")
    assert "slo_s" not in fake.seen[-1]


def test_fields_of_vendors_and_formats(fake):
    arguments = [fake.url, "--rate", 100, "--num-requests", 1, "--sizes", 64, "--warmup", 0]
    extra = json.dumps({"seed": None, "true_cfg_scale": 4, "user": "me"})
    measured(*arguments, "--extra-body", extra, "--guidance-scale", 3.5, "--response-format", "none", "--model", "m")
    body = fake.seen[-1]
    assert (body["true_cfg_scale"], body["guidance_scale"], body["user"], body["model"]) == (4, 3.5, "me", "m")
    assert not {"seed", "response_format"} & body.keys()
    assert measured(*arguments, "--response-format", "url")["result"]["done"] == 1
    assert fake.seen[-1]["response_format"] == "url"


def test_auto_deadlines_come_from_the_idle_server(timed):
    timed.delays_s = {64: 0.1, 128: 0.3}
    arguments = ["--rate", 100, "--num-requests", 4, "--sizes", "64,128", "--slo", "auto:2", "--slo-scale", "2"]
    result = measured(timed.url, *arguments, "--tilework")
    assert len(timed.seen) == 2 * 2 + 4
    assert result["unloaded_s"] == pytest.approx({"64x64": 0.1, "128x128": 0.3})
    due = {body["size"]: body["slo_s"] for body in timed.seen[4:]}
    assert due == pytest.approx({"64x64": 0.4, "128x128": 1.2})


def test_the_directory_holds_pictures_records_and_the_resolved_configuration(fake, tmp_path):
    secret = ["--api-key", "sk-secret"]
    arguments = [fake.url, "--rate", 100, "--num-requests", 5, "--sizes", 64, "--slo", 1, *secret]
    text = bench(*arguments, "--out", tmp_path)
    assert text.exit_code == 0
    assert fake.keys == {"Bearer sk-secret"}
    result = json.loads((tmp_path / "result.json").read_text())
    assert {"seed", "rate_per_s", "model", "steps"} <= result["config"].keys()
    assert result["versions"].keys() == {"tilework", "python", "httpx"}
    assert not any("sk-secret" in path.read_text("utf-8") for path in tmp_path.glob("*.json*"))
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [record["request"] for record in records] == list(range(5))
    assert all(record["latency_s"] >= record["lag_s"] >= 0 for record in records)
    for name in ("timeline.png", "latency.png"):
        with Image.open(tmp_path / name) as picture:
            assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 20


def test_compare_shows_ratios_and_what_was_different(timed, tmp_path):
    timed.delays_s = {64: 0.05, 128: 0.2}
    common = [timed.url, "--rate", 100, "--num-requests", 4, "--slo", 0.15, "--warmup", 0]
    measured(*common, "--sizes", "64", "--out", tmp_path / "a")
    measured(*common, "--sizes", "64,128", "--out", tmp_path / "b")
    paths = [tmp_path / name / "result.json" for name in "ab"]
    told = json.loads(bench("--compare", *paths, "--json").stdout)
    figures = {(entry["size"], entry["figure"]): entry for entry in told["figures"]}
    assert figures["all", "attained"] == {"size": "all", "figure": "attained", "a": 1.0, "b": 0.5, "ratio": 0.5}
    means = [json.loads(path.read_text())["result"]["latency_s"]["mean"] for path in paths]
    assert figures["all", "mean s"]["ratio"] == means[1] / means[0]
    assert figures["128x128", "attained"]["ratio"] is None
    assert told["options"] == {"sizes": ["64", "64,128"]}
    table = bench("--compare", *paths).stdout
    assert re.search(r"all +attained +100\.0% +50\.0% +0\.500", table)
    assert "sizes: 64 in A, 64,128 in B" in table
    assert "no result of tilework bench" in refused("--compare", tmp_path / "a" / "records.jsonl", paths[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no rate; give --rate, --rpm or --requests"),
        (["--rate", "0"], "--rate is 0; use a number above 0"),
        (["--rate", "1", "--rpm", "60"], "--rate and --rpm are both given"),
        (["--rate", "1", "--sizes", "64,big"], "size is 'big'"),
        (["--rate", "1", "--sizes", "64", "--slo", "32=1"], "slo says nothing of size 64x64"),
        (["--rate", "1", "--slo", "soon"], "slo has 'soon'"),
        (["--rate", "1", "--extra-body", "[1]"], "--extra-body is '[1]'; write a JSON object"),
        (["--rate", "1", "--duration", "nan"], "--duration is nan"),
        (["--requests", "/nowhere.csv"], "/nowhere.csv"),
        (["--rate", "1", "--duration", "0.0001"], "there are no requests to send"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(fake, arguments, words):
    assert words in refused(fake.url, *arguments)
    assert fake.seen == []


def test_no_url_no_server_and_no_picture_are_reported(fake, tmp_path):
    assert "there is no URL" in refused("--rate", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "does not answer" in refused(f"http://127.0.0.1:{port}", "--rate", 1)
    told = refused(fake.url, "--requests", trace(tmp_path / "t.jsonl", "broken"))
    assert "idle, did not draw 64x64 (http 503" in told
    assert "--warmup 0" in told
    fake.cards = []
    assert "give --model" in refused(fake.url, "--rate", 1)


def has_read_all(pid: int) -> bool:
    """Whether a process has taken all that its connections brought, and sleeps."""
    stat = Path(f"/proc/{pid}/stat").read_text("ascii")
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text("ascii").splitlines()[1:]]
    waiting = [row[4].partition(":")[2] for row in rows if f"socket:[{row[9]}]" in links]
    return len(waiting) > 0 and not any(int(one, 16) for one in waiting) and stat.rpartition(")")[2].split()[0] == "S"


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(fake, tmp_path):
    """Two sizes: the small pictures have come when the interrupt does, the large ones have not."""
    fake.delays_s = {128: math.inf}
    lines = [
        {"arrival_s": 0.02 * i, "pipeline": "p", "height": s, "width": s, "steps": 1, "slo_s": 5.0}
        for i, s in enumerate((64, 128, 64, 128))
    ]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "tilework", "bench", fake.url, "--requests", str(requests), "--warmup", "0"]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "out"), "--json"], stdout=subprocess.PIPE, text=True)
    eventually(lambda: process.poll() is not None or (len(fake.seen) == 4 and fake.num_drawn == 2))
    eventually(lambda: has_read_all(process.pid))
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    result = json.loads(printed)
    assert result["interrupted"] is True
    assert (result["result"]["requests"], result["result"]["done"]) == (2, 2)
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert [record["request"] for record in records] == [0, 2]
    assert len(read_workload(tmp_path / "out" / "requests.jsonl")) == 4


def test_every_option_shows_how_it_is_used():
    command = get_command(app).commands["bench"]  # type: ignore[attr-defined]
    options = [param for param in command.params if param.param_type_name == "option"]
    assert len(options) > 20
    for option in options:
        if option.name != "json":
            assert f"Example: {option.opts[0]}" in (option.help or ""), option.name
