"""Send a workload to a server as users would: each request at its own time, whatever became of the others."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tilework.client.record import Ending, Record
from tilework.core.workload import WorkloadRequest

PATH = "/v1/images/generations"
CONNECT_TIMEOUT_S = 30.0
DEFAULT_PROMPT = "a picture"
OnResult = Callable[[Record], None]


async def drive(
    base_url: str,
    workload: Sequence[WorkloadRequest],
    *,
    model: str | None = None,
    api_key: str | None = None,
    on_result: OnResult | None = None,
    time_scale: float = 1.0,
) -> list[Record]:
    """Send every request at its planned arrival and wait for all answers; records in the order of the workload.

    Open loop: no answer holds back a request, and the client sets no limit on connections nor on waiting. Arrivals
    are multiplied by `time_scale` (2 is half the pace); deadlines are not. `model` replaces the requests' `pipeline`.
    `on_result` is called as each request ends. What a server or the network does becomes a record, never an
    exception. Any server of OpenAI's images API will do. Proxy settings of the environment are not used.

    Raises:
        ValueError: `base_url` or `time_scale` is of no use, or a request asks for several frames.
    """
    origin = _origin(base_url)
    _check(workload, time_scale)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    async with (
        httpx.AsyncClient(base_url=origin, headers=headers, limits=limits, timeout=timeout, trust_env=False) as http,
        asyncio.TaskGroup() as tasks,
    ):
        start_s = asyncio.get_running_loop().time()
        users = [_User(http, model, on_result, start_s, r.arrival_s * time_scale) for r in workload]
        sent = [tasks.create_task(user.serve(i, r)) for i, (user, r) in enumerate(zip(users, workload, strict=True))]
    return [task.result() for task in sent]


def body_of(request: WorkloadRequest, model: str | None = None) -> dict[str, Any]:
    """The JSON body for one request; fields that the workload leaves open are left to the server."""
    optional = {"seed": request.seed, "slo_s": request.slo_s, "user": request.tenant}
    if request.slo_s is not None:
        optional["on_miss"] = str(request.on_miss)
    return {
        "model": model or request.pipeline,
        "prompt": request.prompt or DEFAULT_PROMPT,
        "size": f"{request.width}x{request.height}",
        "num_inference_steps": request.steps,
        "response_format": "b64_json",
    } | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one HTTP answer came to; `image` is there if and only if `status` is done."""

    status: Ending
    image: bytes | None = None
    story: Mapping[str, Any] | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _User:
    """The user behind one request."""

    http: httpx.AsyncClient
    model: str | None
    on_result: OnResult | None
    start_s: float
    arrival_s: float

    async def serve(self, index: int, request: WorkloadRequest) -> Record:
        loop = asyncio.get_running_loop()
        planned_s = self.start_s + self.arrival_s
        await asyncio.sleep(planned_s - loop.time())
        answer = await self._ask(request)
        record = Record(
            index=index,
            request=request,
            arrival_s=self.arrival_s,
            status=answer.status,
            latency_s=loop.time() - planned_s,
            image=answer.image,
            story=answer.story,
            detail=answer.detail,
        )
        if self.on_result is not None:
            self.on_result(record)
        return record

    async def _ask(self, request: WorkloadRequest) -> Answer:
        try:
            response = await self.http.post(PATH, json=body_of(request, self.model))
        except httpx.HTTPError as error:
            return Answer(Ending.ERROR, detail=f"{type(error).__name__}: {error}")
        return read_answer(response.status_code, response.content)


def read_answer(status_code: int, content: bytes) -> Answer:
    """Judge an HTTP answer; one that is not what the API promises is an error, whatever its status code."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        values = None
    if status_code != 200:
        ending = Ending.REJECTED if status_code == 429 else Ending.FAILED
        return Answer(ending, detail=_error_text(status_code, values))
    try:
        first = values["data"][0]
        image = base64.b64decode(first["b64_json"], validate=True)
        story = first.get("tilework")
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        return Answer(Ending.ERROR, detail=f"the answer holds no data[0].b64_json ({error!r})")
    return Answer(Ending.DONE, image=image, story=story if isinstance(story, dict) else None)


def _error_text(status_code: int, values: Any) -> str:
    """Code and message of an error in OpenAI's shape, or the status code alone."""
    error = values.get("error") if isinstance(values, dict) else None
    if not isinstance(error, dict):
        return f"HTTP {status_code}"
    return f"HTTP {status_code} {error.get('code') or ''}: {error.get('message') or ''}".replace(" :", ":")


def _origin(base_url: str) -> str:
    """`http://host:port`, with or without the `/v1` that OpenAI's clients want."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url is {base_url!r} ({error}); use one such as http://127.0.0.1:8000") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"base_url is {base_url!r}; use one such as http://127.0.0.1:8000")
    return base_url.rstrip("/").removesuffix("/v1")


def _check(workload: Sequence[WorkloadRequest], time_scale: float) -> None:
    if not 0 <= time_scale < float("inf"):
        raise ValueError(f"time_scale is {time_scale}; use a number from 0 (all at once) on")
    for index, request in enumerate(workload):
        if request.frames != 1:
            raise ValueError(f"request {index} has frames {request.frames}; the images API makes one frame")
