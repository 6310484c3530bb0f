"""Requests of FLUX and HunyuanVideo on eight L20, and what a run of TridentServe shows of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from builders import request, shipped
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Action, Place, RunWork
from tilework.core.events import Event
from tilework.core.request import Request, Shape, Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.work import NewPlacement, Work
from tilework.cost.table import CostTable
from tilework.policy import registry
from tilework.policy.placement.roles import PlacementType
from tilework.policy.published.tridentserve.orchestration import Orchestration
from tilework.policy.published.tridentserve.policy import TridentServe
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

EDC, DC, ED, D, E, C = PlacementType
FLUX = replace(shipped("flux1_l20"), devices_per_node=4)


def ask(uid: str, arrival_s: float, size: str, table: CostTable = FLUX, slo: float | None = 1.0) -> Request:
    """A request with `slo` times the published deadline."""
    shape, due_s = Shape.parse(size), None if slo is None else slo * table.slo_s[size]
    one = request(uid, arrival_s, steps=table.steps or 1, slo_s=due_s)
    return replace(one, pipeline=table.rows[0].pipeline, shape=shape)


@dataclass
class Seen:
    """What a simulation shows: placements with their time in seconds, and of each start the type of its devices."""

    trace: Trace | None = None
    places: list[tuple[float, NewPlacement]] = field(default_factory=list)
    starts: list[tuple[int, Work, set[str]]] = field(default_factory=list)
    _kinds: dict[int, str] = field(default_factory=dict)

    def observe(self, event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        for action in actions:
            if isinstance(action, Place):
                self.places.append((now_ns / NS_PER_S, action.placement))
                self._kinds = {one: name for group, name in action.placement.groups for one in group}
            elif isinstance(action, RunWork):
                kinds = {self._kinds.get(one, "EDC") for one in action.work.devices}
                self.starts.append((now_ns, action.work, kinds))

    def of(self, stage: str) -> list[tuple[Work, set[str]]]:
        return [(work, kinds) for _, work, kinds in self.starts if work.stage.name == stage]

    @property
    def done(self) -> Trace:
        assert self.trace is not None
        return self.trace


def serve(
    requests: Sequence[Request],
    policy: str = "tridentserve",
    table: CostTable = FLUX,
    num_devices: int = 8,
    limit_s: float | None = None,
) -> Seen:
    """Simulate, and check that all requests are done; with `limit_s`, by then."""
    seen = Seen()
    config = SimConfig(num_devices=num_devices, hosts_have_read=True)
    limit_ns = None if limit_s is None else ns_from_s(limit_s)
    simulation = Simulation(ControllerConfig(policy=policy), table, config)
    seen.trace = simulation.run(requests, observe=seen.observe, limit_ns=limit_ns)
    assert {ending.status for ending in seen.trace.endings} == {Status.DONE}
    return seen


def named(monkeypatch: pytest.MonkeyPatch, make: Callable[[], TridentServe]) -> str:
    """The name of a variant of the policy for this test."""
    monkeypatch.setitem(registry._GIVEN, "variant", make)
    return "variant"


def by_declared(mix: Sequence[tuple[Request, float]], **changes: Any) -> TridentServe:
    """Placed at once for a declared mix, and for good; `changes` are those of the policy."""
    return TridentServe(orchestration=Orchestration(declared=mix, switches=False), **changes)
