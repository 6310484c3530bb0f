"""The time of a request at each degree, from which deadlines and loads of workloads are derived."""

from __future__ import annotations

from collections.abc import Iterable

from tilework.core.request import Shape
from tilework.core.work import DIFFUSE, STAGES, StageId
from tilework.cost.table_costs import TableCosts

EFFICIENT = 0.8


def latency_ns(costs: TableCosts, pipeline: str, shape: Shape, steps: int, degree: int) -> int:
    """The time of all stages of one request alone: diffuse at `degree`, the others at their own optimal degree.

    Raises:
        UnknownCost: the table does not know the pipeline, or has no degree as low as this one.
    """
    return sum(
        costs.run_ns(stage, (shape,), degree, steps)
        if stage.name == DIFFUSE
        else costs.run_ns(stage, (shape,), optimal_degree(costs, stage, shape))
        for stage in _stages(pipeline)
    )


def optimal_latency_ns(costs: TableCosts, pipeline: str, shape: Shape, steps: int) -> int:
    """The time of all stages of one request alone, each at its optimal degree. Raises UnknownCost."""
    degree = optimal_degree(costs, StageId(pipeline, DIFFUSE), shape)
    return latency_ns(costs, pipeline, shape, steps, degree)


def fastest_latency_ns(costs: TableCosts, pipeline: str, shape: Shape, steps: int) -> int:
    """The time of all stages of one request alone, at the degree that is fastest. Raises UnknownCost."""
    degrees = costs.degrees(StageId(pipeline, DIFFUSE))
    return min(latency_ns(costs, pipeline, shape, steps, degree) for degree in degrees)


def optimal_degree(costs: TableCosts, stage: StageId, shape: Shape) -> int:
    """The highest degree k that is efficient: T(1) / (k T(k)) is at least EFFICIENT. Raises UnknownCost.

    T(1) stands for the lowest profiled degree. Source: TridentServe §6.
    """
    degrees = costs.degrees(stage)
    least_ns = degrees[0] * costs.run_ns(stage, (shape,), degrees[0])
    return max(k for k in degrees if least_ns >= EFFICIENT * k * costs.run_ns(stage, (shape,), k))


def useful_degrees(costs: TableCosts, stage: StageId, shape: Shape) -> tuple[int, ...]:
    """The degrees that are faster than every lower one, ascending. Raises UnknownCost."""
    useful: list[int] = []
    for degree in costs.degrees(stage):
        if not useful or costs.run_ns(stage, (shape,), degree) < costs.run_ns(stage, (shape,), useful[-1]):
            useful.append(degree)
    return tuple(useful)


def least_device_ns(costs: TableCosts, pipeline: str, shape: Shape, steps: int) -> int:
    """The least device time of a request: every stage at the degree that takes the least. Raises UnknownCost."""
    return sum(
        min(k * costs.run_ns(stage, (shape,), k, steps if stage.name == DIFFUSE else 1) for k in costs.degrees(stage))
        for stage in _stages(pipeline)
    )


def _stages(pipeline: str) -> Iterable[StageId]:
    return (StageId(pipeline, name) for name in STAGES)
