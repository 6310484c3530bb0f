"""The memory that a request takes, as the cost model knows it."""

from __future__ import annotations

from tilework.core.component import num_bytes
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import Stage
from tilework.core.interfaces import CostModel
from tilework.core.request import Request
from tilework.policy.placement.feasible import Footprint
from tilework.policy.placement.roles import Role, role_of
from tilework.policy.toolkit.demand import optimal_degree


def footprint(graph: Graph, request: Request, costs: CostModel, usable_bytes: int) -> Footprint:
    """The weights of each role, with LoRAs, and the largest activation of its stages at each degree, in bytes.

    A stage that was not profiled at a degree counts as at the next lower one. Weights that stages of two roles share
    count for both. What the costs do not know takes nothing. Raises UnknownCost.
    """
    stages: dict[Role, list[Stage]] = {}
    for stage in costs.start(request).itinerary.stages:
        role = role_of(graph, stage)
        if role is not None:
            stages.setdefault(role, []).append(stage)
    return Footprint(
        weights={
            role: num_bytes({one for stage in some for one in costs.components(stage)}) for role, some in stages.items()
        },
        activations={
            role: {
                degree: max(costs.activation_bytes(stage, (request,), degree) for stage in some)
                for degree in _degrees(some, request, costs)
            }
            for role, some in stages.items()
        },
        optimal={role: max(optimal_degree(stage, request, costs) for stage in some) for role, some in stages.items()},
        usable_bytes=usable_bytes,
    )


def _degrees(stages: list[Stage], request: Request, costs: CostModel) -> list[int]:
    return [1] if request.exact else sorted({degree for stage in stages for degree in costs.degrees(stage)})
