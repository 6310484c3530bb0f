"""The reasons why a call is not served, in terms of calls: each error names the field, its value and the remedy.

The class says what went wrong, and `api.errors` gives each class its HTTP status. HTTP is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilework.server.schema.answers import ErrorDetail, ErrorType
from tilework.server.text import shown

RETRY_NOT_READY_S = 5


class CallError(Exception):
    """The error of a call that ends without images.

    `type` is OpenAI's word for the class of error, `field` the field of the request that is wrong. `details` are
    further fields of the error, for instance the earliest deadline that can be met. After `retry_s` seconds the same
    call may succeed. `resend` says whether a client library should send the call again by itself; None leaves that to
    the library.
    """

    type: ErrorType = "invalid_request_error"
    code = "invalid_value"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        retry_s: int | None = None,
        resend: bool | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.field = field
        self.retry_s = retry_s
        self.resend = resend
        self.details = dict(details or {})

    def detail(self) -> ErrorDetail:
        """Return the error as a client reads it."""
        named = {"message": self.message, "type": self.type, "param": self.field, "code": self.code}
        return ErrorDetail.model_validate({**named, **self.details})


class InvalidValue(CallError):
    """A field of the request has a value that cannot be used, or is missing."""


class UnknownModel(CallError):
    """The request names a model that is not served here."""

    code = "model_not_found"


class ModelNotServed(CallError):
    """The request names a model of the server's start that cannot run on its devices."""

    type = "server_error"
    code = "model_not_served"


class UnknownCall(CallError):
    """The tenant has no such call."""

    code = "request_not_found"


class NotDone(CallError):
    """The images are asked for before they are done."""

    code = "not_ready"


class ContentRefused(CallError):
    """A stage of the model does not serve what the request asks for, and says why."""

    code = "content_policy_violation"


class CallCancelled(CallError):
    """The call was cancelled on request."""

    code = "cancelled"


class PicturesGone(CallError):
    """The images are not kept any more, or were never kept."""

    code = "result_expired"


class ResultsUnreachable(CallError):
    """The images are kept on other machines, of which none answers."""

    type = "server_error"
    code = "results_unreachable"


class KeyReused(CallError):
    """The idempotency key was sent with another body before."""

    code = "idempotency_key_reused"


class CallRefused(CallError):
    """Admission, or a limit of the tenant, does not accept the call now."""

    type = "rate_limit_error"


class CallFailed(CallError):
    """The images could not be made or kept; the client made no mistake."""

    type = "server_error"
    code = "internal_error"


class Expired(CallError):
    """The deadline cannot be met any more, and the call asked to be dropped then."""

    type = "server_error"
    code = "deadline_missed"


class NotReady(CallError):
    """The server takes no calls now, or cannot finish this one. `is_stopping`: it will not take any more."""

    type = "server_error"
    code = "not_ready"
    is_stopping = False


def invalid(field: str, value: object, remedy: str, code: str | None = None) -> InvalidValue:
    return InvalidValue(f"{field} = {shown(value)} is not accepted. {remedy}", field=field, code=code)


def not_ready(
    reason: str,
    *,
    is_stopping: bool = False,
    code: str | None = None,
    details: Mapping[str, object] | None = None,
) -> NotReady:
    message = f"The server is not ready: {reason}. Try again in {RETRY_NOT_READY_S} seconds."
    error = NotReady(message, code=code, retry_s=RETRY_NOT_READY_S, details=details)
    error.is_stopping = is_stopping
    return error


def internal_error() -> CallFailed:
    return CallFailed("The server failed to answer; its log says why.")


def gone(uid: str, reason: str) -> PicturesGone:
    message = f"The images of request {uid} are gone: {reason}. Send the request again, with another key if it has one."
    return PicturesGone(message, field="uid")
