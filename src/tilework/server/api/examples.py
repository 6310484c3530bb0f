"""Examples of answers of the server, by their models; `/docs` shows them. Those in `examples.json` were recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilework.server.http.sse import chunk, event

UID = "c5b6a1d2e3f405162738495a6b7c8d9e"

ERRORS: dict[int, tuple[str, str, str, str | None, str]] = {
    # status: description, type, code, param, message
    400: (
        "A value is wrong; the message names the field, its value, and the remedy",
        "invalid_request_error",
        "invalid_value",
        "size",
        'size = "100x90" is not accepted. Sides are multiples of 16, at most 512; the nearest size is "96x96".',
    ),
    401: (
        "The API key is missing or wrong",
        "invalid_request_error",
        "invalid_api_key",
        None,
        'The API key is missing or wrong. Send "Authorization: Bearer KEY" with a key of this server.',
    ),
    403: (
        "The key may not do this: it needs the scope admin",
        "invalid_request_error",
        "permission_denied",
        None,
        "This key may not see the traffic of all tenants. Send one with the scope admin: TILEWORK_ADMIN_KEY, or admin ="
        " true in the file of tenants.",
    ),
    404: (
        "There is no such thing here, or it is another tenant's",
        "invalid_request_error",
        "request_not_found",
        "uid",
        f'There is no request "{UID}"; requests that have ended are known for at most 7200 seconds.',
    ),
    405: (
        "The path has other methods (`method_not_allowed`); `Allow` names them",
        "invalid_request_error",
        "method_not_allowed",
        None,
        'PUT "/v1/requests" is not supported; use GET, HEAD.',
    ),
    408: (
        "Head or body came too slowly",
        "invalid_request_error",
        "body_too_slow",
        None,
        "The body was not complete after 30 seconds; send it faster, or a shorter one.",
    ),
    409: (
        "The call is not done yet (`not_ready`) or was cancelled while you waited for it (`cancelled`), or too few "
        "requests have come for a plan (`too_little_traffic`)",
        "invalid_request_error",
        "not_ready",
        "uid",
        f"Request {UID} is running, not done yet. Retry in 2 seconds.",
    ),
    410: (
        "The images were kept for a while and are gone (`result_expired`), or were never made",
        "invalid_request_error",
        "result_expired",
        "uid",
        f"The images of request {UID} are gone: they were deleted or lost, made room for newer ones, or were 3600 "
        "seconds old. Send the request again, with another key if it has one.",
    ),
    413: (
        "The body is too large",
        "invalid_request_error",
        "body_too_large",
        None,
        "The body exceeds 1048576 bytes; send a shorter one.",
    ),
    415: (
        "The body is not JSON (nor a form, where that is accepted)",
        "invalid_request_error",
        "unsupported_media_type",
        None,
        'Content-Type = "text/plain" is not accepted; send JSON with "Content-Type: application/json".',
    ),
    416: (
        "The Range has no byte of the file; `Content-Range` holds the size of the file",
        "invalid_request_error",
        "range_not_satisfiable",
        "Range",
        'Range = "bytes=900000-" is not accepted. The file has 183422 bytes: ask for some of them.',
    ),
    422: (
        "The idempotency key belongs to another body",
        "invalid_request_error",
        "idempotency_key_reused",
        "Idempotency-Key",
        'Idempotency-Key = "k1" belongs to another body. Send the same body again, or another key.',
    ),
    429: (
        "The deadline cannot be met (`deadline_unreachable`; `earliest_s` is the earliest that can), a limit is "
        "reached of the server (`queue_full`; `input_full`: input images), your tenant (`tenant_share` of the queue, "
        "`too_many_open`) or your key (`rate_limit_exceeded`), or another plan is being made (`planner_busy`); "
        "`Retry-After` says when to ask again; `alternate` is the URL of another set that could begin the call "
        "earlier, if there is one",
        "rate_limit_error",
        "deadline_unreachable",
        "slo_s",
        "slo_s = 1 cannot be met: reservations leave no room for it, with 12 other requests present. The earliest "
        'deadline that can be met is slo_s = 3.251: ask for that, or send on_miss "best_effort", or retry in 3 '
        "seconds.",
    ),
    431: (
        "URL and headers are too long",
        "invalid_request_error",
        "head_too_large",
        None,
        "URL and headers exceed 16384 bytes together; send shorter ones.",
    ),
    500: (
        "The image could not be made, or the server failed",
        "server_error",
        "internal_error",
        None,
        "The server failed to answer; its log says why.",
    ),
    503: (
        "No device is up, the server is starting or stopping, or it has too many connections, or too many large bodies",
        "server_error",
        "not_ready",
        None,
        "The server is not ready: it is stopping: 3 calls open, 2 images not fetched, at most 20 s. Try again in 5 "
        "seconds.",
    ),
    504: (
        'The deadline could not be met any more, and on_miss is "drop"',
        "server_error",
        "deadline_missed",
        None,
        'Image r1-0 was dropped, as on_miss "drop" asks: even if nothing else ran, it would finish 0.42 s late. Ask for'
        " a later deadline.",
    ),
}
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "examples.json").read_text("utf-8"))
"""Answers of a server with the shipped model, and of one with a simulated model of clips; `record` wrote them."""


def _stream(events: list[dict[str, Any]]) -> str:
    return b"".join(event(one["type"], {key: one[key] for key in one if key != "type"}) for one in events).decode()


PROGRESS = _stream(RECORDED["progress"])
PICTURES = _stream(RECORDED["pictures"])
LIVE = _stream([{"type": "tilework.live", **RECORDED["LiveState"]}])
CHUNKS = b"".join(map(chunk, RECORDED["chunks"])).decode()
_MORE: Mapping[int, Mapping[str, object]] = {
    429: {"uid": f"{UID}-0", "slo_s": 1.0, "slo_source": "request", "earliest_s": 3.251},
    503: {"status": "stopping", "devices_up": 8, "devices": 8, "open_requests": 3},
}


def _error_example(status: int) -> object:
    _, error_type, code, param, message = ERRORS[status]
    return {"error": {"message": message, "type": error_type, "param": param, "code": code, **_MORE.get(status, {})}}


EXAMPLES: dict[str, object] = {
    **RECORDED,
    "edit": {**RECORDED["ImagesResponse"], "size": "16x16"},  # As any image; the shipped model edits none.
    **{f"error {status}": _error_example(status) for status in ERRORS},
}
