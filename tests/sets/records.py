"""Records of sets, agents and routes in one line."""

from __future__ import annotations

from typing import Any

from tilework.sets.records import AgentRecord, Route, SetRecord

WINDOW_S = 300.0


def a_set(share: float = 0.0, **options: Any) -> SetRecord:
    """A set on nodes that was measured for a window, with three places."""
    usual: dict[str, Any] = {
        "url": "http://127.0.0.1:1",
        "models": ("m",),
        "is_open": True,
        "agents": "127.0.0.1:2",
        "most_nodes": 3,
        "least_nodes": 1,
        "devices_up": 2,
        "backlog_s": 0.0,
        "start_in_s": 0.0,
        "measured_s": WINDOW_S,
        "share": share,
    }
    return SetRecord(**(usual | options))


def agents(*names: str, of: str | None = None) -> dict[str, AgentRecord]:
    return {name: AgentRecord(lease=1, set=of) for name in names}


def routes(**sets: str) -> dict[str, Route]:
    """The set of each agent."""
    return {agent: Route(set=name, epoch=1, why="") for agent, name in sets.items()}
