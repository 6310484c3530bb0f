"""Refusals in the shape that OpenAI's clients read: {"error": {message, type, param, code}}.

A message names the field, its value and what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

from tilework.server.text import shown

INVALID = "invalid_request_error"
SERVER = "server_error"
CLOSE = {"Connection": "close"}
"""Headers of an answer that comes before all of the body has been read."""


class ApiError(Exception):
    """A refusal as an HTTP answer. `type` is one of OpenAI's words; `extra` are further fields of `error`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = error_type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def body(self) -> dict[str, object]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, **self.extra}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def invalid(param: str, value: object, remedy: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{param} = {shown(value)} is not accepted. {remedy}", param=param, code=code)


def long_head(max_bytes: int) -> ApiError:
    message = f"URL and headers exceed {max_bytes} bytes together; send shorter ones."
    return ApiError(431, message, code="head_too_large", headers={"Connection": "close"})


def many_headers(most: int) -> ApiError:
    message = f"The request has more than {most} headers; send fewer."
    return ApiError(431, message, code="too_many_headers", headers={"Connection": "close"})


def internal_error() -> ApiError:
    return ApiError(500, "The server failed to answer; its log says why.", error_type=SERVER, code="internal_error")
