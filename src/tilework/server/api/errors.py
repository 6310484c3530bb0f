"""The HTTP status of each error of a call."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.responses import Response

from tilework.server.calls import errors
from tilework.server.calls.errors import CallError, NotReady
from tilework.server.http.errors import ApiError
from tilework.store.results import StoreUnreachable

_log = logging.getLogger("tilework.server")

STATUSES: dict[type[CallError], int] = {
    errors.InvalidValue: 400,
    errors.ContentRefused: 400,
    errors.UnknownModel: 404,
    errors.ModelNotServed: 503,
    errors.UnknownCall: 404,
    errors.NotDone: 409,
    errors.CallCancelled: 409,
    errors.PicturesGone: 410,
    errors.KeyReused: 422,
    errors.CallRefused: 429,
    errors.CallFailed: 500,
    errors.NotReady: 503,
    errors.ResultsUnreachable: 503,
    errors.Expired: 504,
}


def api_error(error: CallError) -> ApiError:
    """Return the error as an answer: its status, and headers that say when and whether to send the call again."""
    headers = {}
    if error.retry_s is not None:
        headers["Retry-After"] = str(error.retry_s)
    if error.resend is not None:
        headers["x-should-retry"] = str(error.resend).lower()
    if isinstance(error, NotReady) and error.is_stopping:
        headers["Connection"] = "close"
    return ApiError(
        STATUSES[type(error)],
        error.message,
        error_type=error.type,
        param=error.field,
        code=error.code,
        headers=headers,
        extra=error.details,
    )


def install_call_errors(app: FastAPI) -> None:
    """Answer every `CallError` that a route raises, and results that cannot be reached."""
    app.add_exception_handler(CallError, _answer)
    app.add_exception_handler(StoreUnreachable, _unreachable)


async def _answer(request: Request, error: Exception) -> Response:
    """Answer an error; if it names another set, with the address of the same route there (RFC 8288)."""
    assert isinstance(error, CallError)
    answer = api_error(error).response()
    if (url := error.details.get("alternate")) is not None:
        answer.headers["Link"] = f'<{str(url).rstrip("/")}{request.url.path}>; rel="alternate"'
    return answer


async def _unreachable(_request: Request, error: Exception) -> Response:
    _log.error("results cannot be reached: %s", error)
    message = "The images are kept on other machines, and none of these answers now. Ask again in a moment."
    return api_error(errors.ResultsUnreachable(message, retry_s=1, resend=True)).response()
