"""Records in the registry: sets, agents, and the set that each agent is for.

Every server and agent writes its own record. The leader of the servers writes the routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

SETS, AGENTS, ROUTES, LEADER = "sets/", "agents/", "routes/", "leader"
"""Beginnings of keys; the name of a set or of an agent follows. `LEADER` is a whole key."""

_STRICT = ConfigDict(extra="ignore", frozen=True)  # Servers of the next version may write more fields.


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, kw_only=True)
class SetRecord:
    """A server, as others see it.

    Attributes:
        url: where clients reach it.
        models: names of the models that it serves.
        is_open: true if it takes calls now.
        agents: HOST:PORT where it listens for agents; None if its devices are those of its machine.
        nodes: the share of the window that the devices of each node were busy, by the name of its agent.
        most_nodes: number of nodes that have a place.
        least_nodes: number of nodes that it keeps.
        devices_up: devices that take work.
        backlog_s: device time that its open requests are predicted to take.
        start_in_s: seconds until a new request could start, if devices share that evenly.
        measured_s: seconds of the window that have passed since it started.
        share: share of the window that its devices were busy.
        stages: the same by stage.
    """

    url: str
    models: tuple[str, ...] = ()
    is_open: bool = False
    agents: str | None = None
    nodes: Mapping[str, float] = field(default_factory=dict)
    most_nodes: int = 0
    least_nodes: int = 0
    devices_up: int = 0
    backlog_s: float = 0.0
    start_in_s: float = 0.0
    measured_s: float = 0.0
    share: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """An agent: the lease under which it lives, and the set that it works for, or None."""

    lease: int
    set: str | None


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The set that an agent is for. `epoch` is the revision at which the leader that wrote this became the leader."""

    set: str
    epoch: int
    why: str


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderRecord:
    """The set whose server is the node manager."""

    set: str


Record = TypeVar("Record", SetRecord, AgentRecord, Route, LeaderRecord)
_ADAPTERS: Mapping[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (SetRecord, AgentRecord, Route, LeaderRecord)
}


def encoded(record: SetRecord | AgentRecord | Route | LeaderRecord) -> bytes:
    """Encode a record as JSON."""
    return _ADAPTERS[type(record)].dump_json(record)


def decoded(kind: type[Record], value: bytes) -> Record | None:
    """Decode a record of this kind; None if the value is none, as one of another version may be."""
    try:
        return cast("Record", _ADAPTERS[kind].validate_json(value))
    except ValidationError:
        return None
