"""The document of `tilework plan --json` (docs/planning.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import tilework
from tilework.cli.plan.answer import Answer
from tilework.sim.plan.error import PlanError
from tilework.sim.plan.mix import Purchase
from tilework.sim.plan.search import Point, Sized
from tilework.sim.plan.stages import Partition, StagePlan


def document_of(answer: Answer) -> dict[str, Any]:
    """Return the answer as JSON. Shares are parts of 1. `choice` is null if nothing that may be bought is enough."""
    asked = answer.asked
    return {
        "simulated": True,
        "version": tilework.__version__,
        "workload": asked.name,
        "target": asked.question.target,
        "policy": asked.question.controller.policy,
        "num_requests": len(asked.requests),
        "choice": _choice_document(answer),
        "hardware": [_sized_document(one) for one in answer.alone],
        "what_ifs": [_what_if_document(one) for one in answer.what_ifs],
        "stages": None if answer.stages is None else _stages_document(answer.stages),
        "no_stages": answer.no_stages or None,
        "error": _error_document(answer.error),
        "simulations": answer.num_trials,
        "wall_s": round(answer.wall_s, 3),
        "processes": answer.num_processes,
    }


def _choice_document(answer: Answer) -> dict[str, Any] | None:
    choice = answer.choice
    if choice is None:
        return None
    parts = choice.parts if isinstance(choice, Purchase) else (choice,)
    return {
        "usd_per_h": choice.usd_per_h if isinstance(choice, Purchase) else None,
        "parts": [
            {
                "hardware": part.sizing.hardware,
                "devices": part.fewest,
                "sizes": None if part.sizing.sizes is None else sorted(map(str, part.sizing.sizes)),
                "uses": _uses_document(part.point),
            }
            for part in parts
        ],
    }


def _sized_document(sized: Sized) -> dict[str, Any]:
    return {
        "hardware": sized.sizing.hardware,
        "devices": sized.fewest,
        "devices_in_the_mean": sized.in_the_mean,
        "load": sized.demand.load,
        "least": sized.demand.least,
        "points": [_point_document(one) for one in sized.points],
        "uses": _uses_document(sized.point),
    }


def _point_document(point: Point) -> dict[str, Any]:
    share = point.share
    return {
        "devices": point.num_devices,
        "share": share.value,
        "low": share.low,
        "high": share.high,
        "verdict": point.verdict.value,
        "is_whole": point.is_whole,
        "samples": len(point.outcomes),
        "num_due": share.num_due,
    }


def _uses_document(point: Point | None) -> list[dict[str, Any]]:
    return [] if point is None else [asdict(one) for one in uses_of(point)]


def _what_if_document(sized: Sized) -> dict[str, Any]:
    return {"what_if": str(sized.sizing.what_if), **asdict(sized.sizing.what_if), "devices": sized.fewest}


def _stages_document(plan: StagePlan) -> dict[str, Any]:
    return {
        "hardware": plan.hardware,
        "devices": plan.num_devices,
        "width": plan.width,
        "services": [asdict(one) for one in plan.shares],
        "offered_per_s": plan.offered_per_s,
        "theorem": _partition_document(plan.theorem),
        "best": _partition_document(plan.best),
        "undivided": _partition_document(plan.undivided),
        "num_tried": plan.num_tried,
    }


def _partition_document(one: Partition) -> dict[str, Any]:
    mean_s = None if one.mean_s == float("inf") else one.mean_s
    return {
        "instances": list(one.counts) or None,
        "rate_per_s": one.rate_per_s,
        "share": one.attainment,
        "mean_s": mean_s,
    }


def _error_document(error: PlanError) -> dict[str, Any]:
    return {
        "points": error.points,
        "simulated": error.simulated,
        "live": error.live,
        "num_requests": error.num_requests,
        "source": error.source,
        "compared_with": error.compared_with,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """A stage: how many devices it keeps busy on average, and the share of its device time at each degree."""

    pipeline: str
    stage: str
    devices: float
    degrees: dict[int, float]


def uses_of(point: Point) -> Iterator[StageUse]:
    """Return the uses in all simulations of a number of devices, by pipeline and stage in order of their names."""
    run_s = sum(one.run_s for one in point.outcomes)
    by_degree: Counter[tuple[str, str, int]] = Counter()
    for one in point.outcomes:
        by_degree.update(one.device_s)
    for pipeline, stage in dict.fromkeys((key[0], key[1]) for key in sorted(by_degree)):
        own = {key[2]: s for key, s in sorted(by_degree.items()) if key[:2] == (pipeline, stage)}
        total_s = sum(own.values())
        degrees = {degree: s / total_s for degree, s in own.items()} if total_s else {}
        yield StageUse(pipeline=pipeline, stage=stage, devices=total_s / run_s, degrees=degrees)
