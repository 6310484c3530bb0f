"""The load that a workload is for its devices."""

from __future__ import annotations

from collections.abc import Iterable

from tilework.core.time import s_from_ns
from tilework.cost.degrees import least_device_ns
from tilework.cost.table_costs import TableCosts
from tilework.formats.workload import WorkloadRequest


def device_seconds(requests: Iterable[WorkloadRequest], costs: TableCosts) -> list[float]:
    """The least device time of each request: every stage at the degree that takes the least. Raises UnknownCost."""
    return [s_from_ns(least_device_ns(costs, one.pipeline, one.shape, one.steps)) for one in requests]
