"""The profile of a request class by a cost model: its memory by role, and its times at optimal degrees.

Theory of operation. The stages of a role run one after another on one group. Steps run on all of it; a stage without
steps runs on as many of its devices as are optimal for that stage, or on all if it has fewer. So what a role takes on a
group of `k` devices is the largest activation of its stages, each at its own degree. Weights are counted once where
stages of one role share them. A component that two roles share counts in both, which is safe and rare.

A class that fits on no placement can still run if each of its stages fits on a device alone: the devices load the
weights of each stage when it is next. Such a class `takes_turns`. Its weights count as a part of the activations, and
nothing is resident. Ours: the paper serves what fits.

Source: TridentServe §5.1, "Profiler".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilework.core.component import num_bytes
from tilework.core.graph.progress import Piece
from tilework.core.graph.stage import Stage
from tilework.core.policy import CostModel
from tilework.core.request import Request
from tilework.cost.demand import optimal_degree
from tilework.policy.placement.demand import ClassDemand
from tilework.policy.placement.feasible import FitsAt, Footprint, fits_at
from tilework.policy.placement.roles import Role, role_of


def pieces_by_role(request: Request, costs: CostModel) -> Mapping[Role, Sequence[Piece]]:
    """Return the stages of a whole request that run on devices, with their numbers of steps. Raises UnknownCost."""
    graph = costs.graph(request.pipeline)
    found: dict[Role, list[Piece]] = {}
    for piece in costs.start(request).pieces:
        role = role_of(graph, piece[0])
        if role is not None:
            found.setdefault(role, []).append(piece)
    return found


def weight_bytes(stages: Iterable[Stage], costs: CostModel) -> int:
    """Return the bytes of the components of these stages, LoRAs included, each counted once."""
    return num_bytes({one for stage in stages for one in costs.weights.components(stage)})


def footprint(request: Request, costs: CostModel, usable_bytes: int) -> Footprint:
    """Return the weights of each role, and the largest activation of its stages on the whole group, in bytes.

    A stage that was not profiled at a degree counts as at the next lower one. Weights that stages of two roles share
    count for both. What the costs do not know takes nothing. Raises UnknownCost.
    """
    stages = {role: [stage for stage, _ in pieces] for role, pieces in pieces_by_role(request, costs).items()}
    return Footprint(
        weights={role: weight_bytes(some, costs) for role, some in stages.items()},
        activations={
            role: {
                degree: max(costs.weights.activation_bytes(stage, (request,), degree) for stage in some)
                for degree in _known_degrees(some, request, costs)
            }
            for role, some in stages.items()
        },
        optimal={role: max(optimal_degree(stage, request, costs) for stage in some) for role, some in stages.items()},
        usable_bytes=usable_bytes,
    )


def _known_degrees(stages: Sequence[Stage], request: Request, costs: CostModel) -> Sequence[int]:
    return [1] if request.exact else sorted({degree for stage in stages for degree in costs.degrees(stage)})


_NO_LIMIT = 1 << 62
"""More bytes than any device has."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassProfile:
    """The memory and the time that a request class takes, as predicted when the profile was made.

    Attributes:
        footprint: its memory by role, in bytes.
        fits: where it fits (`feasible.fits_at`).
        run_ns: how long each role takes at its optimal degree.
        device_ns: the time of all its devices together then.
    """

    footprint: Footprint
    fits: FitsAt
    run_ns: Mapping[Role, int]
    device_ns: Mapping[Role, int]

    @property
    def latency_ns(self) -> int:
        """All roles one after another, without waiting."""
        return sum(self.run_ns.values())

    def demand(self, count: float) -> ClassDemand:
        """Return the demand of this number of requests of the class on a placement."""
        return ClassDemand(fits=self.fits, count=count, device_ns=self.device_ns)


def class_profile(
    request: Request,
    costs: CostModel,
    usable_bytes: int | None,
    widest: int | None = None,
    *,
    takes_turns: bool = False,
) -> ClassProfile:
    """Return the profile of a request's class, with what the costs know of its LoRAs.

    `usable_bytes` is what a device has for weights and activations; None: no limit. With `widest`, steps that fit on no
    group of that many devices count as if they did. Stages on CPU slots take nothing. Raises UnknownCost.
    """
    pieces = pieces_by_role(request, costs)
    optimal = {role: optimal_for(role, found, request, costs, widest) for role, found in pieces.items()}
    footprint = Footprint(
        weights={
            role: 0 if takes_turns else weight_bytes([stage for stage, _ in found], costs)
            for role, found in pieces.items()
        },
        activations={
            role: _activations(role, found, request, costs, widest, with_weights=takes_turns)
            for role, found in pieces.items()
        },
        optimal=optimal,
        usable_bytes=_NO_LIMIT if usable_bytes is None else usable_bytes,
    )
    run_ns: dict[Role, int] = {}
    device_ns: dict[Role, int] = {}
    for role, found in pieces.items():
        runs = [_run(stage, num_steps, optimal[role], request, costs) for stage, num_steps in found]
        run_ns[role] = sum(one_ns for _, one_ns in runs)
        device_ns[role] = sum(degree * one_ns for degree, one_ns in runs)
    return ClassProfile(footprint=footprint, fits=fits_at(footprint), run_ns=run_ns, device_ns=device_ns)


def optimal_for(
    role: Role, pieces: Sequence[Piece], request: Request, costs: CostModel, widest: int | None = None
) -> int:
    """Return the optimal degree of a role with these stages: of steps the widest that is optimal for each.

    Raises UnknownCost.
    """
    stepped = [optimal_degree(stage, request, costs) for stage, _ in pieces if stage.has_steps]
    if role is not Role.D or not stepped:
        return max(optimal_degree(stage, request, costs) for stage, _ in pieces)
    common = _step_degrees(pieces, request, costs, widest)
    return max([degree for degree in common if degree <= min(stepped)], default=common[0])


def _step_degrees(pieces: Sequence[Piece], request: Request, costs: CostModel, widest: int | None) -> Sequence[int]:
    """Return the degrees up to `widest` at which the steps fit, each stage by itself, ascending.

    If they fit at none, these are all degrees up to there at which they may run.
    """
    all_known = (1,) if request.has_single_steps else costs.common_degrees(request.pipeline)
    known = [degree for degree in all_known if widest is None or degree <= widest] or all_known
    stepped = [stage for stage, _ in pieces if stage.has_steps]
    fitting = [degree for degree in known if all(costs.fits(stage, request.shape, degree) for stage in stepped)]
    return fitting or known


def _activations(
    role: Role, pieces: Sequence[Piece], request: Request, costs: CostModel, widest: int | None, *, with_weights: bool
) -> dict[int, int]:
    """Return the largest activation of a role's stages by the degree of its group, in bytes, or with their weights."""
    if role is Role.D:
        degrees = _step_degrees(pieces, request, costs, widest)
    else:
        known = {degree for stage, _ in pieces for degree in costs.degrees(stage)}
        degrees = sorted(degree for degree in known if degree == 1 or not request.exact)
    return {
        degree: max(
            costs.weights.activation_bytes(stage, (request,), _degree_of(stage, degree, request, costs))
            + (weight_bytes((stage,), costs) if with_weights else 0)
            for stage, _ in pieces
        )
        for degree in degrees
    }


def _run(stage: Stage, num_steps: int, degree: int, request: Request, costs: CostModel) -> tuple[int, int]:
    """Return the degree of a stage on a group of this many devices, and how long it takes."""
    degree = _degree_of(stage, degree, request, costs)
    return degree, costs.work_ns(stage, (request,), degree, num_steps)


def _degree_of(stage: Stage, width: int, request: Request, costs: CostModel) -> int:
    return width if stage.has_steps else optimal_degree(stage, request, costs, width)
