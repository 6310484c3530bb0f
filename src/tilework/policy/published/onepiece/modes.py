"""How many workers of an instance work on one request, and how long that takes.

Source: OnePiece §4.3. In individual mode each worker takes a request of its own, in collaboration mode all workers of
a node work on one. The user of OnePiece chooses the mode of each stage; here a policy has one rule for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from tilework.core.interfaces import CostModel
from tilework.core.request import Request
from tilework.cost.demand import optimal_degree, step_degrees, usable_degree
from tilework.policy.placement.footprints import pieces_by_role
from tilework.policy.placement.profile import optimal_for
from tilework.policy.placement.roles import Role


class Mode(Enum):
    """How many workers a request gets for its steps.

    `EFFICIENT`: as many as it uses well (`placement.profile`), so that a small request takes one and a large one
    several. `COLLABORATION`: all that a node has, as far as was profiled. `INDIVIDUAL`: one.
    """

    EFFICIENT = "efficient"
    COLLABORATION = "collaboration"
    INDIVIDUAL = "individual"

    def degrees(self, request: Request, costs: CostModel) -> dict[Role, int]:
        """How many workers a request wants for each role. Raises UnknownCost."""
        found = {}
        for role, pieces in pieces_by_role(request, costs).items():
            if self is Mode.INDIVIDUAL:
                found[role] = 1
            elif self is Mode.COLLABORATION and role is Role.D:
                found[role] = step_degrees(request, costs)[-1]
            else:
                found[role] = optimal_for(role, pieces, request, costs)
        return found


class Run(NamedTuple):
    """The stages of one role of a request: on how many workers, and for how long."""

    degree: int
    run_ns: int

    @property
    def device_ns(self) -> int:
        return self.degree * self.run_ns


def runs_of(request: Request, degrees: Mapping[Role, int], costs: CostModel) -> dict[Role, Run]:
    """What a request takes of each role, on this many workers. Raises UnknownCost."""
    found = {}
    for role, pieces in pieces_by_role(request, costs).items():
        degree, run_ns = degrees[role], 0
        for stage, num_steps in pieces:
            width = degree if stage.has_steps else optimal_degree(stage, request, costs, degree)
            run_ns += costs.work_ns(stage, (request,), width, num_steps)
        found[role] = Run(degree, run_ns)
    return found


def narrowed(role: Role, degree: int, most: int, request: Request, costs: CostModel) -> int:
    """How many of `most` workers a request gets for a role for which it wants `degree`. Raises UnknownCost."""
    if degree <= most:
        return degree
    return usable_degree(request, most, costs) if role is Role.D else most
