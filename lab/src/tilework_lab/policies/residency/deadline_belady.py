"""Deadline-aware choice of requests, and what is asked for last is dropped first: what knowing the future is worth."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tilework.core.component import Component, DropOrder
from tilework.core.interfaces import CostModel, DeviceView
from tilework.core.request import Request
from tilework.core.time import NEVER_NS
from tilework.policy.toolkit.loads import at_node
from tilework_lab.policies.residency.deadline_lru import DeadlineLeastRecentlyUsed
from tilework_lab.policies.residency.to_the_end import Moment


@dataclass(slots=True)
class DeadlineBelady(DeadlineLeastRecentlyUsed):
    """Requests as in `deadline-lru`. Devices and hosts drop first what is asked for latest from now on.

    It has to know all requests that will come (`NeedsFuture`), so it is a yardstick, and no server can run it. Requests
    that wait do not count as asked for: those that cannot be on time wait for long, and what they need would be kept
    for them. Counting all of them, or those that can be on time, was no better on `gentd26` at loads of .5 to .8.

    Source: "Belady eviction + deadline-aware" of our reference simulation of GenTD26 (lab/docs/workloads.md); Belady, A
    study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966.
    """

    _requests: Sequence[Request] | None = field(default=None, init=False)
    _asked_ns: dict[Component, list[int]] | None = field(default=None, init=False)  # When each is asked for, ascending.

    def foresee(self, requests: Sequence[Request]) -> None:
        self._requests, self._asked_ns = requests, None

    def drop_order(self, moment: Moment, device: DeviceView, loaded_ns: int) -> DropOrder:
        if self._asked_ns is None:
            assert self._requests is not None, "only a simulation can run this policy"
            self._asked_ns = _arrivals_ns(self._requests, moment.costs)
        host = at_node(moment.view, device.node)
        here = device.memory.components
        return DropOrder(self._latest_first(here, moment.now_ns), self._latest_first(host, loaded_ns))

    def _latest_first(self, components: Iterable[Component], now_ns: int) -> tuple[Component, ...]:
        """Those that are asked for latest from now on first; of equals the order stays."""
        return tuple(sorted(components, key=lambda one: -self._next_ns(one, now_ns)))

    def _next_ns(self, component: Component, now_ns: int) -> int:
        assert self._asked_ns is not None
        asked_ns = self._asked_ns.get(component, [])
        index = bisect_right(asked_ns, now_ns)
        return asked_ns[index] if index < len(asked_ns) else NEVER_NS


def _arrivals_ns(requests: Iterable[Request], costs: CostModel) -> dict[Component, list[int]]:
    found: dict[Component, list[int]] = {}
    for request in sorted(requests, key=lambda one: one.arrival_ns):
        for component in {one for stage in costs.graph(request.pipeline).stages for one in costs.components(stage)}:
            found.setdefault(component, []).append(request.arrival_ns)
    return found
