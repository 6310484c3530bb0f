"""Records the examples of the API reference.

`python tools/api_examples.py` starts a server with the shipped model, and one with a simulated model of clips,
calls them, and prints `examples.json`. With two URLs it calls the servers there. Answers are as they came, but long
lists show their first entries, an image shows its first bytes, and every call has the same uid.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.cost.table import CostTable
from tilework.cost.table_file import table_json
from tilework.pipelines.video.export import EXPORT
from tilework.server.api.examples import UID
from tilework.server.planning.planner import LEAST_DUE
from tilework.server.schema.chat_request import EXAMPLE as CHAT
from tilework.server.schema.image_request import EXAMPLE
from tilework.server.schema.video_request import EXAMPLE as VIDEO

MOST_ENTRIES = 2
PNG_HEAD = "iVBORw0KGgo="  # The first bytes of every PNG file.
ASYNC = {"Prefer": "respond-async"}
CLIPS = Graph("clips", (*latent_diffusion("").specs, EXPORT))
SECONDS = (0.05, 0.4, 0.8, 0.6)
"""Seconds that each stage of the simulated model, in order, takes for the clip of the example, or for a step of it."""
_FROM_SERVER = re.compile(r"[0-9a-f]{32}")


def record(http: httpx.Client) -> dict[str, Any]:
    """Return the answers to one call of each kind, by their models, or by what else they show."""
    sets = http.get("/v1/sets").json()  # Before anything has run.
    images = http.post("/v1/images/generations", json=EXAMPLE).raise_for_status().json()
    stream = http.post("/v1/images/generations", json={**EXAMPLE, "stream": True, "partial_images": 1}).text
    uid = http.post("/v1/images/generations", json=EXAMPLE, headers=ASYNC).raise_for_status().json()["uid"]
    running = _running(http, uid)
    live = http.get("/v1/live").json()
    listed = http.get("/v1/requests", params={"limit": 1}).json()
    decisions = http.get(f"/v1/requests/{uid}/decisions").json()
    cancelled = http.delete(f"/v1/requests/{uid}").json()
    followed = http.post("/v1/images/generations", json=EXAMPLE, headers=ASYNC).json()["uid"]
    events = _events(http.get(f"/v1/requests/{followed}/events").text)
    http.delete(f"/v1/requests/{followed}")  # Delete its images: a server waits for those that were not fetched.
    progress = next(one for one in events if one["type"] == "tilework.progress" and one["state"] == "running")
    return {
        "ImagesResponse": images,
        "pictures": _events(stream),
        "RequestStatus": running,
        "RequestList": listed,
        "Decisions": decisions,
        "cancelled": cancelled,
        "progress": [progress],
        "ChatCompletion": http.post("/v1/chat/completions", json=CHAT).raise_for_status().json(),
        "chunks": _chunks(http.post("/v1/chat/completions", json={**CHAT, "stream": True}).text),
        "ModelList": http.get("/v1/models").json(),
        "ModelCard": http.get("/v1/models/shapes").json(),
        "ModelPath": http.get("/v1/model_info").json(),
        "LiveState": live,
        "PlanState": _planned(http),
        "Alive": http.get("/health").json(),
        "ReadyModel": http.get("/ready").json(),
        "SetList": sets,
    }


def record_videos(http: httpx.Client) -> dict[str, Any]:
    """Return the answers about videos, likewise."""
    video_id = http.post("/v1/videos", json=VIDEO).raise_for_status().json()["id"]
    return {
        "VideoJob": _once(http, f"/v1/videos/{video_id}", lambda job: job["progress"] > 0),
        "VideoList": http.get("/v1/videos", params={"limit": 1}).json(),
        "VideoDeleted": http.delete(f"/v1/videos/{video_id}").json(),
    }


def _planned(http: httpx.Client) -> Any:
    """Return the plan after some requests with deadlines."""
    for seed in range(LEAST_DUE):
        http.post("/v1/images/generations", json={**EXAMPLE, "seed": seed, "slo_s": 2.0}).raise_for_status()
    while (state := http.get("/v1/plan").raise_for_status().json())["status"] == "running":
        time.sleep(0.5)
    return state


def _running(http: httpx.Client, uid: str) -> Any:
    return _once(http, f"/v1/requests/{uid}", lambda status: status["images"][0]["step"] > 0)


def _once(http: httpx.Client, path: str, has_begun: Callable[[Any], bool]) -> Any:
    """Return the state of a call as soon as it `has_begun`."""
    while not has_begun(status := http.get(path).raise_for_status().json()):
        assert status["status"] in ("queued", "running", "in_progress"), status
        time.sleep(0.01)
    return status


def _events(stream: str) -> list[Any]:
    return [json.loads(data) for data in re.findall(r"^data: (\{.*)$", stream, flags=re.M)]


def _chunks(stream: str) -> list[Any]:
    """Return two chunks of a chat: the last one about progress, and the one with the image."""
    chunks = [one for one in _events(stream) if one["choices"][0]["delta"]]
    return [
        [one for one in chunks if name in one["choices"][0]["delta"]][-1] for name in ("reasoning_content", "content")
    ]


def shortened(value: Any, name: str = "") -> Any:
    """Return an answer with long parts cut, and uids replaced."""
    if isinstance(value, dict):
        return {key: shortened(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [shortened(inner, name) for inner in (value if name == "pictures" else value[:MOST_ENTRIES])]
    if not isinstance(value, str):
        return value
    if name == "b64_json":
        return PNG_HEAD
    if "data:image" in value:
        return re.sub("base64,[^)]*", f"base64,{PNG_HEAD}", value)
    return _FROM_SERVER.sub(UID, value)


@contextmanager
def _started(*more: str) -> Iterator[str]:
    """Yield the URL of a server that runs while the block does."""
    command = [sys.executable, "-m", "tilework", "serve", "--port", "0", "--json", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def clips_table() -> CostTable:
    """Return the cost table of a simulated model that makes the video of the example, of 81 frames."""
    rows = [
        CostRow(pipeline=CLIPS.pipeline, stage=stage.name, height=320, width=480, frames=81, degree=1, seconds=seconds)
        for stage, seconds in zip(CLIPS.stages, SECONDS, strict=True)
    ]
    return CostTable(hardware="example", rows=tuple(rows), graphs={CLIPS.pipeline: CLIPS})


@contextmanager
def _both() -> Iterator[tuple[str, str]]:
    """Yield the URLs of a server with the shipped model, and of one with a simulated model of clips."""
    with tempfile.TemporaryDirectory() as directory:
        costs = Path(directory) / "clips.json"
        costs.write_text(json.dumps(table_json(clips_table())), encoding="utf-8")
        simulated = ("--backend", "modelled", "--devices", "1", "--cost", str(costs))
        with _started() as pictures, _started(*simulated) as videos:
            yield pictures, videos


def main() -> None:
    with ExitStack() as stack:
        urls: Sequence[str] = sys.argv[1:] or stack.enter_context(_both())
        pictures, videos = (stack.enter_context(httpx.Client(base_url=url, timeout=120)) for url in urls)
        answers = record(pictures) | record_videos(videos)
    json.dump(shortened(answers), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
