"""The answer that a front end may give by itself: that the queue is full, to calls that ask for no promise."""

from __future__ import annotations

from tilework.runtime.engine import Engine
from tilework.server.api.errors import api_error
from tilework.server.calls.refusals import queue_full
from tilework.server.frontends.messages import AnswerPiece, StandingAnswer

_PATHS = ("/v1/images/generations", "/v1/images/edits", "/v1/videos", "/v1/videos/sync", "/v1/chat/completions")
_PROMISE = (b"on_miss", rb"\u")
"""Parts of a body that may ask for a promise: the name of the field, and JSON's escape for its letters."""

_HEADERS = (b"idempotency-key", b"content-encoding")
"""Headers of calls that may join another one (a key), or whose body cannot be searched (compressed)."""


def standing_answer(engine: Engine) -> StandingAnswer | None:
    """Return the answer to calls while the queue is full; None while it is not."""
    refusal = engine.standing_refusal()
    if refusal is None:
        return None
    response = api_error(queue_full(refusal)).response()
    answer = AnswerPiece(
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
