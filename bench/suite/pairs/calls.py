"""One call of everything that a server does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from suite.pairs.files import FRAMES, TENANT_KEY

ENDED = ("done", "failed", "cancelled", "completed", "expired")
_WAIT_S = 120.0
_SIDE = 64
_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def answers(url: str, arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """What each call got, as its status and code, and what is wrong with that."""
    return _Calls(url, arguments).all()


class _Calls:
    def __init__(self, url: str, arguments: Sequence[str]) -> None:
        self._url, self._arguments = url, arguments
        key = TENANT_KEY if "--tenants" in arguments else None
        if "--api-key" in arguments:
            key = arguments[arguments.index("--api-key") + 1]
        self._key = key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_WAIT_S, trust_env=False)
        self._got: dict[str, str] = {}
        self._faults: list[str] = []

    def all(self) -> tuple[dict[str, str], list[str]]:
        try:
            with self._http:
                self._call_all()
        except (httpx.HTTPError, ValueError, KeyError) as error:  # Of an answer that is none, or not as documented.
            self._faults.append(f"after {', '.join(self._got) or 'nothing'}: {type(error).__name__}: {error}")
        return self._got, self._faults

    def _call_all(self) -> None:
        served = self._http.get("/v1/models").json()["data"]
        images, clips = ([one for one in served if one["tilework"]["makes_videos"] is clip] for clip in (False, True))
        drawn: dict[str, Any] = {"prompt": "a red circle", "size": f"{_SIDE}x{_SIDE}", "seed": 7}
        image = drawn | {"model": (images or clips)[0]["id"], "num_inference_steps": 4}
        self._expect("image", 200, self._draw(image))
        self._expect("promise", 200, self._draw(image | {"slo_s": 60, "on_miss": "reject"}))
        self._expect("exact", 200 if served[0]["tilework"]["cell"] == 1 else 400, self._draw(image | {"exact": True}))
        self._expect("edit", 400, self._http.post("/v1/images/edits", json=image | {"image": _PIXEL}))
        self._cancel(image | {"num_inference_steps": 200})
        self._batch(image)
        clip = drawn | {"num_frames": FRAMES, "num_inference_steps": 2}
        video = self._http.post("/v1/videos/sync", json=clip | ({"model": clips[0]["id"]} if clips else {}))
        self._expect("clip", 200 if clips else 400, video)
        if "--loras" in self._arguments:
            self._expect("lora", 200, self._draw(image | {"lora": [{"name": "ink"}]}))
        self._watch()
        if "--probe-port" in self._arguments:
            port = self._arguments[self._arguments.index("--probe-port") + 1]
            self._expect("probes", 200, httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False))
        if "--api-key" in self._arguments:
            self._expect("no key", 401, httpx.post(f"{self._url}/v1/images/generations", trust_env=False))

    def _draw(self, body: dict[str, Any]) -> httpx.Response:
        return self._http.post("/v1/images/generations", json=body)

    def _expect(self, call: str, status: int, answer: httpx.Response) -> None:
        error = {} if answer.status_code < 400 else _error(answer)
        self._got[call] = f"{answer.status_code} {error.get('code') or ''}".strip()
        if answer.status_code != status:
            self._faults.append(f"{call}: {answer.status_code} in place of {status}: {answer.text[:300]}")
        elif answer.status_code >= 400 and not (error.get("message") and error.get("type")):
            self._faults.append(f"{call}: {answer.status_code} without a message: {answer.text[:300]}")

    def _cancel(self, image: dict[str, Any]) -> None:
        headers = {"Prefer": "respond-async"}
        asked = self._http.post("/v1/images/generations", json=image, headers=headers)
        self._expect("cancelled", 202, asked)
        if asked.status_code == 202:
            path = f"/v1/requests/{asked.json()['uid']}"
            self._http.delete(path)
            self._await("cancelled", lambda: self._http.get(path).json(), ("cancelled",))

    def _batch(self, image: dict[str, Any]) -> None:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/images/generations", "body": image}
        files = {"file": ("calls.jsonl", json.dumps(line) + "\n")}
        file = self._http.post("/v1/files", files=files, data={"purpose": "batch"})
        if "--durable" not in self._arguments:
            self._expect("batch", 400, file)
            return
        self._expect("batch", 200, file)
        if file.status_code == 200:
            about = {"endpoint": line["url"], "completion_window": "24h", "input_file_id": file.json()["id"]}
            begun = self._http.post("/v1/batches", json=about)
            self._expect("batch", 200, begun)
            path = f"/v1/batches/{begun.json().get('id')}"
            done = self._await("batch", lambda: self._http.get(path).json(), ("completed",))
            if done.get("request_counts", {}).get("completed") != 1:
                self._faults.append(f"batch: {done}")

    def _await(self, call: str, look: Callable[[], dict[str, Any]], wanted: Sequence[str]) -> dict[str, Any]:
        end_s = time.monotonic() + _WAIT_S
        state = look()
        while state.get("status") not in ENDED and time.monotonic() < end_s:
            time.sleep(0.02)
            state = look()
        if state.get("status") not in wanted:
            self._faults.append(f"{call}: {state}")
        return state

    def _watch(self) -> None:
        metrics = self._http.get("/metrics")
        self._expect("metrics", 200, metrics)
        if "tilework_" not in metrics.text:
            self._faults.append("metrics: there are none")
        for path in ("/health", "/ready"):
            self._expect(path[1:], 200, self._http.get(path))


def _error(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        return {}
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else {}
