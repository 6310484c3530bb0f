"""From the workload of a file to the requests of a simulation."""

from __future__ import annotations

from collections.abc import Iterable

from tilework.core.priority import DEFAULT_CLASSES
from tilework.core.request import Request
from tilework.core.time import ns_from_s
from tilework.formats.workload import WorkloadRequest


def to_requests(workload: Iterable[WorkloadRequest]) -> list[Request]:
    """Requests on the simulation's clock; the uid is the request's id as text. Unknown classes weigh 1."""
    return [
        Request(
            uid=str(index if line.id is None else line.id),
            pipeline=line.pipeline,
            shape=line.shape,
            steps=line.steps,
            arrival_ns=ns_from_s(line.arrival_s),
            seed=line.seed or 0,
            deadline_ns=None if line.deadline_s is None else ns_from_s(line.deadline_s),
            on_miss=line.on_miss,
            tenant=line.tenant or "default",
            priority=line.priority,
            weight=DEFAULT_CLASSES.get(line.priority, 1.0),
        )
        for index, line in enumerate(workload)
    ]
