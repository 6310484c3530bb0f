"""A plan of memory in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tilework.core.request import Shape
from tilework.core.wire.reports import DeviceReading, StartMemory
from tilework.pipelines.fits.beside import CONTEXT_BYTES, StartPlan

if TYPE_CHECKING:
    from tilework.pipelines.fits.plan import MemoryPlan


def plan_lines(plan: MemoryPlan, largest: Shape | None) -> Iterator[str]:
    """What goes where, what is on the device in each stage, and what is left: a line for each."""
    where = {"none": "all on the device", "components": "on the device for their stage", "layers": "on the host"}
    total = sum(one.num_bytes for one in plan.components)
    parts = ", ".join(
        f"{one.name} {_gb(one.num_bytes)}{f' ({one.scheme})' if one.scheme else ''}" for one in plan.components
    )
    yield f"  weights {_gb(total)}, {plan.source.dtype}, {where[plan.source.offload]}: {parts}"
    for stage in plan.stages:
        run = "its run is not planned" if stage.run_bytes is None else f"{_gb(stage.run_bytes)} for its run"
        yield f"  {stage.name}: {_gb(stage.weights_bytes)} of weights, {run}"
    beside = ", ".join(f"{name} {_gb(size)}" for name, size in plan.beside.parts.items() if size)
    yield f"  beside them {_gb(plan.beside.num_bytes)}: {beside}"
    left = plan.memory_bytes - plan.needed_bytes
    verdict = f"{_gb(left)} left" if plan.fits else f"{_gb(-left)} too much"
    yield f"  {plan.shape}: {_gb(plan.needed_bytes)} of {_gb(plan.memory_bytes)}; {verdict}"
    if largest is not None:
        yield f"  the largest square that fits: {largest}"


def plan_json(plan: MemoryPlan, largest: Shape | None) -> dict[str, Any]:
    return {
        "memory_bytes": plan.memory_bytes,
        "size": str(plan.shape),
        "dtype": plan.source.dtype,
        "offload": plan.source.offload,
        "components": [
            {"name": one.name, "class": one.kind, "bytes": one.num_bytes, "quantized": one.scheme or None}
            for one in plan.components
        ],
        "stages": [
            {"name": one.name, "weights_bytes": one.weights_bytes, "run_bytes": one.run_bytes} for one in plan.stages
        ],
        "beside": dict(plan.beside.parts),
        "needed_bytes": plan.needed_bytes,
        "fits": plan.fits,
        "largest": None if largest is None else str(largest),
    }


def measured_lines(plan: StartPlan, readings: Mapping[str, DeviceReading]) -> Iterator[str]:
    """A line for each device that has told what it had at its start: this, as planned, and what is left."""
    for name, reading in sorted(readings.items()):
        if reading.start is not None:
            yield f"  device {name}: {_measured(plan, reading.start)}"


def _measured(plan: StartPlan, start: StartMemory) -> str:
    planned = "not planned" if plan.weights_bytes is None else f"planned {_gb(plan.weights_bytes)}"
    lacking = plan.later_bytes - start.free_bytes
    verdict = f", {_gb(lacking)} too little" if lacking > 0 else ""
    return (
        f"CUDA's context takes {_gb(start.context_bytes)} (planned {_gb(CONTEXT_BYTES)}), weights "
        f"{_gb(start.weights_bytes)} ({planned}); {_gb(start.free_bytes)} are free for {_gb(plan.later_bytes)} to "
        f"come{verdict}"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
