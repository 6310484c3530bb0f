"""The remaining work of a request as a block of devices x time, and the cheapest degrees that meet its deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from math import ceil

from tilework.core.interfaces import CostModel, Demand
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.work import DIFFUSE, stages_of


def demand_at(request: Request, left: Cursor, degree: int, costs: CostModel) -> Demand:
    """The remaining work at `degree`. Encode and decode run on one device, but the job keeps its group.

    Raises UnknownCost.
    """
    one = (request,)
    run_ns = 0
    for stage, num_steps in left.pieces():
        run_ns += costs.work_ns(stage, one, degree if stage.name == DIFFUSE else 1, num_steps)
    return Demand(degree, run_ns)


def reserved_at(request: Request, left: Cursor, degree: int, costs: CostModel) -> Demand:
    """As `demand_at`, but at least a nanosecond while any work remains: what costs nothing must be started, too.

    Raises UnknownCost.
    """
    demand = demand_at(request, left, degree, costs)
    return Demand(degree, 1) if left.stage is not None and not demand.run_ns else demand


def cheapest_in_time(
    request: Request, left: Cursor, degrees: Sequence[int], budget_ns: int, costs: CostModel
) -> Demand:
    """The remaining work at the degree that takes the least device time within a budget; at the quickest if none does.

    Raises UnknownCost.
    """
    if not left.num_steps_left:
        return demand_at(request, left, 1, costs)
    (_, stage, _), one = stages_of(request.pipeline), (request,)
    other_ns = sum(costs.work_ns(piece, one, 1) for piece, _ in left.pieces() if piece.name != DIFFUSE)
    num_steps = left.num_steps_left
    blocks = [Demand(degree, other_ns + costs.work_ns(stage, one, degree, num_steps)) for degree in degrees]
    in_time = [block for block in blocks if block.run_ns <= budget_ns]
    if in_time:
        return min(in_time, key=lambda block: (block.width * block.run_ns, block.width))
    return min(blocks, key=lambda block: (block.run_ns, block.width))


def fastest(request: Request, left: Cursor, degrees: Sequence[int], costs: CostModel) -> Demand:
    """The remaining work at the degree at which it ends first. Raises UnknownCost."""
    return cheapest_in_time(request, left, degrees, -1, costs)


def step_degrees(request: Request, costs: CostModel) -> tuple[int, ...]:
    """The degrees at which the steps of a request may run, ascending: the profiled ones; 1 alone if it is exact.

    All policies, admission and the bounds ask this function, so nothing else needs to know what exact requests exclude.
    Raises UnknownCost.
    """
    _, diffuse, _ = stages_of(request.pipeline)
    return (1,) if request.exact else costs.degrees(diffuse)


def usable_degree(request: Request, width: int, costs: CostModel) -> int:
    """The widest degree at which `width` devices can run the steps of a request; 1 if it may run at wider ones only.

    Raises UnknownCost.
    """
    for degree in reversed(step_degrees(request, costs)):
        if degree <= width:
            return degree
    return 1


def fitting_degrees(request: Request, costs: CostModel) -> Sequence[int]:
    """The degrees at which the steps of a request fit into memory, ascending; all that it may run at if none does.

    Raises UnknownCost.
    """
    _, stage, _ = stages_of(request.pipeline)
    degrees = step_degrees(request, costs)
    return [degree for degree in degrees if costs.fits(stage, request.shape, degree)] or degrees


@dataclass(frozen=True, slots=True)
class Speed:
    """How long one step takes at a degree, and its device time."""

    degree: int
    step_ns: int
    device_ns: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_ns", self.degree * self.step_ns)


def step_speeds(request: Request, costs: CostModel, max_degree: int | None = None) -> tuple[Speed, ...]:
    """The degrees at which a request's steps can run, ascending, up to a limit if given. Raises UnknownCost."""
    _, stage, _ = stages_of(request.pipeline)
    degrees: list[int] = []
    for known in (fitting_degrees(request, costs), step_degrees(request, costs)):
        degrees = degrees or [degree for degree in known if max_degree is None or degree <= max_degree]
    return tuple(Speed(degree, costs.work_ns(stage, (request,), degree)) for degree in degrees)


def worthwhile(speeds: Sequence[Speed]) -> list[Speed]:
    """The speeds that are quicker than every narrower one, ascending: the others only take more devices."""
    kept: list[Speed] = []
    for speed in sorted(speeds, key=lambda speed: speed.degree):
        if not kept or speed.step_ns < kept[-1].step_ns:
            kept.append(speed)
    return kept


@dataclass(frozen=True, slots=True)
class Segment:
    """Some of a request's steps in a row at one degree."""

    num_steps: int
    degree: int


def min_device_allocation(speeds: Sequence[Speed], num_steps: int, budget_ns: float) -> tuple[Segment, ...]:
    """Choose the cheapest degrees, in device time, at which `num_steps` steps take at most `budget_ns`.

    Returns at most two segments, the slower first; empty if even the fastest degree takes longer. Among equally cheap
    ones the quicker is chosen, then the narrower. The slower comes first because the need for the faster one may pass:
    a request that is early needs fewer steps of it, and few devices are found now more easily than many.

    Source: TetriServe §4.2.1; unlike it, the caller charges encode and decode to the deadline, by the budget. A mix of
    two degrees is optimal but for the rounding to whole steps (it is a linear program with two constraints).
    """
    singles = (
        (num_steps * speed.device_ns, num_steps * speed.step_ns, speed.degree, 0, speed, speed) for speed in speeds
    )
    best = min((single for single in singles if single[1] <= budget_ns), key=_rank, default=None)
    for slow, fast in permutations(speeds, 2):
        if slow.step_ns <= fast.step_ns or slow.device_ns >= fast.device_ns:  # Then the faster alone is cheaper.
            continue
        num_fast = ceil((num_steps * slow.step_ns - budget_ns) / (slow.step_ns - fast.step_ns))
        if not 0 < num_fast < num_steps:
            continue
        num_slow = num_steps - num_fast
        device_ns = num_slow * slow.device_ns + num_fast * fast.device_ns
        run_ns = num_slow * slow.step_ns + num_fast * fast.step_ns
        mixed = (device_ns, run_ns, slow.degree, num_fast, slow, fast)
        best = mixed if best is None else min(best, mixed, key=_rank)
    if best is None:
        return ()
    _, _, _, num_fast, slow, fast = best
    parts = Segment(num_steps - num_fast, slow.degree), Segment(num_fast, fast.degree)
    return tuple(part for part in parts if part.num_steps)


_Mix = tuple[int, int, int, int, Speed, Speed]


def _rank(mix: _Mix) -> tuple[int, int, int, int]:
    return mix[:4]
