"""How often components are asked for, learned from the requests that come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

from tilework.core.component import Component
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.interfaces import CostModel
from tilework.core.request import Request
from tilework.core.time import NS_PER_S

RECENT_NS, USUAL_NS = 180 * NS_PER_S, 3600 * NS_PER_S
"""Users ask again within minutes, and what is popular stays so for hours."""
_RECENT = 0.5  # The share of the last minutes in an estimate.
_MOST_KNOWN = 4096


class _Asked(NamedTuple):
    """Requests for a component, each with a weight that has decayed since it came, as of the latest of them."""

    at_ns: int
    recent: float
    usual: float


@dataclass(slots=True)
class ComponentRates:
    """Estimates how often each component will be asked for, from two means that forget exponentially.

    One forgets within minutes: those who have just asked ask again. The other forgets within hours: popular components
    are asked for by others. An estimate is half of each.

    `stages` are those of accelerators, of the pipelines that were asked for, without LoRAs, the latest last.
    """

    _asked: dict[Component, _Asked] = field(default_factory=dict)
    stages: dict[Stage, None] = field(default_factory=dict)
    num_requests: int = 0
    _first_ns: int | None = None
    _last_ns: int = -1
    _uids: set[str] = field(default_factory=set)  # Of requests that came at `_last_ns`.

    def add(self, request: Request, costs: CostModel) -> bool:
        """Count a request once, however often it is added before the next one; returns whether it was counted now."""
        now_ns = request.arrival_ns
        if now_ns < self._last_ns or (now_ns == self._last_ns and request.uid in self._uids):
            return False
        if now_ns > self._last_ns:
            self._last_ns = now_ns
            self._uids.clear()
        self._uids.add(request.uid)
        self.num_requests += 1
        self._first_ns = now_ns if self._first_ns is None else self._first_ns
        if not costs.all_components:
            return True
        plain = [one for one in costs.graph(request.pipeline).stages if one.kind is DeviceKind.ACCELERATOR]
        self._note_stages(plain, costs)
        stages = [one for one, _ in costs.start(request).pieces if one.kind is DeviceKind.ACCELERATOR]
        for component in {one: None for stage in stages for one in costs.components(stage)}:
            before = self._decayed(self._asked.pop(component, _Asked(now_ns, 0.0, 0.0)), now_ns)
            self._asked[component] = _Asked(now_ns, before.recent + 1, before.usual + 1)
        if len(self._asked) > _MOST_KNOWN:
            del self._asked[next(iter(self._asked))]
        return True

    def _note_stages(self, stages: Iterable[Stage], costs: CostModel) -> None:
        for stage in stages:
            if costs.components(stage):
                self.stages.pop(stage, None)
                self.stages[stage] = None
        while len(self.stages) > _MOST_KNOWN:
            del self.stages[next(iter(self.stages))]

    def forget(self, pipeline: str, costs: CostModel) -> None:
        """Drop the stages of a pipeline, and the components that no other needs."""
        self.stages = {stage: None for stage in self.stages if stage.pipeline != pipeline}
        needed = set(costs.all_components)
        self._asked = {one: asked for one, asked in self._asked.items() if one in needed}

    def per_s(self, component: Component, now_ns: int) -> float:
        """How many requests per second are expected to ask for a component."""
        asked = self._asked.get(component)
        if asked is None or self._first_ns is None:
            return 0.0
        now = self._decayed(asked, now_ns)
        span_ns = max(RECENT_NS, now_ns - self._first_ns)
        usual_s = USUAL_NS * (1 - exp(-span_ns / USUAL_NS)) / NS_PER_S  # What it would be if one came per second.
        return _RECENT * now.recent / (RECENT_NS / NS_PER_S) + (1 - _RECENT) * now.usual / usual_s

    def _decayed(self, asked: _Asked, now_ns: int) -> _Asked:
        passed_ns = max(0, now_ns - asked.at_ns)
        recent, usual = exp(-passed_ns / RECENT_NS), exp(-passed_ns / USUAL_NS)
        return _Asked(now_ns, asked.recent * recent, asked.usual * usual)
