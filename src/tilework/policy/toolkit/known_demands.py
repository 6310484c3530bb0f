"""The remaining work of requests at each degree, computed once per class of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.core.graph.progress import Cursor
from tilework.core.interfaces import CostModel, Demand
from tilework.core.request import Request, RequestClass, cost_key
from tilework.policy.toolkit.demand import demands_at

_MOST_KNOWN = 10_000


class Choices(NamedTuple):
    """The degrees at which the steps of a request may run, ascending, and the remaining work at each.

    Without steps left there is one demand only, on one device.
    """

    degrees: Sequence[int]
    demands: Sequence[Demand]


@dataclass(slots=True)
class KnownDemands:
    """The choices of each class of requests, computed again when the cost model has learned of such requests.

    `degrees_of` depends on the class of a request alone.
    """

    degrees_of: Callable[[Request, CostModel], Sequence[int]]

    _known: dict[tuple[RequestClass, int, int], tuple[int, Choices]] = field(default_factory=dict)

    def of(self, request: Request, left: Cursor, costs: CostModel) -> Choices:
        """Raises UnknownCost."""
        key = cost_key(request), left.position, len(left.itinerary.stages)
        version = costs.version_of(request)
        known = self._known.get(key)
        if known is not None and known[0] == version:
            return known[1]
        if len(self._known) >= _MOST_KNOWN:  # Clients choose the shapes.
            self._known.clear()
        degrees = self.degrees_of(request, costs)
        choices = Choices(degrees, demands_at(request, left, degrees, costs))
        self._known[key] = version, choices
        return choices
