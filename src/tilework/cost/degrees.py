"""The time of a request at each degree, from which deadlines and loads of workloads are derived."""

from __future__ import annotations

from collections.abc import Iterable

from tilework.core.graph.stage import Stage
from tilework.core.request import Request, Shape
from tilework.cost.table_costs import TableCosts

EFFICIENT = 0.8


def latency_ns(costs: TableCosts, pipeline: str, shape: Shape, steps: int, degree: int) -> int:
    """Return the time of all stages of one request alone: those with steps at `degree`, others at their optimal one.

    Raises:
        UnknownCost: the table does not know the pipeline, or has no degree as low as this one.
    """
    return sum(
        costs.run_ns(stage, (shape,), degree, num_steps)
        if stage.has_steps
        else costs.run_ns(stage, (shape,), optimal_degree(costs, stage, shape))
        for stage, num_steps in _pieces(costs, pipeline, steps)
    )


def optimal_latency_ns(costs: TableCosts, pipeline: str, shape: Shape, steps: int) -> int:
    """Return the time of all stages of one request alone at their optimal degrees.
    Stages with steps have one degree for all, the lowest of theirs. Raises UnknownCost.
    """
    degree = min(optimal_degree(costs, stage, shape) for stage in costs.graph(pipeline).stepped)
    return latency_ns(costs, pipeline, shape, steps, degree)


def alone_ns(costs: TableCosts, request: Request, most_devices: int) -> int:
    """Return the time of all stages of a request when nothing else runs, each at its optimal available degree.

    Raises UnknownCost.
    """
    found = 0
    for stage, num_steps in costs.start(request).pieces:
        degrees = [degree for degree in _efficient(costs, stage, request.shape) if degree <= most_devices]
        found += costs.work_ns(stage, (request,), max(degrees, default=costs.degrees(stage)[0]), num_steps)
    return found


def fastest_latency_ns(costs: TableCosts, pipeline: str, shape: Shape, steps: int) -> int:
    """Return the time of all stages of one request alone, at the degree that is fastest. Raises UnknownCost."""
    degrees = costs.common_degrees(pipeline)
    return min(latency_ns(costs, pipeline, shape, steps, degree) for degree in degrees)


def optimal_degree(costs: TableCosts, stage: Stage, shape: Shape) -> int:
    """Return the highest degree k that is efficient: T(1) / (k T(k)) is at least EFFICIENT. Raises UnknownCost.

    T(1) stands for the lowest profiled degree. Source: TridentServe §6.
    """
    return max(_efficient(costs, stage, shape))


def _efficient(costs: TableCosts, stage: Stage, shape: Shape) -> list[int]:
    degrees = costs.degrees(stage)
    least_ns = degrees[0] * costs.run_ns(stage, (shape,), degrees[0])
    return [k for k in degrees if least_ns >= EFFICIENT * k * costs.run_ns(stage, (shape,), k)]


def useful_degrees(costs: TableCosts, stage: Stage, shape: Shape) -> tuple[int, ...]:
    """Return the degrees that are faster than every lower one, ascending. Raises UnknownCost."""
    useful: list[int] = []
    for degree in costs.degrees(stage):
        if not useful or costs.run_ns(stage, (shape,), degree) < costs.run_ns(stage, (shape,), useful[-1]):
            useful.append(degree)
    return tuple(useful)


def least_device_ns(costs: TableCosts, pipeline: str, shape: Shape, steps: int) -> int:
    """Return the least device time of a request, each stage at its degree with the least. Raises UnknownCost."""
    return sum(
        min(k * costs.run_ns(stage, (shape,), k, num_steps) for k in costs.degrees(stage))
        for stage, num_steps in _pieces(costs, pipeline, steps)
    )


def _pieces(costs: TableCosts, pipeline: str, steps: int) -> Iterable[tuple[Stage, int]]:
    return costs.graph(pipeline).itinerary(steps).at[0].pieces
