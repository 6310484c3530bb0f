"""Statuses, headers and bodies that `/docs` shows beside the code. The examples are in `examples`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from tilework.server.api.examples import ERRORS, EXAMPLES
from tilework.server.http.body_limits import FORM, TEXT_FORM
from tilework.server.http.sse import MEDIA_TYPE
from tilework.server.schema.answers import ErrorResponse
from tilework.server.schema.chat_request import chat_schema
from tilework.server.schema.edit_request import edit_form_schema, edit_schema
from tilework.server.schema.image_request import request_schema
from tilework.server.schema.video_request import video_form_schema, video_schema


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


# Headers and fields to add to the route's example, {"headers": ..., "fields": ...}, to get this answer.
CALL = "x-tilework-call"
_RETRY_HEADERS = {409: ("Retry-After",), 429: ("Retry-After", "Link"), 503: ("Retry-After",)}
_ANY_CALL = (431, 500, 503)
IMAGE_BODY = _body(request_schema())
CHAT_BODY = _body(chat_schema())
EDIT_BODY = _body(edit_schema())
EDIT_BODY["requestBody"]["content"][FORM] = {"schema": edit_form_schema()}
VIDEO_BODY = _body(video_schema())
VIDEO_BODY["requestBody"]["content"] |= {
    FORM: {"schema": video_form_schema(has_files=True)},
    TEXT_FORM: {"schema": video_form_schema(has_files=False)},
}
IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]*$"},
    "description": "The same body with the same key joins the first call.",
}
PREFER = {
    "name": "Prefer",
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "respond-async answers 202 at once; with wait=N, after at most N seconds.",
}
RANGE = {
    "name": "Range",
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "A part of the file, such as bytes=0-1023 (one part).",
}
_EVENT = {  # One event: OpenAPI 3.1 has no word for the stream itself.
    "type": "object",
    "required": ["event", "data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "contentMediaType": "application/json"}},
}
CALL_HEADERS = ("x-request-id", "x-tilework-slo-s", "x-tilework-slo-source", "Idempotent-Replayed")
_HEADERS = {
    "x-request-id": "Uid of the call",
    "x-tilework-slo-s": "Deadline of the call in seconds from its arrival, if it has one",
    "x-tilework-slo-source": "Source of the deadline: request, tenant, class, model or server",
    "Idempotent-Replayed": "true if an earlier request with the same key started the call",
    "Preference-Applied": "Parts of Prefer that the server applied",
    "Location": "URL of the status of the call",
    "Accept-Ranges": "bytes",
    "Content-Range": "Part of the file that the answer holds",
    "ETag": "Name of the file's content",
    "Retry-After": "Seconds until you may try again",
    "Link": "URL of the same route at another set that could begin the call earlier, with rel=alternate; see "
    "`/v1/sets`",
}
HEADERS_OF_OURS = tuple(name for name in _HEADERS if name != "Accept-Ranges")
"""Headers of answers that a page of another origin may read."""


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe these statuses, and those that any call may get, each with an example."""
    return {status: _error(status) for status in sorted({*statuses, *_ANY_CALL})}


def good(
    description: str, *headers: str, example: str | None = None, asked: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Describe a JSON answer and its headers; its schema is the route's model, which has an example.

    `example` is the name of another one in `EXAMPLES`. `asked` are the headers of the request that gets this answer, if
    it is not the route's usual one.
    """
    content: dict[str, Any] = {} if example is None else {"example": example}
    if asked is not None:
        content[CALL] = {"headers": asked}
    return {"description": description, "headers": header_docs(*headers), "content": {"application/json": content}}


def stream(description: str, events: str, *, fields: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Describe server-sent events; `fields` of the body get this answer, if it is not the route's usual one."""
    content: dict[str, Any] = {"schema": _EVENT, "example": events}
    if fields is not None:
        content[CALL] = {"fields": fields}
    return {"description": description, "content": {MEDIA_TYPE: content}}


def files(description: str) -> dict[str, Any]:
    schema = {"schema": {"type": "string", "format": "binary"}, "example": "the bytes of an image"}
    pictures = {f"image/{one}": schema for one in ("png", "jpeg", "webp")}
    return {"description": description, "content": {**pictures, "video/mp4": schema}}


def video_file(description: str, *headers: str) -> dict[str, Any]:
    content = {"video/mp4": {"schema": {"type": "string", "format": "binary"}, "example": "the bytes of a video"}}
    return {"description": description, "headers": header_docs(*headers), "content": content}


def video_variants() -> dict[str, Any]:
    """Describe the file of a video, or a picture of it."""
    answer = video_file("The file, or an image of it")
    for form in ("jpeg", "webp"):
        schema = {"type": "string", "format": "binary"}
        answer["content"][f"image/{form}"] = {"schema": schema, "example": "the bytes of an image"}
    return answer


def file_part() -> dict[str, Any]:
    return video_file("The part of it that Range asks for", "Accept-Ranges", "Content-Range", "ETag")


def text(description: str, media_type: str, example: str) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": {"type": "string"}, "example": example}}}


def header_docs(*names: str) -> dict[str, Any]:
    return {name: {"description": _HEADERS[name], "schema": {"type": "string"}} for name in names}


def install_openapi(app: FastAPI, *, has_keys: Callable[[], bool]) -> None:
    """Describe the routes as they are: a wrong parameter is a 400 here, not FastAPI's 422.

    `has_keys` says whether requests need a key.
    """

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            routes = sorted(app.routes, key=_is_of_operations)  # They come last; the application begins with them.
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=routes)
            _drop_validation(schema)
            _fill_examples(schema)
            app.openapi_schema = schema
        if not has_keys():
            return app.openapi_schema
        schemes = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        components = app.openapi_schema["components"] | schemes
        return app.openapi_schema | {"components": components, "security": [{"key": []}]}

    app.openapi = describe  # type: ignore[method-assign]


def _drop_validation(schema: dict[str, Any]) -> None:
    for methods in schema["paths"].values():
        for operation in methods.values():
            answer = operation["responses"].get("422", {})
            if "HTTPValidationError" in str(answer):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)


def _fill_examples(schema: dict[str, Any]) -> None:
    """Give models their examples, and replace names of others: FastAPI itself would leave out what is null in them."""
    for name, model in schema["components"]["schemas"].items():
        if name in EXAMPLES:
            model["examples"] = [EXAMPLES[name]]
    for methods in schema["paths"].values():
        for operation in methods.values():
            for answer in operation["responses"].values():
                content = answer.get("content", {}).get("application/json", {})
                if "example" in content:
                    content["example"] = EXAMPLES[content["example"]]


def _error(status: int) -> dict[str, Any]:
    return {
        "description": ERRORS[status][0],
        "model": ErrorResponse,
        "content": {"application/json": {"example": f"error {status}"}},
        "headers": header_docs(*_RETRY_HEADERS.get(status, ())),
    }


def _is_of_operations(route: BaseRoute) -> bool:
    return isinstance(route, APIRoute) and "operations" in route.tags
