"""Records the examples of the API reference: `python -m tilework.server.api.record` starts a server with the shipped
model, asks it, and prints `examples.json`; with a URL it asks the server there. Answers are as they came, but long
lists show their first entries, a picture shows its first bytes, and every call has the same uid.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx

from tilework.server.api.examples import UID
from tilework.server.schema.chat_request import EXAMPLE as CHAT
from tilework.server.schema.image_request import EXAMPLE

MOST_ENTRIES = 2
PNG_HEAD = "iVBORw0KGgo="  # The first bytes of every PNG file.
ASYNC = {"Prefer": "respond-async"}
_FROM_SERVER = re.compile(r"[0-9a-f]{32}")


def record(http: httpx.Client) -> dict[str, Any]:
    """The answers to one call of each kind, by the name of the example."""
    images = http.post("/v1/images/generations", json=EXAMPLE).raise_for_status().json()
    stream = http.post("/v1/images/generations", json={**EXAMPLE, "stream": True, "partial_images": 1}).text
    uid = http.post("/v1/images/generations", json=EXAMPLE, headers=ASYNC).raise_for_status().json()["uid"]
    running = _running(http, uid)
    listed = http.get("/v1/requests", params={"limit": 1}).json()
    decisions = http.get(f"/v1/requests/{uid}/decisions").json()
    cancelled = http.delete(f"/v1/requests/{uid}").json()
    followed = http.post("/v1/images/generations", json=EXAMPLE, headers=ASYNC).json()["uid"]
    events = _events(http.get(f"/v1/requests/{followed}/events").text)
    http.delete(f"/v1/requests/{followed}")  # Its pictures: a server waits for those that were not fetched.
    progress = next(one for one in events if one["type"] == "tilework.progress" and one["state"] == "running")
    return {
        "images": images,
        "pictures": _events(stream),
        "status": running,
        "list": listed,
        "decisions": decisions,
        "cancelled": cancelled,
        "progress": [progress],
        "chat": http.post("/v1/chat/completions", json=CHAT).raise_for_status().json(),
        "models": http.get("/v1/models").json(),
        "model": http.get("/v1/models/shapes").json(),
        "model path": http.get("/v1/model_info").json(),
        "alive": http.get("/health").json(),
        "ready": http.get("/ready").json(),
    }


def _running(http: httpx.Client, uid: str) -> Any:
    while True:
        status = http.get(f"/v1/requests/{uid}").json()
        if status["status"] == "running" and status["images"][0]["step"] > 0:
            return status
        assert status["status"] in ("queued", "running"), status
        time.sleep(0.01)


def _events(stream: str) -> list[Any]:
    return [json.loads(data) for data in re.findall(r"^data: (.*)$", stream, flags=re.M)]


def shortened(value: Any, name: str = "") -> Any:
    """The answer with long parts cut, and uids replaced."""
    if isinstance(value, dict):
        return {key: shortened(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [shortened(inner, name) for inner in (value if name == "pictures" else value[:MOST_ENTRIES])]
    if not isinstance(value, str):
        return value
    if name == "b64_json":
        return PNG_HEAD
    if name == "url" and value.startswith("data:"):
        return f"data:image/png;base64,{PNG_HEAD}"
    return _FROM_SERVER.sub(UID, value)


@contextmanager
def _started() -> Iterator[str]:
    """The URL of a server with the shipped model, while the block runs."""
    command = [sys.executable, "-m", "tilework", "serve", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def main() -> None:
    server = nullcontext(sys.argv[1]) if sys.argv[1:] else _started()
    with server as url, httpx.Client(base_url=url, timeout=120) as http:
        answers = record(http)
    json.dump(shortened(answers), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
