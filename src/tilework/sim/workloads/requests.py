"""Requests of a simulation from the workload of a file, and their least device times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tilework.core.cache import IF_LATE, choice_of
from tilework.core.priority import DEFAULT_CLASSES
from tilework.core.request import OnMiss, Request
from tilework.core.time import ns_from_s, s_from_ns
from tilework.cost.degrees import least_device_ns
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.formats.workload import WorkloadRequest
from tilework.sim.workloads.family import stream


class BadRequests(ValueError):
    """A workload cannot be simulated; the message says why and names the remedy."""


def check_requests(
    workload: Sequence[WorkloadRequest], table: CostTable, *, source: Path | str, costs: Path | str
) -> None:
    """Check that a workload can be simulated with a cost table; `source` and `costs` name them. Raises BadRequests."""
    if not workload:
        raise BadRequests(f"{source} holds no requests; write one per line")
    if len({str(line.id) for line in workload if line.id is not None}) < len(workload):
        raise BadRequests(f"{source}: an id occurs once as text and once as a number or a place; use other names")
    known = {row.pipeline for row in table.rows}
    for line in workload:
        if line.pipeline not in known:
            names = ", ".join(sorted(known))
            raise BadRequests(f"{source}: pipeline {line.pipeline!r} is not in {costs}; it knows {names}")
        loras = table.loras.get(line.pipeline, {})
        for lora in line.loras:
            if lora.name not in loras:
                remedy = f"it knows {', '.join(sorted(loras))}" if loras else "leave it out"
                raise BadRequests(f"{source}: LoRA {lora.name!r} of {line.pipeline!r} is not in {costs}; {remedy}")


def to_requests(workload: Iterable[WorkloadRequest]) -> list[Request]:
    """Return requests on the simulation's clock; the uid is the request's id as text. Unknown classes weigh 1."""
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
            exact=line.exact,
            loras=line.loras,
            cache=None if line.cache == IF_LATE else choice_of(line.cache, line.cache_threshold),
            spare_cache=choice_of(line.cache, line.cache_threshold) if line.cache == IF_LATE else None,
        )
        for index, line in enumerate(workload)
    ]


def asking(requests: Iterable[Request], share: float, seed: int) -> list[Request]:
    """Return the same requests, of which a share asks for a promise of its deadline, and the others are best effort.

    Which ask is drawn for itself, one by one: those that ask at a share also ask at a larger one. Without a deadline
    there is nothing to promise.
    """
    rng = stream(seed, "promises")

    def on_miss(one: Request) -> OnMiss:
        return OnMiss.REJECT if one.deadline_ns is not None and rng.random() < share else OnMiss.BEST_EFFORT

    return [replace(one, on_miss=on_miss(one)) for one in requests]


def device_seconds(requests: Iterable[WorkloadRequest], costs: TableCosts) -> list[float]:
    """Return the least device time of each request: every stage at the degree that takes the least.

    Raises UnknownCost.
    """
    return [s_from_ns(least_device_ns(costs, one.pipeline, one.shape, one.steps)) for one in requests]
