"""The errors for clients whose call is refused by the engine, or by a tenant's limit."""

from __future__ import annotations

import math

from tilework.core.actions import Reject
from tilework.core.request import OnMiss, RefusalCode
from tilework.core.time import NS_PER_S
from tilework.server.calls.errors import CallError, CallRefused, NotReady, invalid, not_ready
from tilework.server.calls.parsing.deadlines import Deadline
from tilework.server.calls.parsing.image_call import ImageCall
from tilework.server.calls.parsing.sizes import size_text
from tilework.server.tenants import Tenant
from tilework.server.text import counted, shown

RETRY_BUSY_S = 5  # Used if no time can be predicted, since no device is up.
RETRY_UNKEPT_S = 10  # As long as a store that is away may not be asked.
_INPUT_FULL = "input_full"
NO_ROOM = frozenset({RefusalCode.QUEUE, RefusalCode.TENANT, RefusalCode.DEADLINE, _INPUT_FULL})
"""Codes of refusals after which another set may have room: a tenant has a share of each set's queue."""


def refused(refusal: Reject, ask: ImageCall, arrival_ns: int) -> CallError:
    """Return the error for a call that the engine has refused."""
    match refusal.code:
        case RefusalCode.DEADLINE:
            assert ask.deadline is not None
            if ask.terms.on_miss is OnMiss.DROP:
                return _too_short(refusal, ask.deadline, arrival_ns)
            if refusal.earliest_ns is None:
                return _unreachable_together(refusal, ask.deadline)
            return _unreachable(refusal, ask.deadline, arrival_ns, len(ask.specs))
        case RefusalCode.QUEUE:
            return _no_room(f"The queue is full: {refusal.reason}.", refusal, arrival_ns)
        case RefusalCode.TENANT:
            return _no_room(f"Your share of the queue is used up: {refusal.reason}.", refusal, arrival_ns)
        case RefusalCode.UNKNOWN_COST:
            size = size_text(ask.specs[0].shape)
            remedy = f"Its cost is not known here: {refusal.reason}. Ask for another size."
            return invalid("size", size, remedy, code=refusal.code.value)
        case RefusalCode.MEMORY:
            return _does_not_fit(refusal, "size", size_text(ask.specs[0].shape), "Ask for less")
        case RefusalCode.WEIGHTS:
            return _does_not_fit(refusal, "model", ask.model, "Use another model")
        case RefusalCode.LORAS:
            return _does_not_fit(refusal, "lora", ask.lora_names, "Use fewer or smaller ones")
        case _:
            return not_ready(refusal.reason)


def _does_not_fit(refusal: Reject, field: str, value: object, remedy: str) -> CallError:
    return invalid(field, value, f"It does not fit: {refusal.reason}. {remedy}.", code=refusal.code.value)


def queue_full(refusal: Reject) -> CallRefused:
    """Return the error for any call that asks for no promise, while the engine would refuse them all."""
    return _no_room(f"The queue is full: {refusal.reason}.", refusal, arrival_ns=0)


def too_many_open(tenant: Tenant, num_open: int, num_asked: int, retry_s: int) -> CallRefused:
    message = (
        f"n = {num_asked} is not accepted now: {num_open} of your images are open, and at most {tenant.max_open} may"
        f" be. Wait for some to end, cancel some, or retry in {counted(retry_s, 'second')}."
    )
    return CallRefused(message, field="n", code="too_many_open", retry_s=retry_s)


def too_many_a_minute(tenant: Tenant, wait_ns: int) -> CallRefused:
    retry_s = max(1, math.ceil(wait_ns / NS_PER_S))
    message = (
        f"This key may make {tenant.requests_per_minute} calls for images a minute, and has made them. Retry in "
        f"{counted(retry_s, 'second')}."
    )
    return CallRefused(message, code="rate_limit_exceeded", retry_s=retry_s)


def input_full(num_held: int, num_asked: int, most_bytes: int) -> CallRefused:
    message = (
        f"The input images of the call take {num_asked} bytes of memory. Those of open calls have {num_held} of "
        f"{most_bytes}. Send smaller images, or retry in {counted(RETRY_BUSY_S, 'second')}."
    )
    return CallRefused(message, code=_INPUT_FULL, retry_s=RETRY_BUSY_S)


def cannot_keep(reason: str) -> NotReady:
    """Return the error for a call whose images are to be fetched later."""
    message = (
        f"Images that are fetched later cannot be kept now: {reason}. Wait for the answer, with response_format"
        f' "b64_json", or retry in {counted(RETRY_UNKEPT_S, "second")}.'
    )
    return NotReady(message, code="results_full", retry_s=RETRY_UNKEPT_S)


def _unreachable(refusal: Reject, deadline: Deadline, arrival_ns: int, num_images: int) -> CallError:
    """Return the error for a deadline that cannot be met now. After `retry_s` it could be, if waiting helps."""
    assert refusal.earliest_ns is not None
    earliest_s = _ceil_ms(refusal.earliest_ns - arrival_ns)
    retry_s = None if refusal.retry_ns is None else max(1, math.ceil(refusal.retry_ns / NS_PER_S))
    field, earliest = deadline.field, deadline.moved(earliest_s)
    retry = "" if retry_s is None else f", or retry in {counted(retry_s, 'second')}"
    of_all = "" if num_images == 1 else f" for all {num_images} images"
    judged = {"uid": refusal.uid, "slo_s": deadline.slo_s, "slo_source": deadline.source}
    as_time = {"earliest": earliest} if isinstance(earliest, str) else {}
    message = (
        f"{field} = {shown(deadline.value)} cannot be met: {refusal.reason}. The earliest deadline that can be "
        f"met{of_all} is"
        f' {field} = {shown(earliest)}: ask for that, or send on_miss "best_effort"{retry}.'
    )
    return CallRefused(
        message,
        field=field,
        code=refusal.code.value,
        retry_s=retry_s,
        resend=False,
        details={**judged, "earliest_s": earliest_s, **as_time},
    )


def _unreachable_together(refusal: Reject, deadline: Deadline) -> CallError:
    """Return the error for images of which no deadline was found that can be met for all of them together."""
    message = (
        f"{deadline.field} = {shown(deadline.value)} cannot be met: {refusal.reason}. No deadline was found for all of"
        f' them together: ask for fewer, or send on_miss "best_effort".'
    )
    details = {"uid": refusal.uid, "slo_s": deadline.slo_s, "slo_source": deadline.source, "earliest_s": None}
    code = refusal.code.value
    return CallRefused(message, field=deadline.field, code=code, retry_s=RETRY_BUSY_S, resend=False, details=details)


def _too_short(refusal: Reject, deadline: Deadline, arrival_ns: int) -> CallError:
    """Return the error for a deadline that could not be met even if nothing else ran, so that a retry is of no use."""
    assert refusal.earliest_ns is not None
    field, earliest = deadline.field, deadline.moved(_ceil_ms(refusal.earliest_ns - arrival_ns))
    remedy = f'It cannot be met: {refusal.reason}. Use {field} = {shown(earliest)} or later, or on_miss "best_effort".'
    error = invalid(field, deadline.value, remedy, code=refusal.code.value)
    error.details |= {"uid": refusal.uid, "slo_s": deadline.slo_s, "slo_source": deadline.source}
    return error


def _no_room(message: str, refusal: Reject, arrival_ns: int) -> CallRefused:
    """Return the error for a full queue: by `retry_s` it should be short enough, by `earliest_s` the call done."""
    earliest_s = None if refusal.earliest_ns is None else _ceil_ms(refusal.earliest_ns - arrival_ns)
    retry_s = RETRY_BUSY_S if refusal.retry_ns is None else max(1, math.ceil(refusal.retry_ns / NS_PER_S))
    return CallRefused(
        f"{message} Retry in {counted(retry_s, 'second')}.",
        code=refusal.code.value,
        retry_s=retry_s,
        details={"uid": refusal.uid, "earliest_s": earliest_s},
    )


def _ceil_ms(duration_ns: int) -> float:
    """Convert to seconds, rounded up to milliseconds, so that the answer is still enough."""
    return math.ceil(duration_ns * 1000 / NS_PER_S) / 1000
