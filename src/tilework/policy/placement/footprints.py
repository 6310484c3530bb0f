"""The memory that a request takes, as the cost model knows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilework.core.component import num_bytes
from tilework.core.graph.progress import Piece
from tilework.core.graph.stage import Stage
from tilework.core.interfaces import CostModel
from tilework.core.request import Request
from tilework.cost.demand import optimal_degree
from tilework.policy.placement.feasible import Footprint
from tilework.policy.placement.roles import Role, role_of


def pieces_by_role(request: Request, costs: CostModel) -> Mapping[Role, Sequence[Piece]]:
    """The stages of a whole request that run on devices, with their numbers of steps. Raises UnknownCost."""
    graph, found = costs.graph(request.pipeline), dict[Role, list[Piece]]()
    for piece in costs.start(request).pieces:
        role = role_of(graph, piece[0])
        if role is not None:
            found.setdefault(role, []).append(piece)
    return found


def weight_bytes(stages: Iterable[Stage], costs: CostModel) -> int:
    """The bytes of the components of these stages, LoRAs included, each counted once."""
    return num_bytes({one for stage in stages for one in costs.components(stage)})


def footprint(request: Request, costs: CostModel, usable_bytes: int) -> Footprint:
    """The weights of each role, and the largest activation of its stages where all run on the whole group, in bytes.

    A stage that was not profiled at a degree counts as at the next lower one. Weights that stages of two roles share
    count for both. What the costs do not know takes nothing. Raises UnknownCost.
    """
    stages = {role: [stage for stage, _ in pieces] for role, pieces in pieces_by_role(request, costs).items()}
    return Footprint(
        weights={role: weight_bytes(some, costs) for role, some in stages.items()},
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


def _degrees(stages: Sequence[Stage], request: Request, costs: CostModel) -> Sequence[int]:
    return [1] if request.exact else sorted({degree for stage in stages for degree in costs.degrees(stage)})
