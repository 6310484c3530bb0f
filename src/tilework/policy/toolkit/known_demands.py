"""The knowledge by class of requests: the remaining work at each degree, and whatever policies keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.policy import CostModel
from tilework.core.request import Bounded, Key, Request, RequestClass, Value, cost_key
from tilework.cost.demand import demands_at, quickest


class ByClass(Bounded[Key, Value]):
    """Values by class of requests: a key is a class of requests or of steps, or a tuple that begins with one, or
    with a pipeline.
    """

    __slots__ = ()

    def forget(self, pipeline: str) -> bool:
        """Drop all that is known of a pipeline; returns whether anything was."""
        gone = [one for one in self if _pipeline_of(one) == pipeline]
        for key in gone:
            del self[key]
        return bool(gone)


def _pipeline_of(key: Any) -> str:
    while not isinstance(key, str):
        key = key.step if isinstance(key, RequestClass) else key[0]
    return key


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
        """Return the demand of the least device time within a budget; the quickest if none is."""
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

    _known: ByClass[tuple[RequestClass, int, int], tuple[int, Choices]] = field(default_factory=ByClass)

    def of(self, request: Request, left: Cursor, costs: CostModel) -> Choices:
        """Return the choices of a request. Raises UnknownCost."""
        key = cost_key(request), left.position, len(left.itinerary.stages)
        version = costs.version_of(request)
        known = self._known.get(key)
        if known is not None and known[0] == version:
            return known[1]
        degrees = self.degrees_of(request, costs)
        choices = Choices.of(degrees, demands_at(request, left, degrees, costs))
        self._known[key] = version, choices
        return choices

    def forget(self, pipeline: str) -> None:
        """Drop the choices of a pipeline."""
        self._known.forget(pipeline)
