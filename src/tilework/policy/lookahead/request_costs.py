"""The costs of requests on a node, computed once per class of requests whose steps cost the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import Stage
from tilework.core.policy import CostModel
from tilework.core.request import Request, RequestClass, StepClass, cost_key, step_key
from tilework.cost.demand import (
    Speed,
    fastest_degree,
    head_and_tail_ns,
    optimal_degree,
    step_speeds,
    worthwhile,
)
from tilework.policy.lookahead.batch import LEAST_SAVED
from tilework.policy.toolkit.degrees import best_doubling
from tilework.policy.toolkit.known_demands import ByClass

_UNKNOWN = (0, None)

_Where = tuple[int, int, tuple[int, ...]]
"""Number of devices, number of stages; where several stages have steps, also the position and the end of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The degrees of what follows all steps, each quicker than those before; `usual` is the index of the optimal one.

    `factors` are the times at these degrees, as shares of that on one device; empty if there is only that.
    """

    speeds: tuple[Speed, ...] = (Speed(1, 0),)
    usual: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The costs of requests of a class on a node with a given number of devices.

    `speeds` are the degrees that are faster than every narrower one; `usual` is the index of the degree up to which
    each doubling pays. `shares`: two such requests take less time in a batch, on one device, than one after the other.
    Where the time of one alone is a guess, `shares` is false until one has run alone. Requests with previews are an
    exception: their works measure nothing.

    The others are times of stages without steps, on one device. By the number of stages that are done: `heads_ns` of
    those before the next steps, `tails_ns` of the others. `last_ns` is that of those after all steps, `rest_ns` that of
    all. `tail_factors` is how much of the times after the steps is left at each of the speeds, where several devices
    may share such a stage; else empty. `tail` says what a request can run at that has no steps left.
    """

    speeds: tuple[Speed, ...]
    usual: int
    shares: bool
    heads_ns: tuple[int, ...]
    tails_ns: tuple[int, ...]
    last_ns: int
    rest_ns: int
    tail_factors: tuple[float, ...] = ()
    tail: Tail

    def alone_ns(self, num_steps: int) -> int:
        """Return the time of a request with this many steps at the fastest degree."""
        step_ns = self.speeds[-1].step_ns if self.speeds else 0
        return self.rest_ns + num_steps * step_ns


@dataclass(slots=True)
class RequestCosts:
    """The costs of each class of requests, computed again when the cost model has learned of such requests."""

    _known: ByClass[tuple[StepClass, _Where], tuple[int, StepCosts]] = field(default_factory=ByClass)
    _by_class: ByClass[tuple[RequestClass, _Where], tuple[int, StepCosts]] = field(default_factory=ByClass)

    def of(self, request: Request, left: Cursor, num_devices: int, costs: CostModel) -> StepCosts:
        """Return the costs on a node of `num_devices`. Raises UnknownCost.

        `left` matters where several stages have steps: a step takes their mean time (`toolkit.demand.step_speeds`).
        """
        several = left.itinerary.num_stepped > 1
        where = num_devices, len(left.itinerary.stages), (left.position, *left.itinerary.ends) if several else ()
        class_key = (cost_key(request), where)
        version = costs.version_of(request)
        found_version, found = self._by_class.get(class_key, _UNKNOWN)  # It has a hash; a step class is hashed anew.
        if found is not None and found_version == version:
            return found
        key = (step_key(request), where)
        known_version, known = self._known.get(key, _UNKNOWN)
        if known is None or known_version != version:
            known = _step_costs(request, left, num_devices, costs, several=several)
            self._known[key] = version, known
        self._by_class[class_key] = version, known
        return known

    def forget(self, pipeline: str) -> None:
        """Drop the costs of a pipeline."""
        self._known.forget(pipeline)
        self._by_class.forget(pipeline)


def _step_costs(request: Request, left: Cursor, num_devices: int, costs: CostModel, *, several: bool) -> StepCosts:
    from_here = left if several and left.num_steps_left else costs.start(request)
    speeds = tuple(worthwhile(step_speeds(request, costs, num_devices, from_here)))
    degree = best_doubling(speeds) if speeds else 0
    starts = [left.itinerary.at[position] for position in (0, *left.itinerary.ends)]
    others = [head_and_tail_ns(request, one, costs) for one in starts]
    return StepCosts(
        speeds=speeds,
        usual=max((level for level, speed in enumerate(speeds) if speed.degree <= degree), default=0),
        shares=bool(speeds) and speeds[0].degree == 1 and _shares(request, from_here.stepped, costs),
        heads_ns=tuple(head_ns for head_ns, _ in others),
        tails_ns=tuple(tail_ns for _, tail_ns in others),
        last_ns=next((tail_ns for one, (_, tail_ns) in zip(starts, others, strict=True) if not one.num_steps_left), 0),
        rest_ns=sum(others[0]),
        tail_factors=_tail_factors(request, starts[0], speeds, costs),
        tail=_tail(request, starts[0], num_devices, costs),
    )


def _tail_factors(request: Request, start: Cursor, speeds: Sequence[Speed], costs: CostModel) -> tuple[float, ...]:
    """Return the time after the steps at each degree, as a share of that on one device; empty if all are the same."""
    if not any(stage.is_parallel for stage, _ in start.pieces if not stage.has_steps):
        return ()
    _, alone_ns = head_and_tail_ns(request, start, costs)
    tails_ns = [head_and_tail_ns(request, start, costs, speed.degree)[1] for speed in speeds]
    return tuple(tail_ns / alone_ns for tail_ns in tails_ns) if alone_ns else ()


def _tail(request: Request, start: Cursor, num_devices: int, costs: CostModel) -> Tail:
    stages = [stage for stage, _ in start.pieces if stage.is_parallel and not stage.has_steps]
    _, alone_ns = head_and_tail_ns(request, start, costs)
    if not stages or not alone_ns:
        return Tail()
    degrees, factors = [1], [1.0]
    for degree in sorted({degree for stage in stages for degree in costs.degrees(stage)}):
        factor = head_and_tail_ns(request, start, costs, degree, fastest_degree)[1] / alone_ns
        if 1 < degree <= num_devices and factor < factors[-1]:
            degrees.append(degree)
            factors.append(factor)
    best = max(optimal_degree(stage, request, costs, num_devices) for stage in stages)
    usual = max(index for index, degree in enumerate(degrees) if degree <= best)
    return Tail(speeds=tuple(Speed(degree, 0) for degree in degrees), usual=usual, factors=tuple(factors))


def _shares(request: Request, stage: Stage | None, costs: CostModel) -> bool:
    if stage is None or not stage.spec.batchable:
        return False
    both = (request, request)
    if not costs.fits_together(stage, [one.shape for one in both]):
        return False
    if not (costs.knows(stage, request) or request.preview_every):
        return False
    return costs.work_ns(stage, both, 1) < (1 - LEAST_SAVED) * 2 * costs.work_ns(stage, (request,), 1)
