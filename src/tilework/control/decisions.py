"""Decisions about a request in words: one sentence with numbers for each action about it.

Callers keep actions with their times, and describe them only when a client asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tilework.core.actions import (
    Accept,
    Action,
    DropToBestEffort,
    Finish,
    HoldBack,
    MoveState,
    Reject,
    RunWork,
    Stop,
    UseCache,
)
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, NS_PER_S, s_from_ns
from tilework.core.work import Group, Work


class DecisionKind(StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"
    STARTED = "started"
    MOVED = "moved"
    STOPPED = "stopped"
    DROPPED = "dropped to best effort"
    CACHED = "turned to its cache"
    HELD_BACK = "held back"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision about the request `uid`; `text` is the sentence, without the time.

    `devices` are its devices, if any, and `steps` the first and last denoising step, counted from 1.
    """

    at_ns: int
    arrival_ns: int
    kind: DecisionKind
    job_ids: tuple[int, ...]
    uid: str
    text: str
    devices: Group = ()
    steps: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"+{s_from_ns(self.at_ns - self.arrival_ns):.3f} s  {self.text}"

    def to_json(self) -> dict[str, Any]:
        """Return the decision as JSON. `at_s` counts from the request's arrival; `degree` is None without devices."""
        return {
            "at_s": round(s_from_ns(self.at_ns - self.arrival_ns), 6),
            "kind": self.kind.value,
            "text": self.text,
            "devices": list(self.devices),
            "degree": len(self.devices) or None,
            "steps": None if self.steps is None else list(self.steps),
        }


def describe(at_ns: int, action: Action, request: Request, job_id: int | None = None) -> Decision | None:
    """Describe an action about `request`; None if it decides nothing about the request itself.

    `job_id` tells which member of a batch the request is; it is ignored for other actions.
    """
    devices: Group = ()
    steps: tuple[int, int] | None = None
    job_ids: tuple[int, ...] = () if job_id is None else (job_id,)
    match action:
        case Accept(accepted_id, _, eta_ns, _, why):
            kind, job_ids = DecisionKind.ACCEPTED, (accepted_id,)
            text = f"accepted; expected to be done {_ending(eta_ns, request)}{_because(why)}"
        case Reject(_, reason, earliest_ns, code):
            kind, text = DecisionKind.REFUSED, f"refused ({code}): {reason}{_earliest(earliest_ns, request)}"
        case RunWork(work):
            kind, job_ids, devices, steps = DecisionKind.STARTED, work.job_ids, work.devices, steps_of(work, job_id)
            text = f"{work_text(work, request, job_id)}{_because(work.why)}"
        case MoveState(moved_id, devices, stages):
            kind, job_ids = DecisionKind.MOVED, (moved_id,)
            whole = ", with all that later stages need" if stages else ""
            text = f"its state moves to {devices_text(devices)}{whole}"
        case Stop(work_id):
            kind, text = DecisionKind.STOPPED, f"work {work_id} is told to stop at its next step boundary"
        case DropToBestEffort(late_id, why):
            kind, job_ids = DecisionKind.DROPPED, (late_id,)
            text = f"dropped to best effort, after those that can still be on time{_because(why)}"
        case HoldBack(held_id, is_start):
            kind, job_ids = DecisionKind.HELD_BACK, (held_id,)
            what, whether = ("waits", "start") if is_start else ("runs on", "stop")
            text = f"{what}: to {whether} it now could break a promise"
        case UseCache(cached_id, _, why):
            kind, job_ids = DecisionKind.CACHED, (cached_id,)
            text = f"its further steps use the cache {request.cache or request.spare_cache}{_because(why)}"
        case Finish(ended_id, _, status, reason):
            kind, job_ids = DecisionKind.FINISHED, (ended_id,)
            text = f"{status} {_ending(at_ns, request)}{_because(reason)}"
        case _:
            return None
    return Decision(
        at_ns=at_ns,
        arrival_ns=request.arrival_ns,
        kind=kind,
        job_ids=job_ids,
        uid=request.uid,
        text=text,
        devices=devices,
        steps=steps,
    )


def describe_all(actions: Iterable[tuple[int, Action]], request: Request, job_id: int | None = None) -> list[Decision]:
    """Return the decisions among these (time, action) pairs, in their order."""
    decisions = (describe(at_ns, action, request, job_id) for at_ns, action in actions)
    return [decision for decision in decisions if decision is not None]


def work_text(work: Work, request: Request, job_id: int | None = None) -> str:
    """Return what a work does, as in "steps 4-9 of 28 on devices 0-1 (degree 2)" or "decode on device 3"."""
    steps = steps_of(work, job_id)
    what = work.stage.name
    if steps is not None:
        first, last = steps
        what = f"step {first} of {request.steps}" if first == last else f"steps {first}-{last} of {request.steps}"
    degree = f" (degree {len(work.devices)})" if len(work.devices) > 1 else ""
    others = len(work.job_ids) - 1
    batch = f", together with {others} other{'s' if others > 1 else ''}" if others else ""
    return f"{what} on {devices_text(work.devices)}{degree}{batch}"


def steps_of(work: Work, job_id: int | None = None) -> tuple[int, int] | None:
    """Return the first and last denoising step of a member (default: the first one), from 1; None for other stages."""
    if not work.stage.has_steps:
        return None
    member = next((one for one in work.members if one.job_id == job_id), work.members[0])
    return member.first_step + 1, member.first_step + work.num_steps


def devices_text(devices: Group) -> str:
    """Return the devices in words, as in "device 3" or "devices 0-1, 4"."""
    runs: list[tuple[int, int]] = []
    for device_id in sorted(devices):
        if runs and device_id == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], device_id)
        else:
            runs.append((device_id, device_id))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"device{'s' if len(devices) != 1 else ''} {', '.join(texts) or 'none'}"


def span_text(duration_ns: int) -> str:
    """Return a duration in words: "1.25 s" from 0.1 s on, "31.0 ms" below."""
    if abs(duration_ns) >= NS_PER_S // 10:
        return f"{s_from_ns(duration_ns):.2f} s"
    return f"{duration_ns / NS_PER_MS:.1f} ms"


def _ending(end_ns: int, request: Request) -> str:
    """Return an end in words, as in "1.62 s after arrival, 0.38 s before its deadline"."""
    text = f"{span_text(end_ns - request.arrival_ns)} after arrival"
    if request.deadline_ns is None:
        return text
    slack_ns = request.deadline_ns - end_ns
    return f"{text}, {span_text(abs(slack_ns))} {'before' if slack_ns >= 0 else 'after'} its deadline"


def _earliest(earliest_ns: int | None, request: Request) -> str:
    if earliest_ns is None:
        return ""
    return f"; it could be done {span_text(earliest_ns - request.arrival_ns)} after arrival"


def _because(why: str) -> str:
    return f": {why}" if why else ""
