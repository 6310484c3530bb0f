"""How many workers of an instance work on one request, and how long that takes.

Source: OnePiece §4.3. In individual mode each worker takes a request of its own, in collaboration mode all workers of
a node work on one. The user of OnePiece chooses the mode of each stage; here a policy has one rule for all.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tilework.core.interfaces import CostModel
from tilework.core.request import Request
from tilework.policy.placement.footprints import pieces_by_role
from tilework.policy.placement.profile import class_profile
from tilework.policy.placement.roles import Role
from tilework.policy.toolkit.demand import optimal_degree, usable_degree


class Mode(Enum):
    """How many workers a request gets for its steps.

    `EFFICIENT`: as many as it uses well (`placement.profile`), so that a small request takes one and a large one
    several. `COLLABORATION`: all that a node has, as far as was profiled. `INDIVIDUAL`: one.
    """

    EFFICIENT = "efficient"
    COLLABORATION = "collaboration"
    INDIVIDUAL = "individual"

    def degree(self, role: Role, request: Request, costs: CostModel, widest: int) -> int:
        """How many workers a request gets for a role, of at most `widest`. Raises UnknownCost."""
        if self is Mode.INDIVIDUAL:
            return 1
        wanted = class_profile(request, costs, None).footprint.optimal.get(role, 1)
        if role is not Role.D:
            return min(wanted, widest)
        return usable_degree(request, widest if self is Mode.COLLABORATION else min(wanted, widest), costs)


class Run(NamedTuple):
    """The stages of one role of a request: on how many workers, and for how long."""

    degree: int
    run_ns: int

    @property
    def device_ns(self) -> int:
        return self.degree * self.run_ns


def runs_of(request: Request, costs: CostModel, mode: Mode, widest: int) -> dict[Role, Run]:
    """What a request takes of each role, on at most `widest` workers. Raises UnknownCost."""
    found = {}
    for role, pieces in pieces_by_role(request, costs).items():
        degree, run_ns = mode.degree(role, request, costs, widest), 0
        for stage, num_steps in pieces:
            width = degree if stage.has_steps else optimal_degree(stage, request, costs, degree)
            run_ns += costs.work_ns(stage, (request,), width, num_steps)
        found[role] = Run(degree, run_ns)
    return found
