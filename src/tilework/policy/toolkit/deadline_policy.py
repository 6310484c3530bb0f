"""The base of policies that go by deadlines and choose degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilework.core.graph.progress import Cursor
from tilework.core.interfaces import CostModel, Demand
from tilework.core.request import Request
from tilework.cost.demand import fitting_degrees
from tilework.policy.toolkit.known_demands import Choices, KnownDemands
from tilework.policy.toolkit.order import DeadlineOrdered


@dataclass(slots=True, kw_only=True)
class DeadlinePolicy(DeadlineOrdered):
    """Earliest deadline first, at any degree that fits. The predicted degree is the cheapest one in time."""

    known: KnownDemands = field(init=False)

    def __post_init__(self) -> None:
        self.known = KnownDemands(self.degrees)

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return fitting_degrees(request, costs)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """The work at the cheapest degree that meets the deadline from the arrival on; the fastest if none does."""
        return self.cheapest(request, self.known.of(request, left, costs))

    def forget(self, pipeline: str, costs: CostModel) -> None:
        self.known.forget(pipeline)

    def cheapest(self, request: Request, choices: Choices) -> Demand:
        return choices.cheapest_in_time(self.order.urgency_ns(request, False) - request.arrival_ns)
