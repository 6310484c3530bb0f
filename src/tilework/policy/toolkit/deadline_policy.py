"""The base of policies that go by deadlines and choose degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.core.interfaces import CostModel, Demand
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.policy.toolkit.demand import cheapest_in_time, fitting_degrees
from tilework.policy.toolkit.order import DeadlineOrdered


@dataclass(slots=True, kw_only=True)
class DeadlinePolicy(DeadlineOrdered):
    """The earliest deadline first, at any degree that fits; a request is expected at the cheapest one in time."""

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return fitting_degrees(request, costs)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """The cheapest degree that would meet the deadline from the arrival on; the quickest if none would."""
        budget_ns = self.order.urgency_ns(request, False) - request.arrival_ns
        return cheapest_in_time(request, left, self.degrees(request, costs), budget_ns, costs)
