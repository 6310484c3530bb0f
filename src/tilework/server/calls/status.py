"""The status of a call, with times in seconds: the answer of `GET /v1/requests/{uid}`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from tilework.control.decisions import describe
from tilework.core.actions import Accept, Finish
from tilework.core.request import Status
from tilework.core.time import s_from_ns
from tilework.runtime.engine import Engine
from tilework.runtime.ticket import Outcome, Ticket
from tilework.server.calls.call import Call, Finished
from tilework.server.calls.errors import CallCancelled, CallError
from tilework.server.calls.parsing.sizes import size_text
from tilework.server.calls.timeline import request_timeline
from tilework.server.schema.answers import DecisionModel, ImageStatus, RequestStatus, RequestTimeline, State
from tilework.server.text import time_text


@dataclass(frozen=True, slots=True)
class CallEta:
    """Predicted end, and the time by which nine of ten are done: in seconds from arrival and as times."""

    seconds: float
    p90_s: float
    text: str
    p90_text: str


def eta(call: Call, engine: Engine | None, ticket: Ticket) -> CallEta | None:
    """Return the present prediction for an image, without an engine that of its admission; None once it has ended."""
    if ticket.outcome.done():
        return None
    now = None if engine is None else engine.predict(ticket.request.uid)
    both_ns = (ticket.eta_ns, ticket.eta_p90_ns) if now is None else (now.eta_ns, now.p90_ns)
    seconds, p90_s = (s_from_ns(at_ns - call.arrival_ns) for at_ns in both_ns)
    texts = (time_text(call.arrived_s + one_s) for one_s in (seconds, p90_s))
    return CallEta(round(seconds, 6), round(p90_s, 6), *texts)


def call_status(
    call: Call, engine: Engine | None, end: Finished | CallError | None = None, expires_s: float | None = None
) -> RequestStatus:
    """Return the status of a call; `end` and `expires_s` (Unix time) if it has ended.

    With an `engine` the ETAs are predicted now: each takes time in proportion to the queue. Without it they are those
    of admission.
    """
    images = [_image_status(call, index, ticket, engine, end) for index, ticket in enumerate(call.tickets)]
    etas = [image for image in images if image.eta_s is not None]
    last = max(etas, key=lambda image: image.eta_s or 0.0, default=None)
    last_p90 = max(etas, key=lambda image: image.eta_p90_s or 0.0, default=None)
    first = call.ask.specs[0]
    return RequestStatus(
        uid=call.uid,
        status=_state_of_call(images, end),
        created=int(call.arrived_s),
        arrived=time_text(call.arrived_s),
        priority=call.ask.terms.priority,
        slo_s=call.ask.slo_s,
        slo_source=call.ask.slo_source,
        is_promised=call.ask.is_promised,
        warnings=list(call.ask.warnings),
        eta_s=last and last.eta_s,
        eta=last and last.eta,
        eta_p90_s=last_p90 and last_p90.eta_p90_s,
        eta_p90=last_p90 and last_p90.eta_p90,
        size=size_text(first.shape),
        frames=first.frames,
        output_format=call.ask.output_format,
        images=images,
        error=end.detail() if isinstance(end, CallError) else None,
        expires=None if expires_s is None else time_text(expires_s),
    )


def _image_status(
    call: Call, index: int, ticket: Ticket, engine: Engine | None, end: Finished | CallError | None
) -> ImageStatus:
    outcome = ticket.outcome.result() if ticket.outcome.done() else None
    expected = eta(call, engine, ticket)
    queue_ns = ticket.queue_ns
    return ImageStatus(
        uid=ticket.request.uid,
        index=index,
        state=_state_of_image(ticket.status),
        step=ticket.steps_done,
        steps=ticket.request.steps,
        eta_s=expected and expected.seconds,
        eta=expected and expected.text,
        eta_p90_s=expected and expected.p90_s,
        eta_p90=expected and expected.p90_text,
        queue_s=None if queue_ns is None else round(s_from_ns(queue_ns), 6),
        reason=None if outcome is None else outcome.reason or None,
        timeline=_timeline(call, index, ticket, outcome, end),
    )


def _timeline(
    call: Call, index: int, ticket: Ticket, outcome: Outcome | None, end: Finished | CallError | None
) -> RequestTimeline | None:
    if outcome is None or outcome.status is not Status.DONE:
        return None
    return end.timelines[index] if isinstance(end, Finished) else request_timeline(call.ask, index, ticket, outcome)


def _state_of_image(status: Status) -> State:
    """Return the state of an image for clients. One that was dropped as late has failed; its call's error says why."""
    return "failed" if status is Status.EXPIRED else cast(State, status.value)


def _state_of_call(images: list[ImageStatus], end: Finished | CallError | None) -> State:
    """Return the state of a call: done only when the images can be had; until then running once any image has begun."""
    if isinstance(end, Finished):
        return "done"
    if isinstance(end, CallError):
        return "cancelled" if isinstance(end, CallCancelled) else "failed"
    states = {image.state for image in images}
    if states == {"queued"}:
        return "queued"
    return "paused" if states <= {"queued", "paused"} else "running"


def call_decisions(call: Call) -> list[DecisionModel]:
    """Return everything that was decided about the images of a call so far, in order."""
    decisions = [decision for ticket in call.tickets for decision in _decisions(ticket)]
    return sorted(decisions, key=lambda decision: decision.at_s)


def _decisions(ticket: Ticket) -> list[DecisionModel]:
    history = list(ticket.history)
    job_id = next((action.job_id for _, action in history if isinstance(action, Accept)), 0)
    if ticket.outcome.done():
        outcome = ticket.outcome.result()
        history.append((outcome.finished_ns, Finish(job_id, outcome.uid, outcome.status, outcome.reason)))
    described = (describe(at_ns, action, ticket.request, job_id) for at_ns, action in history)
    return [
        DecisionModel(uid=ticket.request.uid, **decision.to_json()) for decision in described if decision is not None
    ]
