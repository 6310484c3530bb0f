"""The remaining work of a request as blocks of devices x time, and the cheapest degrees that meet its deadline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from math import ceil

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.policy import CostModel
from tilework.core.request import Request
from tilework.cost.degrees import EFFICIENT


def demand_at(
    request: Request,
    left: Cursor,
    degree: int,
    costs: CostModel,
    loads_ns: Callable[[Stage], int] | None = None,
) -> Demand:
    """Return the remaining work at `degree`. Stages without steps run on one device, or on a CPU slot.

    The group is kept from the first steps to the last. `loads_ns` is how long each of its devices loads components
    before a stage. Raises UnknownCost.
    """
    one = (request,)
    run_ns = 0
    ends_ns = []
    for stage, num_steps in left.pieces:
        if loads_ns is not None:
            run_ns += loads_ns(stage)
        run_ns += costs.work_ns(stage, one, degree if stage.has_steps else 1, num_steps)
        ends_ns.append(run_ns)
    if degree == 1 and not left.itinerary.needs_slots:
        return Demand(1, run_ns)
    return shaped(degree, left, ends_ns)


def shaped(degree: int, left: Cursor, ends_ns: Sequence[int]) -> Demand:
    """Return the demand of stages that end at these times; it takes all its devices from the first to the last step."""
    begin_ns = 0
    steps_begin_ns = -1
    steps_end_ns = 0
    slot = None
    for (stage, _), end_ns in zip(left.pieces, ends_ns, strict=True):
        if stage.has_steps:
            steps_begin_ns, steps_end_ns = begin_ns if steps_begin_ns < 0 else steps_begin_ns, end_ns
        elif stage.kind is DeviceKind.CPU:
            slot = slot[0] if slot else begin_ns, end_ns
        begin_ns = end_ns
    if degree == 1:
        return Demand(1, begin_ns, slot=slot)
    return Demand(degree, begin_ns, max(0, steps_begin_ns), begin_ns - steps_end_ns, slot)


def reserved_at(
    request: Request,
    left: Cursor,
    degree: int,
    costs: CostModel,
    loads_ns: Callable[[Stage], int] | None = None,
) -> Demand:
    """Return `demand_at`, but at least a nanosecond while any work remains: work without cost must start, too.

    Raises UnknownCost.
    """
    demand = demand_at(request, left, degree, costs, loads_ns)
    return Demand(degree, 1) if left.stage is not None and not demand.run_ns else demand


def demands_at(request: Request, left: Cursor, degrees: Sequence[int], costs: CostModel) -> list[Demand]:
    """Return the remaining work at each degree; only on one device if no steps are left. Raises UnknownCost."""
    return [demand_at(request, left, degree, costs) for degree in (degrees if left.num_steps_left else (1,))]


def fastest(request: Request, left: Cursor, degrees: Sequence[int], costs: CostModel) -> Demand:
    """Return the remaining work at the degree at which it ends first. Raises UnknownCost."""
    return quickest(demands_at(request, left, degrees, costs))


def quickest(demands: Collection[Demand]) -> Demand:
    """Choose the demand that ends first, of the same work at several degrees; among equals the narrowest."""
    return min(demands, key=lambda demand: (demand.run_ns, demand.width))


def step_degrees(request: Request, costs: CostModel) -> tuple[int, ...]:
    """Return the degrees at which the steps of a request may run, ascending.

    All its stages with steps were profiled at these. 1 alone if it `has_single_steps`.

    All policies, admission and the bounds ask this function, so nothing else needs to know which requests exclude that.
    Raises UnknownCost.
    """
    return (1,) if request.has_single_steps else costs.common_degrees(request.pipeline)


def usable_degree(request: Request, width: int, costs: CostModel) -> int:
    """Return the widest degree at which `width` devices can run a request's steps; 1 if all its degrees are wider.

    Raises UnknownCost.
    """
    for degree in reversed(step_degrees(request, costs)):
        if degree <= width:
            return degree
    return 1


def fits_at(request: Request, degree: int, costs: CostModel) -> bool:
    """Return whether a request's steps fit into memory at a degree, in all stages with steps. Raises UnknownCost."""
    return all(costs.fits(stage, request.shape, degree) for stage in costs.graph(request.pipeline).stepped)


def fitting_degrees(request: Request, costs: CostModel) -> Sequence[int]:
    """Return the degrees at which a request's steps fit into memory, ascending; all `step_degrees` if none does.

    Raises UnknownCost.
    """
    degrees = step_degrees(request, costs)
    return [degree for degree in degrees if fits_at(request, degree, costs)] or degrees


def optimal_degree(stage: Stage, request: Request, costs: CostModel, most: int | None = None) -> int:
    """Return the highest degree k of a stage that is efficient and fits into memory, of those up to `most`.

    Efficient: T(1) / (k T(k)) is at least EFFICIENT; the lowest degree that fits stands for the first. Where none fits,
    all count as fitting. Raises UnknownCost.

    Source: TridentServe §6.2, footnote 4.
    """
    fitting = _fitting(stage, request, costs, most)
    times_ns = {degree: degree * costs.work_ns(stage, (request,), degree) for degree in fitting}
    return max(degree for degree in fitting if times_ns[fitting[0]] >= EFFICIENT * times_ns[degree])


def fastest_degree(stage: Stage, request: Request, costs: CostModel, most: int) -> int:
    """Return the degree at which a stage ends first and fits into memory, up to `most`. Raises UnknownCost."""
    return min(
        _fitting(stage, request, costs, most), key=lambda degree: (costs.work_ns(stage, (request,), degree), degree)
    )


def _fitting(stage: Stage, request: Request, costs: CostModel, most: int | None) -> Sequence[int]:
    """Return the degrees at which a stage may run and fits into memory, ascending; all of them if none fits."""
    if not stage.is_parallel or request.exact:
        return (1,)
    allowed = [degree for degree in costs.degrees(stage) if most is None or degree <= most] or [1]
    return [degree for degree in allowed if costs.fits(stage, request.shape, degree)] or allowed


@dataclass(frozen=True, slots=True)
class Speed:
    """The time of one step at a degree, and its device time."""

    degree: int
    step_ns: int
    device_ns: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_ns", self.degree * self.step_ns)


def step_speeds(
    request: Request, costs: CostModel, max_degree: int | None = None, left: Cursor | None = None
) -> tuple[Speed, ...]:
    """Return the speeds at which a request's steps can run, by degree ascending, up to a limit; empty without steps.

    A step's time is the mean over the steps that are left (default: all) where several stages have steps, so that the
    number of these steps times it is what they take. Raises UnknownCost.
    """
    pieces = [piece for piece in (left or costs.start(request)).pieces if piece[0].has_steps]
    if not pieces:
        return ()
    degrees: list[int] = []
    for known in (fitting_degrees(request, costs), step_degrees(request, costs)):
        degrees = degrees or [degree for degree in known if max_degree is None or degree <= max_degree]
    return tuple(Speed(degree, _mean_step_ns(pieces, request, degree, costs)) for degree in degrees)


def head_and_tail_ns(
    request: Request,
    left: Cursor,
    costs: CostModel,
    width: int = 1,
    degree_of: Callable[[Stage, Request, CostModel, int], int] = optimal_degree,
) -> tuple[int, int]:
    """Return the time of the remaining stages without steps: before the next steps, and after. Raises UnknownCost.

    Those after it run on as many of `width` devices as `degree_of` says.

    What comes after a leg (`core.graph.itinerary`) counts as time after, its steps at their quickest.
    """
    head_ns, tail_ns, is_tail = 0, 0, not left.num_steps_left
    for stage, _ in left.pieces:
        if stage.has_steps:
            is_tail = True
        elif is_tail:
            tail_ns += costs.work_ns(stage, (request,), degree_of(stage, request, costs, width))
        else:
            head_ns += costs.work_ns(stage, (request,), 1)
    for stage, num_steps in left.itinerary.following:
        degrees = step_degrees(request, costs) if stage.has_steps else (1,)
        tail_ns += min(costs.work_ns(stage, (request,), degree, num_steps) for degree in degrees)
    return head_ns, tail_ns


def _mean_step_ns(pieces: Sequence[tuple[Stage, int]], request: Request, degree: int, costs: CostModel) -> int:
    if len(pieces) == 1:
        return costs.work_ns(pieces[0][0], (request,), degree)
    total_ns = sum(costs.work_ns(stage, (request,), degree, num_steps) for stage, num_steps in pieces)
    return round(total_ns / sum(num_steps for _, num_steps in pieces))


def worthwhile(speeds: Sequence[Speed]) -> list[Speed]:
    """Return the speeds that are quicker than every narrower one, ascending: the others only take more devices."""
    kept: list[Speed] = []
    for speed in sorted(speeds, key=lambda speed: speed.degree):
        if not kept or speed.step_ns < kept[-1].step_ns:
            kept.append(speed)
    return kept


@dataclass(frozen=True, slots=True)
class Segment:
    """A number of a request's steps in a row at one degree."""

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
    best = min((single for single in singles if single[1] <= budget_ns), key=_order, default=None)
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
        best = mixed if best is None else min(best, mixed, key=_order)
    if best is None:
        return ()
    _, _, _, num_fast, slow, fast = best
    parts = Segment(num_steps - num_fast, slow.degree), Segment(num_fast, fast.degree)
    return tuple(part for part in parts if part.num_steps)


_Mix = tuple[int, int, int, int, Speed, Speed]


def _order(mix: _Mix) -> tuple[int, int, int, int]:
    return mix[:4]
