"""Examples of what the server answers, by name; `/docs` shows them."""

from __future__ import annotations

from collections.abc import Mapping

from tilework.server.http.sse import event

UID = "c5b6a1d2e3f405162738495a6b7c8d9e"

ERRORS: dict[int, tuple[str, str, str, str | None, str]] = {
    # status: what it means, type, code, param, message
    400: (
        "A value is wrong; the message names the field, its value, and what would be right",
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
    404: (
        "There is no such thing here, or it is another tenant's",
        "invalid_request_error",
        "request_not_found",
        "uid",
        f'There is no request "{UID}"; those that have ended are known for 7200 seconds at most.',
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
        "Not done yet (`not_ready`), or somebody cancelled the call while you waited for it (`cancelled`)",
        "invalid_request_error",
        "not_ready",
        "uid",
        f"Request {UID} is running, not done yet. Retry in 2 seconds.",
    ),
    410: (
        "The pictures were kept for a while, and are gone (`result_expired`), or never came",
        "invalid_request_error",
        "result_expired",
        "uid",
        f"The pictures of request {UID} are gone: they were deleted, made room for newer ones, or were 3600 seconds"
        " old. Send the request again, with another key if it has one.",
    ),
    413: (
        "The body is too large",
        "invalid_request_error",
        "body_too_large",
        None,
        "The body exceeds 1048576 bytes; send a shorter one.",
    ),
    415: (
        "The body is not JSON",
        "invalid_request_error",
        "unsupported_media_type",
        None,
        'Content-Type = "text/plain" is not accepted; send JSON with "Content-Type: application/json".',
    ),
    422: (
        "The idempotency key belongs to another body",
        "invalid_request_error",
        "idempotency_key_reused",
        "Idempotency-Key",
        'Idempotency-Key = "k1" belongs to another body. Send the same body again, or another key.',
    ),
    429: (
        "The deadline is out of reach (`deadline_unreachable`; `earliest_s` is the earliest that is not),"
        " the server has enough (`queue_full`), or your tenant has (`tenant_share` of the queue, `too_many_open`);"
        " `Retry-After` says when to ask",
        "rate_limit_error",
        "deadline_unreachable",
        "slo_s",
        "slo_s = 1 cannot be met: 12 requests are ahead. The earliest deadline that can is slo_s = 3.251: ask for"
        ' that, or send on_miss "best_effort", or retry in 3 seconds.',
    ),
    431: (
        "URL and headers are too long",
        "invalid_request_error",
        "head_too_large",
        None,
        "URL and headers exceed 16384 bytes together; send shorter ones.",
    ),
    500: (
        "The picture could not be made, or the server failed",
        "server_error",
        "internal_error",
        None,
        "The server failed to answer; its log says why.",
    ),
    503: (
        "No device is up, the server is starting or stopping, or it has too many connections",
        "server_error",
        "not_ready",
        None,
        "The server is not ready: it is stopping. Try again in 5 seconds.",
    ),
}
_TIMELINE = {
    "uid": f"{UID}-0",
    "seed": 7,
    "status": "done",
    "eta_s": 1.31,
    "latency_s": 1.28,
    "queue_s": 0.02,
    "slo_s": 2.5,
    "on_time": True,
    "segments": [
        {"stage": "diffuse", "devices": [0], "steps": 6, "start_s": 0.03, "end_s": 1.24, "sliced": False, "batch": 1}
    ],
}
_IMAGES = {
    "created": 1767225600,
    "data": [{"b64_json": "iVBORw0KGgo=", "url": None, "revised_prompt": None, "tilework": _TIMELINE}],
    "output_format": "png",
    "size": "256x256",
}
_CHAT = {
    "id": f"chatcmpl-{UID}",
    "object": "chat.completion",
    "created": 1767225600,
    "model": "tiny-shapes",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": [
                    {
                        "type": "image_url",
                        "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="},
                        "stage_durations": {"diffuse": 1.21},
                        "tilework": _TIMELINE,
                    }
                ],
            },
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
}
_RUNNING = {
    "uid": UID,
    "object": "tilework.request",
    "status": "running",
    "created": 1767225600,
    "arrived": "2026-01-01T00:00:00.000Z",
    "priority": "standard",
    "slo_s": 2.5,
    "eta_s": 1.31,
    "eta": "2026-01-01T00:00:01.310Z",
    "size": "256x256",
    "output_format": "png",
    "images": [
        {
            "uid": f"{UID}-0",
            "index": 0,
            "state": "running",
            "step": 3,
            "steps": 6,
            "eta_s": 1.31,
            "eta": "2026-01-01T00:00:01.310Z",
            "queue_s": 0.02,
            "reason": None,
            "timeline": None,
        }
    ],
    "error": None,
    "expires": None,
}
_CANCELLED = {
    **_RUNNING,
    "status": "cancelled",
    "eta_s": None,
    "eta": None,
    "images": [
        {
            **_RUNNING["images"][0],  # type: ignore[index]
            "state": "cancelled",
            "eta_s": None,
            "eta": None,
            "reason": "the client has cancelled it",
        }
    ],
    "error": {
        "message": f"Request {UID} was cancelled: the client has cancelled it. Send it again if you want it.",
        "type": "invalid_request_error",
        "param": None,
        "code": "cancelled",
    },
}
_DECISIONS = {
    "uid": UID,
    "status": "running",
    "decisions": [
        {
            "uid": f"{UID}-0",
            "at_s": 0.0,
            "kind": "accepted",
            "text": "accepted; expected to be done 1.31 s after arrival, 1.19 s before its deadline",
            "devices": [],
            "degree": None,
            "steps": None,
        }
    ],
}
_MODEL = {
    "id": "tiny-shapes",
    "object": "model",
    "created": 1767225600,
    "owned_by": "tilework",
    "tilework": {
        "family": "StableDiffusion3Pipeline",
        "parameters": 4000000,
        "side_multiple": 16,
        "max_side": 512,
        "default_size": "128x128",
        "default_steps": 20,
        "default_guidance_scale": 4.0,
        "policy": "tilework",
    },
}
PROGRESS = event(
    "tilework.progress",
    {"uid": f"{UID}-0", "index": 0, "state": "running", "step": 3, "steps": 6, "eta_s": 1.31},
).decode()
_PICTURE = {
    "b64_json": "iVBORw0KGgo=",
    "background": "opaque",
    "created_at": 1767225600,
    "output_format": "png",
    "quality": "auto",
    "size": "256x256",
}
_TOKENS = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}
_PARTIAL = {"partial_image_index": 0, "tilework": {"uid": f"{UID}-0", "index": 0, "step": 3}}
PICTURES = (
    event("image_generation.partial_image", {**_PICTURE, **_PARTIAL})
    + event("image_generation.completed", {**_PICTURE, "usage": _TOKENS, "tilework": _TIMELINE})
).decode()
EXAMPLES: dict[str, object] = {
    "images": _IMAGES,
    "chat": _CHAT,
    "status": _RUNNING,
    "cancelled": _CANCELLED,
    "list": {"object": "list", "data": [_RUNNING], "first_id": UID, "last_id": UID, "has_more": False},
    "decisions": _DECISIONS,
    "model": _MODEL,
    "model path": {"model_path": "stabilityai/stable-diffusion-3.5-medium"},
    "models": {"object": "list", "data": [_MODEL]},
    "alive": {"status": "ok"},
    "ready": {"status": "ready", "devices_up": 8, "devices": 8, "open_requests": 3, "restored_requests": 0},
}


_MORE: Mapping[int, Mapping[str, object]] = {
    429: {"uid": f"{UID}-0", "slo_s": 1.0, "earliest_s": 3.251},
    503: {"status": "stopping", "devices_up": 8, "devices": 8, "open_requests": 3},
}


def _error_example(status: int) -> object:
    _, kind, code, param, message = ERRORS[status]
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **_MORE.get(status, {})}}


EXAMPLES |= {f"error {status}": _error_example(status) for status in ERRORS}
