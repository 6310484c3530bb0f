"""Sends a workload to a server as users would: each request at its own time, independent of the others."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from tilework.client.dialect import PATH, VIDEO_NOW, VIDEOS, Dialect, HttpAnswer, parsed, read_answer, read_video
from tilework.client.record import CallEnd, Record
from tilework.formats.workload import WorkloadRequest

CONNECT_TIMEOUT_S = 30.0
OURS = Dialect()
OnResult = Callable[[Record], None]


async def drive(
    base_url: str,
    workload: Sequence[WorkloadRequest],
    *,
    dialect: Dialect = OURS,
    api_key: str | None = None,
    timeout_s: float | None = None,
    keep_files: bool = True,
    on_result: OnResult | None = None,
    time_scale: float = 1.0,
    max_hops: int = 0,
) -> list[Record]:
    """Send every request at its planned arrival, wait for all answers, and return records in the workload's order.

    Open loop: a request never waits for an answer, and the client sets no limit on connections. A request is given up
    `timeout_s` after its planned arrival; None sets no limit. Arrivals are multiplied by `time_scale` (2 is half the
    pace); deadlines are not. Without `keep_files` images and clips are dropped as they come. `on_result` is called as
    each request ends. A fault of a server or of the network becomes a record, never an exception. Any server of
    OpenAI's images API will do. Requests for several frames go to `/v1/videos/sync`. Proxy settings of the environment
    are not used.

    A request that is refused with the address of another server (`Link` with rel=alternate) is sent there, with the
    same key, up to `max_hops` times.

    Raises:
        ValueError: `base_url` or `time_scale` cannot be used.
    """
    if not 0 <= time_scale < float("inf"):
        raise ValueError(f"time_scale is {time_scale}; use a number from 0 (all at once) on")
    async with open_client(base_url, api_key) as http, asyncio.TaskGroup() as tasks:
        loop = asyncio.get_running_loop()
        sender = _Sender(http, dialect, timeout_s, keep_files, on_result, loop.time(), max_hops)
        sent: dict[int, asyncio.Task[Record]] = {}
        for index in sorted(range(len(workload)), key=lambda index: workload[index].arrival_s):
            arrival_s = workload[index].arrival_s * time_scale
            await asyncio.sleep(sender.start_s + arrival_s - loop.time())
            sent[index] = tasks.create_task(sender.serve(index, workload[index], arrival_s))
    return [sent[index].result() for index in range(len(workload))]


def open_client(base_url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """Open a client of one server, with no limit on connections, and none on waiting except for connecting.

    Raises:
        ValueError: `base_url` is no address of a server.
    """
    origin = _origin(base_url)
    # Reading the certificates takes 0.1 s; a server without TLS does not need them.
    tls = httpx.create_ssl_context() if origin.startswith("https") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(
        base_url=origin,
        headers=headers,
        transport=Connections(tls),
        timeout=timeout,
        trust_env=False,
    )


@dataclass(frozen=True, slots=True)
class _Sender:
    """Sends single requests; `start_s` is the loop's time at which the workload's clock began."""

    http: httpx.AsyncClient
    dialect: Dialect
    timeout_s: float | None
    keep_files: bool
    on_result: OnResult | None
    start_s: float
    max_hops: int

    async def serve(self, index: int, request: WorkloadRequest, arrival_s: float) -> Record:
        loop = asyncio.get_running_loop()
        planned_s = self.start_s + arrival_s
        lag_s = loop.time() - planned_s
        answer = await self._ask(request, planned_s)
        record = Record(
            index=index,
            request=request,
            arrival_s=arrival_s,
            status=answer.status,
            latency_s=loop.time() - planned_s,
            lag_s=max(0.0, lag_s),
            file=answer.file,
            timeline=answer.timeline,
            cause=answer.cause,
            detail=answer.detail,
            num_hops=answer.num_hops,
        )
        if self.on_result is not None:
            self.on_result(record)
        return record

    async def _ask(self, request: WorkloadRequest, planned_s: float) -> HttpAnswer:
        until_s = None if self.timeout_s is None else planned_s + self.timeout_s
        try:
            async with asyncio.timeout_at(until_s):
                return await (self._clip(request) if request.is_clip else self._picture(request))
        except TimeoutError:
            return HttpAnswer(CallEnd.ERROR, cause="timeout", detail=f"no answer within {self.timeout_s} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            cause = "timeout" if isinstance(error, httpx.TimeoutException) else "connection"
            return HttpAnswer(CallEnd.ERROR, cause=cause, detail=f"{type(error).__name__}: {error}")

    async def _picture(self, request: WorkloadRequest) -> HttpAnswer:
        response, num_hops = await self._post(PATH, request)
        wanted = self.dialect.response_format
        answer = read_answer(response.status_code, response.content, response_format=wanted, decode=self.keep_files)
        return replace(answer, num_hops=num_hops)

    async def _clip(self, request: WorkloadRequest) -> HttpAnswer:
        response, num_hops = await self._post(VIDEO_NOW, request)
        media_type = response.headers.get("content-type", "")
        answer = read_video(response.status_code, response.content, media_type, keep=self.keep_files)
        answer = replace(answer, num_hops=num_hops)
        if answer.status is not CallEnd.DONE or self.dialect.plain:
            return answer
        job = response.url.join(f"{VIDEOS}/{response.headers.get('x-request-id', '')}")
        return replace(answer, timeline=await self._timeline(job))

    async def _post(self, path: str, request: WorkloadRequest) -> tuple[httpx.Response, int]:
        """Post a request; follow refusals that name another server. Return the last answer and the number of hops."""
        body = self.dialect.body_of(request)
        url = httpx.URL(path)
        num_hops = 0
        while True:
            response = await self.http.post(url, json=body)
            other = response.links.get("alternate", {}).get("url")
            if response.status_code != 429 or other is None or num_hops == self.max_hops:
                return response, num_hops
            url = httpx.URL(other)
            num_hops = num_hops + 1

    async def _timeline(self, job: httpx.URL) -> dict[str, Any] | None:
        """Ask for the timeline of a video: its file cannot hold one, and a Tilework server gives it with the job."""
        response = await self.http.get(job)
        try:
            timeline = parsed(response.content)["tilework"]["timeline"]
        except (TypeError, LookupError):
            return None
        return timeline if isinstance(timeline, dict) else None


def _origin(base_url: str) -> str:
    """Return `http://host:port` of a URL with or without the `/v1` that OpenAI's clients want."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url is {base_url!r} ({error}); use one such as http://127.0.0.1:8000") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"base_url is {base_url!r}; use one such as http://127.0.0.1:8000")
    return base_url.rstrip("/").removesuffix("/v1")


KEEP_S = 1.5  # Servers close idle connections after 2 s (gunicorn) or 5 s (uvicorn, node); we must be the first.
_ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_S)


class Connections(httpx.AsyncBaseTransport):
    """Opens one connection per request in flight; the connection that became free last serves the next request.

    Taking and returning a connection costs the same with one open as with thousands. httpx's own pool walks over all
    its connections at each request: 5 s answers at 200 requests per second, so 1000 open ones, cost it 25 ms of CPU per
    request, and measured latencies rose to 53 s.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._open: set[httpx.AsyncHTTPTransport] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send on a connection of its own, which is free again when the answer's body has been read or given up."""
        connection = self._idle.pop() if self._idle else self._new()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._open.discard(connection)
            await connection.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Returning(response.stream, connection, self._idle)
        return response

    async def aclose(self) -> None:
        for connection in self._open:
            await connection.aclose()
        self._open.clear()
        self._idle.clear()

    def _new(self) -> httpx.AsyncHTTPTransport:
        connection = httpx.AsyncHTTPTransport(verify=self._tls, limits=_ONE, trust_env=False)
        self._open.add(connection)
        return connection


class _Returning(httpx.AsyncByteStream):
    """A body that returns its connection to the stack of idle ones once it is closed."""

    def __init__(
        self, body: httpx.AsyncByteStream, connection: httpx.AsyncHTTPTransport, idle: list[httpx.AsyncHTTPTransport]
    ) -> None:
        self._body = body
        self._connection = connection
        self._idle = idle

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()
        self._idle.append(self._connection)
