"""Losses of nodes in an event log, and their effect on the requests there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilework.control.decisions import devices_text, work_text
from tilework.control.history import History, LostWork, PastRequest, PastWork
from tilework.core.time import s_from_ns
from tilework.core.work import Group
from tilework.formats.json_lines import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMove:
    """A request whose latest run before the loss, `before`, was on the node, and what ran of it next; None if nothing.

    `is_lost` says whether `before` was cut off. `steps_again` are steps that were made before, and had to be again.
    """

    request: RequestId
    before: str
    after: str | None
    is_lost: bool
    steps_again: int

    def __str__(self) -> str:
        lost = " (lost)" if self.is_lost else ""
        return f"request {self.request}: {self.before}{lost}, then {self.after or 'nothing'}" + (
            f", {self.steps_again} steps again" if self.steps_again else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """A node whose `devices` were lost at once, and are back at `back_ns`, if they are. Times are those of the log."""

    at_ns: int
    back_ns: int | None
    node: int
    devices: Group
    reason: str
    moves: tuple[RequestMove, ...]

    def __str__(self) -> str:
        back = "" if self.back_ns is None else f"; another agent took its place at {s_from_ns(self.back_ns):.1f} s"
        return (
            f"node {self.node} ({devices_text(self.devices)}) was lost at {s_from_ns(self.at_ns):.1f} s: {self.reason}"
            f"{back}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "at_s": s_from_ns(self.at_ns),
            "back_s": None if self.back_ns is None else s_from_ns(self.back_ns),
            "node": self.node,
            "devices": list(self.devices),
            "reason": self.reason,
            "moves": [str(move) for move in self.moves],
        }


def node_losses(history: History, ids: Mapping[str, RequestId]) -> tuple[NodeLoss, ...]:
    """Return the nodes, of several, whose devices were lost all at once, in order of time; `ids` has other names of
    requests, by uid.
    """
    devices: dict[int, set[int]] = {}
    lost: dict[tuple[int, int, str], set[int]] = {}
    for change in history.devices:
        devices.setdefault(change.node, set()).add(change.device_id)
        if not change.is_up:
            lost.setdefault((change.at_ns, change.node, change.reason), set()).add(change.device_id)
    return tuple(
        NodeLoss(
            at_ns=at_ns,
            back_ns=_back_ns(history, at_ns, node),
            node=node,
            devices=tuple(sorted(gone)),
            reason=reason,
            moves=tuple(_moves(history, ids, at_ns, gone)),
        )
        for (at_ns, node, reason), gone in lost.items()
        if gone == devices[node] and len(devices) > 1
    )


def _back_ns(history: History, lost_ns: int, node: int) -> int | None:
    back = (one.at_ns for one in history.devices if one.is_up and one.node == node and one.at_ns > lost_ns)
    return min(back, default=None)


def _moves(history: History, ids: Mapping[str, RequestId], at_ns: int, gone: set[int]) -> Iterator[RequestMove]:
    """Yield the requests that were open then, in order of arrival."""
    for past in history.requests:
        if past.job_id is None or (past.finish_ns is not None and past.finish_ns <= at_ns):
            continue
        works = _works_of(history, past)
        before = [work for work in works if work.start_ns < at_ns]
        after = [work for work in works if work.start_ns >= at_ns]
        if before and not gone.isdisjoint(before[-1].work.devices):
            yield _move(past, ids.get(past.request.uid, past.request.uid), before, after)


def _works_of(history: History, past: PastRequest) -> list[PastWork | LostWork]:
    """Return the works in order of their starts, without those that were lost before they began."""
    works: list[PastWork | LostWork] = [*history.works, *history.lost]
    own = [one for one in works if past.job_id in one.work.job_ids and one.end_ns > one.start_ns]
    return sorted(own, key=lambda one: one.start_ns)


def _move(
    past: PastRequest, name: RequestId, before: list[PastWork | LostWork], after: list[PastWork | LostWork]
) -> RequestMove:
    last, following = before[-1], after[0] if after else None
    made = max((_steps_made(work, past) for work in before), default=0)
    again = 0 if following is None else max(0, made - _first_step(following, past))
    return RequestMove(
        request=name,
        before=work_text(last.work, past.request, past.job_id),
        after=None if following is None else work_text(following.work, past.request, past.job_id),
        is_lost=isinstance(last, LostWork),
        steps_again=again,
    )


def _steps_made(work: PastWork | LostWork, past: PastRequest) -> int:
    """Return the number of steps of the request that were done and kept when the work ended."""
    return _first_step(work, past) + (work.steps if work.work.stage.has_steps else 0)


def _first_step(work: PastWork | LostWork, past: PastRequest) -> int:
    assert past.job_id is not None
    return work.work.member(past.job_id).first_step
