"""What is computed once per class of requests: the remaining work at each degree."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from tilework.core.graph.progress import Cursor
from tilework.core.interfaces import CostModel, Demand
from tilework.core.request import Request, RequestClass, StepClass, cost_key
from tilework.policy.toolkit.demand import demands_at, quickest

_MOST_KNOWN = 10_000
Key = TypeVar("Key", RequestClass, StepClass)


class Choices(NamedTuple):
    """The degrees at which the steps of a request may run, ascending, and the remaining work at each.

    Without steps left there is one demand only, on one device. `ordered` are the demands with the least device time
    first; `quickest` is the one that ends first.
    """

    degrees: Sequence[int]
    demands: Sequence[Demand]
    ordered: Sequence[Demand]
    quickest: Demand

    @staticmethod
    def of(degrees: Sequence[int], demands: Sequence[Demand]) -> Choices:
        ordered = sorted(demands, key=lambda demand: (demand.device_ns, demand.width))
        return Choices(degrees, demands, ordered, quickest(demands))

    def cheapest_in_time(self, budget_ns: int) -> Demand:
        """The demand of the least device time within a budget; the quickest if none is."""
        for demand in self.ordered:
            if demand.run_ns <= budget_ns:
                return demand
        return self.quickest


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
        choices = Choices.of(degrees, demands_at(request, left, degrees, costs))
        self._known[key] = version, choices
        return choices


def forget_classes(by_class: MutableMapping[Key, Any], pipeline: str) -> None:
    """Drop what is kept by class for the requests of a pipeline, which is served no more."""
    for key in [one for one in by_class if _pipeline(one) == pipeline]:
        del by_class[key]


def _pipeline(key: RequestClass | StepClass) -> str:
    return key.step.pipeline if isinstance(key, RequestClass) else key.pipeline
