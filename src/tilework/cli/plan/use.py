"""What devices are used for in simulations: by stage, how many on average and at which degrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tilework.sim.plan.search import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """A stage: how many devices it keeps busy on average, and the share of its device time at each degree."""

    pipeline: str
    stage: str
    devices: float
    degrees: dict[int, float]


def uses_of(point: Point) -> Iterator[StageUse]:
    """Those of all simulations of a number of devices, by pipeline and stage in the order of their names."""
    run_s = sum(one.run_s for one in point.outcomes)
    by_degree: Counter[tuple[str, str, int]] = Counter()
    for one in point.outcomes:
        by_degree.update(one.device_s)
    for pipeline, stage in dict.fromkeys((key[0], key[1]) for key in sorted(by_degree)):
        own = {key[2]: s for key, s in sorted(by_degree.items()) if key[:2] == (pipeline, stage)}
        total_s = sum(own.values())
        degrees = {degree: s / total_s for degree, s in own.items()} if total_s else {}
        yield StageUse(pipeline=pipeline, stage=stage, devices=total_s / run_s, degrees=degrees)
