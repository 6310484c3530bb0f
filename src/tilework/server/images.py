"""One call for images, from its body to its answer.

A call is all or nothing: its images share arrival and deadline; if one is refused or fails, or the client goes away,
the others are cancelled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tilework.core.request import Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.runtime.ticket import Outcome, Refusal, Ticket
from tilework.server.body import read_json
from tilework.server.calls import ImageCall, image_call
from tilework.server.config import ServerConfig
from tilework.server.encode import Threads, encode, encode_base64
from tilework.server.engine_protocol import Engine
from tilework.server.errors import SERVER, ApiError, not_ready, shown
from tilework.server.metrics import Metrics
from tilework.server.schemas import ImageData, ImagesResponse
from tilework.server.story import image_story
from tilework.store.results import ResultStore, TooLarge

logger = logging.getLogger("tilework.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageService:
    """Serves `POST /v1/images/generations`. `rng` chooses seeds for clients that send none."""

    engine: Engine
    config: ServerConfig
    store: ResultStore
    metrics: Metrics
    threads: Threads
    rng: Random

    async def generate(self, http: Request) -> Response:
        require_ready(self.engine)
        call = await self._read(http)
        call_id = uuid4().hex
        logger.info("call %s: %d images for user %s", call_id, len(call.specs), shown(call.user))
        tickets: list[Ticket] = []
        with self._all_or_nothing(tickets):
            self._submit(call, call_id, tickets)
            outcomes = await settle([ticket.outcome for ticket in tickets], http.receive)
        answer = await self._answer(call, tickets, outcomes, self._base_url(http))
        body = await self.threads.run(_json_bytes, answer)
        return Response(body, media_type="application/json", headers={"x-request-id": call_id})

    async def _read(self, http: Request) -> ImageCall:
        try:
            body = await read_json(http, self.config.max_body_bytes)
            return image_call(body, self.engine.info, self.config, self.rng)
        except ApiError:
            self.metrics.count_invalid()
            raise

    def _submit(self, call: ImageCall, call_id: str, tickets: list[Ticket]) -> None:
        """Submit every image, appending to `tickets` as the engine accepts them.

        Raises:
            ApiError: the engine refused one.
        """
        arrival_ns = self.engine.now_ns()
        deadline_ns = None if call.slo_s is None else arrival_ns + ns_from_s(call.slo_s)
        for index, spec in enumerate(call.specs):
            uid = f"{call_id}-{index}"
            answer = self.engine.submit(spec, uid=uid, deadline_ns=deadline_ns, on_miss=call.on_miss)
            if isinstance(answer, Refusal):
                self.metrics.count_rejected()
                raise refused(answer, call.slo_s, arrival_ns)
            self.metrics.follow(answer)
            tickets.append(answer)

    @contextmanager
    def _all_or_nothing(self, tickets: list[Ticket]) -> Iterator[None]:
        """However the block is left early, cancel what is still open."""
        try:
            yield
        except BaseException as error:
            for ticket in tickets:
                if not ticket.outcome.done():
                    self.engine.cancel(ticket.request.uid, _cancel_reason(error))
            raise

    async def _answer(
        self, call: ImageCall, tickets: Sequence[Ticket], outcomes: Sequence[Outcome], base_url: str
    ) -> ImagesResponse:
        parts = [
            self._image(call, index, ticket, outcome, base_url)
            for index, (ticket, outcome) in enumerate(zip(tickets, outcomes, strict=True))
        ]
        data = await asyncio.gather(*parts)
        size = str(call.specs[0].shape)
        return ImagesResponse(created=int(time.time()), data=data, output_format=call.output_format, size=size)

    async def _image(self, call: ImageCall, index: int, ticket: Ticket, outcome: Outcome, base_url: str) -> ImageData:
        assert outcome.image is not None
        story = image_story(call, index, ticket, outcome)
        run = self.threads.run
        if not call.as_url:
            text = await run(encode_base64, outcome.image, call.output_format, call.quality)
            return ImageData(b64_json=text, tilework=story)
        content = await run(encode, outcome.image, call.output_format, call.quality)
        await self._store(outcome.uid, content, f"image/{call.output_format}")
        return ImageData(url=f"{base_url}/v1/images/{outcome.uid}/content", tilework=story)

    async def _store(self, uid: str, content: bytes, media_type: str) -> None:
        answer = await self.store.put(uid, content, media_type, self.engine.now_ns())
        if isinstance(answer, TooLarge):
            message = (
                f"The image has {answer.num_bytes} bytes, but this server keeps at most {answer.max_bytes} bytes of"
                ' results. Ask for response_format "b64_json", or raise result_bytes.'
            )
            raise ApiError(500, message, kind=SERVER, code="result_too_large")

    def _base_url(self, http: Request) -> str:
        return (self.config.public_url or str(http.base_url)).rstrip("/")


def require_ready(engine: Engine) -> None:
    """Raises:
    ApiError: 503 if the engine takes no requests now.
    """
    health = engine.health()
    if health.draining:
        raise not_ready("it is stopping")
    if health.num_devices_up == 0:
        raise not_ready(f"none of its {health.num_devices} devices is up")


async def settle(outcomes: Sequence[asyncio.Future[Outcome]], receive: Receive) -> list[Outcome]:
    """Wait until every image is done, watching the connection. The futures themselves are never cancelled.

    Raises:
        ApiError: an image ended otherwise.
        ClientDisconnect: the client went away first.
    """
    gone = asyncio.create_task(_disconnected(receive))
    waiting = set(outcomes)
    try:
        while waiting:
            watched: set[asyncio.Future[Any]] = {gone, *waiting}
            ended, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if gone in ended:
                gone.result()
                raise ClientDisconnect
            for outcome in waiting & ended:
                _require_done(outcome.result())
            waiting -= ended
    finally:
        gone.cancel()
    return [outcome.result() for outcome in outcomes]


async def _disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _require_done(outcome: Outcome) -> None:
    if outcome.status is Status.CANCELLED:
        raise not_ready(f"image {outcome.uid} was cancelled: {outcome.reason}")
    if outcome.status is not Status.DONE:
        message = f"Image {outcome.uid} failed: {outcome.reason}. The request may be sent again."
        raise ApiError(500, message, kind=SERVER, code="generation_failed")


def refused(refusal: Refusal, slo_s: float | None, arrival_ns: int) -> ApiError:
    """429 with the earliest deadline that could be met, or 503 if there is none.

    `Retry-After` says after how long the deadline that was asked for could be met. For a call of several images both
    are lower bounds: they come from the first image that was refused.
    """
    if refusal.earliest_ns is None:
        return not_ready(refusal.reason)
    earliest_s = _ceil_ms(refusal.earliest_ns - arrival_ns)
    retry_s = max(1, math.ceil(earliest_s - (slo_s or 0.0)))
    message = (
        f"slo_s = {shown(slo_s)} cannot be met: {refusal.reason}. The earliest deadline that can is"
        f' slo_s = {earliest_s}: ask for that, or send on_miss "best_effort", or retry in {retry_s} seconds.'
    )
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        param="slo_s",
        code="deadline_unreachable",
        headers={"Retry-After": str(retry_s), "x-should-retry": "false"},
        extra={"tilework": {"uid": refusal.uid, "slo_s": slo_s, "earliest_s": earliest_s}},
    )


def _ceil_ms(duration_ns: int) -> float:
    """Seconds, rounded up to milliseconds, so that the answer is still enough."""
    return math.ceil(duration_ns * 1000 / NS_PER_S) / 1000


def _cancel_reason(error: BaseException) -> str:
    if isinstance(error, ClientDisconnect):
        return "the client has disconnected"
    if isinstance(error, ApiError):
        return f"another image of the call ended it ({error.code})"
    return f"the call was aborted ({type(error).__name__})"


def _json_bytes(answer: ImagesResponse) -> bytes:
    """ASCII only, so that a client's odd characters come back escaped."""
    return json.dumps(answer.model_dump(mode="python")).encode("ascii")
