"""The state of a server at one moment as one viewer may see it, ready for JSON: `schema.live.LiveState`.

Requests of other tenants are tiles without a name: a viewer sees only a number, their stage and their devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nsmallest

from tilework.core.request import Request
from tilework.core.time import s_from_ns
from tilework.core.wire.reports import CardReading
from tilework.runtime.engine import Engine
from tilework.runtime.observer import Holding
from tilework.runtime.ticket import Ticket
from tilework.server.live.attainment import WINDOW_NS, Counts, Group
from tilework.server.live.feed import EndedRequest, Feed, Tile

MOST_REQUESTS = 200
"""Most open requests that are listed: those that run, then the most urgent ones."""
MOST_ETAS = 20
"""Number of these that get a present prediction; the others show that of their admission."""
MOST_PAST = 2_000
"""Most entries of the past in one frame."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """A viewer, by its tenant; None: it sees the requests of all."""

    tenant: str | None = None

    def sees(self, request: Request) -> bool:
        return self.tenant is None or request.tenant == self.tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The state, in `fields`, with what happened from the place `begin` of the feed's past to `end`.

    `devices` are separate, since they change seldom: every few seconds at most, if cards report anything.
    """

    begin: int
    end: int
    fields: dict[str, object]
    devices: list[dict[str, object]]


def frame(engine: Engine, feed: Feed, viewer: Viewer, begin: int) -> Frame:
    """Return the frame of a viewer that has seen the past before `begin`, in time proportional to open requests."""
    now_ns = engine.now_ns()
    end = feed.num_past
    past = list(feed.since(max(begin, end - MOST_PAST)))
    tickets = list(engine.open_tickets())
    own = [ticket for ticket in tickets if viewer.sees(ticket.request)]
    shown = nsmallest(MOST_REQUESTS, own, key=_urgency)
    fields: dict[str, object] = {
        "now_s": _seconds(now_ns),
        "policy": engine.policy,
        "backlog_s": _seconds(engine.status.backlog_ns()),
        "num_open": len(tickets),
        "num_own": len(own),
        "missed": max(0, end - begin - len(past)),
        "planned": [_tile(one) for one in feed.planned(now_ns)],
        "tiles": [_tile(one) for one in past if isinstance(one, Tile)],
        "requests": [_open(engine, feed, ticket, place < MOST_ETAS) for place, ticket in enumerate(shown)],
        "ended": [_ended(one) for one in past if isinstance(one, EndedRequest) and viewer.sees(one.request)],
        "attainment": [_attained(*row) for row in feed.attainment.rows(now_ns) if _may_see(viewer, row[0])],
        "attainment_window_s": _seconds(WINDOW_NS),
    }
    return Frame(begin=begin, end=end, fields=fields, devices=_devices(engine))


def _urgency(ticket: Ticket) -> tuple[bool, bool, int, int]:
    """Return a sort key: running requests first, then by deadline, then by arrival."""
    deadline_ns = ticket.request.deadline_ns
    return not ticket.is_running, deadline_ns is None, deadline_ns or 0, ticket.request.arrival_ns


def _may_see(viewer: Viewer, group: Group) -> bool:
    """Return whether a viewer may see a group: tenants see their own share, not the names of others."""
    return viewer.tenant is None or group.by != "tenant" or group.name == viewer.tenant


def _devices(engine: Engine) -> list[dict[str, object]]:
    return [_device(one) for one in engine.status.holdings()]


def _device(holding: Holding) -> dict[str, object]:
    return {
        "device": holding.device_id,
        "node": holding.node,
        "kind": holding.kind.value,
        "used_bytes": holding.used_bytes,
        "weights_bytes": holding.total_bytes,
        "weights_free_bytes": holding.free_bytes,
        "components": [{"models": one.models, "name": one.name, "bytes": one.num_bytes} for one in holding.components],
        "cards": [_card(one.card) for one in holding.readings if one.card is not None],
    }


def _card(card: CardReading) -> dict[str, object]:
    return {
        "busy": card.busy,
        "used_bytes": card.used_bytes,
        "worker_bytes": card.worker_bytes,
        "celsius": card.celsius,
        "watts": card.watts,
        "limit_watts": card.limit_watts,
        "hertz": card.hertz,
        "slowed_by": None if card.slowed_by is None else list(card.slowed_by),
    }


def _tile(tile: Tile) -> dict[str, object]:
    return {
        "start_s": _seconds(tile.start_ns),
        "end_s": _seconds(tile.end_ns),
        "devices": tile.devices,
        "stage": tile.stage,
        "requests": tile.requests,
        "first_step": tile.first_step,
        "steps": tile.steps,
        "ending": tile.ending,
    }


def _open(engine: Engine, feed: Feed, ticket: Ticket, is_urgent: bool) -> dict[str, object]:
    request = ticket.request
    now = engine.predict(request.uid) if is_urgent else None
    return {
        **_request(feed.number(request.uid), request),
        "status": ticket.status.value,
        "steps_done": ticket.steps_done,
        "eta_s": _seconds(ticket.eta_ns if now is None else now.eta_ns),
        "finish_s": None,
        "on_time": None,
    }


def _ended(ended: EndedRequest) -> dict[str, object]:
    return {
        **_request(ended.number, ended.request),
        "status": ended.status.value,
        "steps_done": ended.steps_done,
        "eta_s": _seconds(ended.eta_ns),
        "finish_s": _seconds(ended.finished_ns),
        "on_time": ended.request.met_deadline(ended.status, ended.finished_ns),
    }


def _request(number: int, request: Request) -> dict[str, object]:
    deadline_ns = request.deadline_ns
    return {
        "number": number,
        "uid": request.uid,
        "model": request.pipeline,
        "size": str(request.shape),
        "steps": request.steps,
        "class": request.priority,
        "tenant": request.tenant,
        "arrival_s": _seconds(request.arrival_ns),
        "deadline_s": None if deadline_ns is None else _seconds(deadline_ns),
        "is_promise": request.is_promise,
    }


def _attained(group: Group, counts: Counts) -> dict[str, object]:
    return {
        "by": group.by,
        "name": group.name,
        "on_time": counts.on_time,
        "late": counts.late,
        "others": counts.others,
        "refused": counts.refused,
        "recent_on_time": counts.recent_on_time,
        "recent_late": counts.recent_late,
    }


def _seconds(ns: int) -> float:
    return round(s_from_ns(ns), 4)
