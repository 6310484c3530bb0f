"""Requests and answers on the wire: OpenAI's images API, and for clips its videos API, with Tilework's extra fields."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tilework.client.record import CallEnd
from tilework.core.cache import OFF
from tilework.core.priority import DEFAULT_CLASS
from tilework.formats.workload import WorkloadRequest

PATH = "/v1/images/generations"
VIDEOS = "/v1/videos"
VIDEO_NOW = f"{VIDEOS}/sync"
"""Path of the route that answers with the file itself; vLLM-Omni has it, too."""
DEFAULT_PROMPT = "a picture"
ResponseFormat = Literal["b64_json", "url", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The fields that are the same for all requests of a drive.

    `model` replaces the requests' `pipeline`. `response_format` "none" leaves the field out. `plain` leaves out
    `slo_s`, `on_miss`, `priority`, `exact`, `lora` and `cache`, which only Tilework knows. `extra_body` overrides
    fields of each body; a value of None takes the field out (OpenAI's own service refuses `num_inference_steps` and
    `seed`).
    """

    model: str | None = None
    response_format: ResponseFormat = "b64_json"
    plain: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def body_of(self, request: WorkloadRequest) -> dict[str, Any]:
        """Return the JSON body for one request. Fields that the workload does not set are left to the server."""
        body: dict[str, Any] = {
            "model": self.model or request.pipeline,
            "prompt": request.prompt or DEFAULT_PROMPT,
            "size": f"{request.width}x{request.height}",
            "num_inference_steps": request.steps,
            "seed": request.seed,
            "user": request.tenant,
        }
        if request.is_clip:
            body["num_frames"] = request.frames
        else:
            response_format = None if self.response_format == "none" else self.response_format
            body |= {"n": 1, "response_format": response_format}
        if request.slo_s is not None and not self.plain:
            body |= {"slo_s": request.slo_s, "on_miss": str(request.on_miss)}
        if request.priority != DEFAULT_CLASS and not self.plain:
            body["priority"] = request.priority
        if request.exact and not self.plain:
            body["exact"] = True
        if request.loras and not self.plain:
            body["lora"] = [{"name": one.name, "scale": one.scale} for one in request.loras]
        if request.cache != OFF and not self.plain:
            body |= {"cache": request.cache, "cache_threshold": request.cache_threshold}
        return {name: value for name, value in (body | dict(self.extra_body)).items() if value is not None}


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The meaning of an HTTP answer. `cause`, `detail` and `num_hops` are as in `Record`; `file` if asked for."""

    status: CallEnd
    file: bytes | None = None
    timeline: Mapping[str, Any] | None = None
    cause: str = ""
    detail: str = ""
    num_hops: int = 0


def read_answer(
    status_code: int, content: bytes, *, response_format: str = "b64_json", decode: bool = True
) -> HttpAnswer:
    """Read the meaning of an HTTP answer; one that breaks the API is an error, whatever its status code.

    With `response_format` "b64_json" the first of `data` must hold an image under that name, else an image or a `url`.
    Without `decode` the image is not checked, and dropped.
    """
    values = parsed(content)
    if status_code != 200:
        return _refusal(status_code, values)
    try:
        first = values["data"][0]
        file = _picture(first, response_format, decode)
        timeline = first.get("tilework")
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        wanted = "b64_json" if response_format == "b64_json" else "b64_json or url"
        return HttpAnswer(CallEnd.ERROR, cause="answer", detail=f"the answer holds no data[0].{wanted} ({error!r})")
    return HttpAnswer(CallEnd.DONE, file=file, timeline=timeline if isinstance(timeline, dict) else None)


def read_video(status_code: int, content: bytes, media_type: str, *, keep: bool = True) -> HttpAnswer:
    """Read the meaning of an answer whose body should be a video file. Without `keep` the file is dropped."""
    if status_code != 200:
        return _refusal(status_code, parsed(content))
    if not media_type.startswith("video/") or not content:
        return HttpAnswer(
            CallEnd.ERROR, cause="answer", detail=f"the answer holds no video, but {media_type or 'nothing'}"
        )
    return HttpAnswer(CallEnd.DONE, file=content if keep else None)


def parsed(content: bytes) -> Any:
    """Parse JSON; None if the content is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _refusal(status_code: int, values: Any) -> HttpAnswer:
    ending = CallEnd.REJECTED if status_code == 429 else CallEnd.FAILED
    return HttpAnswer(ending, cause=f"http {status_code}", detail=_error_text(status_code, values))


def _picture(first: Any, response_format: str, decode: bool) -> bytes | None:
    """Return the image of an entry of `data`; None if dropped. Raises LookupError, TypeError or ValueError."""
    text = first.get("b64_json")
    if text is None and response_format != "b64_json":
        text = first["url"]
        decode = False
    if not isinstance(text, str) or not text:
        raise ValueError("no image")
    return base64.b64decode(text, validate=True) if decode else None


def _error_text(status_code: int, values: Any) -> str:
    """Return code and message of an error in OpenAI's shape, or the status code alone."""
    error = values.get("error") if isinstance(values, dict) else None
    if not isinstance(error, dict):
        return f"HTTP {status_code}"
    return f"HTTP {status_code} {error.get('code') or ''}: {error.get('message') or ''}".replace(" :", ":")
