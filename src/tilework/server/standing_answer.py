"""What a front end may answer by itself: that the queue is full, to calls that ask for no promise."""

from __future__ import annotations

from tilework.server.api.errors import api_error
from tilework.server.calls.refusals import queue_full
from tilework.server.engine_protocol import Engine
from tilework.server.frontends.messages import Answer, StandingAnswer

_PATHS = ("/v1/images/generations", "/v1/images/edits", "/v1/videos", "/v1/videos/sync", "/v1/chat/completions")
_PROMISE = (b"on_miss", rb"\u")
"""Neither is in a body that asks for no promise: the name of the field, and how JSON may write its letters."""

_HEADERS = (b"idempotency-key", b"content-encoding")
"""A call with a key may join another one, and what a compressed body asks for is not to be seen."""


def standing_answer(engine: Engine) -> StandingAnswer | None:
    """The answer to calls while the queue is full."""
    refusal = engine.standing_refusal()
    if refusal is None:
        return None
    response = api_error(queue_full(refusal)).response()
    answer = Answer(
        status=response.status_code,
        headers=tuple(response.raw_headers),
        body=bytes(response.body),
        more_body=False,
    )
    return StandingAnswer(
        method="POST",
        paths=_PATHS,
        media_type=b"application/json",
        unless_headers=_HEADERS,
        unless_body=_PROMISE,
        answer=answer,
    )
