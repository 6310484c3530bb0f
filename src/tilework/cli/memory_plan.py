"""The memory plan of a start: made before anything is loaded, in words, and refused with changes that would fit."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilework.cli.console import UserError, console
from tilework.core.model import ModelSource
from tilework.core.request import Shape
from tilework.core.wire.reports import DeviceReading, StartMemory
from tilework.pipelines.errors import ModelError, UnsupportedModel
from tilework.pipelines.fits.beside import CONTEXT_BYTES, Beside, StartPlan

if TYPE_CHECKING:
    from tilework.pipelines.fits.plan import MemoryPlan, Planner


_LOWERED = "so that all fits, --cache-memory is {:.1f} GB here, and --states-memory {:.1f} GB"


def planned_start(
    models: Sequence[ModelSource], memory_bytes: int, weights_bytes: int | None, beside: Beside
) -> StartPlan:
    """Plan a device with this free memory, where models lie `beside` other things. Prints the plan of each model.

    The room of weights that come and go is `weights_bytes`, unless that is left to the plan: `--offload components`. A
    model that cannot be planned is named, and starts without a plan. What is to spare `beside` models they take, if
    they do not fit otherwise.

    Raises:
        UserError: a model does not fit, or is not planned and its room is left to the plan.
    """
    planned = dict(_planned(models, memory_bytes, beside, comes_and_goes=weights_bytes is not None))
    if weights_bytes is None:
        _require_rooms(models, planned)
    resident = sum(_resident(plan) for _, plan in planned.values())
    alone = [plan for _, plan in planned.values()]
    plans = [replace(plan, memory_bytes=memory_bytes - resident + _resident(plan)) for plan in alone]
    lower = beside.lowered(max((plan.needed_bytes - plan.memory_bytes for plan in plans if not plan.fits), default=0))
    if lower != beside:
        plans = [replace(plan, beside=lower) for plan in plans]
        beside = lower
        console.print(_LOWERED.format(lower.cache_bytes / 1e9, lower.states_bytes / 1e9), soft_wrap=True)
    for source, plan in zip(planned, plans, strict=True):
        _show(source, plan, planned[source][0])
    rooms = [one.weights_room_bytes for one in plans if one.source.offload == "components"]
    room = min(rooms, default=None) if weights_bytes is None else weights_bytes
    return StartPlan(
        beside=beside,
        weights_room=room,
        weights_bytes=resident if len(plans) == len(models) else None,
        later_bytes=max((_coming(one, room or 0) for one in plans), default=0) + beside.num_bytes - CONTEXT_BYTES,
    )


def refusal(planner: Planner, plan: MemoryPlan) -> str:
    """Say why a plan does not fit, and name the cheapest changes that would."""
    from tilework.pipelines.fits.changes import cheapest_change, options_of

    short = f"needs {plan.needed_bytes / 1e9:.1f} GB for {plan.shape}, and {plan.memory_bytes / 1e9:.1f} GB are free"
    remedies: list[str] = []
    if (other := cheapest_change(planner, plan)) is not None:
        remedies.append(f"with {options_of(other.source, plan.source)} it needs {other.needed_bytes / 1e9:.1f} GB")
    if (bound := plan.beside.bound_bytes - (plan.needed_bytes - plan.memory_bytes)) > 0:
        remedies.append(f"it fits if --states-memory and --cache-memory are {bound / 1e9:.1f} GB together")
    if not remedies:
        return f"{short}; no change of dtype, --quantize or --offload would fit: take a larger device, or --cell"
    return f"{short}; {', or '.join(remedies)}"


def _planned(
    models: Sequence[ModelSource], memory_bytes: int, beside: Beside, *, comes_and_goes: bool
) -> Iterator[tuple[ModelSource, tuple[Planner, MemoryPlan]]]:
    """Yield the plan of each model alone; of one that has none it is said why."""
    from tilework.pipelines.fits.plan import Planner  # Brings torch, which a server does without.

    for one in models:
        setup = replace(one, offload="components") if comes_and_goes else one
        try:
            planner = Planner.of(str(_directory(one.path)))
            plan = planner.plan(setup, memory_bytes, beside=beside)
        except Exception as problem:  # Configurations and classes are of others; a start does not depend on a plan.
            reason = str(problem) if isinstance(problem, ModelError) else f"{type(problem).__name__}: {problem}"
            text = f"{one.path}: its memory is not planned; {reason.partition(chr(10))[0]}"
            console.print(text, soft_wrap=True, highlight=False, markup=False)
        else:
            yield one, (planner, plan)


def _directory(path: str) -> Path:
    """Return the directory of a model whose files say enough for a plan. Raises UnsupportedModel."""
    from tilework.pipelines.model_index import INDEX, model_directory
    from tilework.pipelines.workflow.source import is_workflow

    directory = None if is_workflow(path) else model_directory(path)
    if directory is None or not (directory / INDEX).is_file():
        raise UnsupportedModel("it is no directory of a classic pipeline")
    return directory


def _require_rooms(models: Sequence[ModelSource], planned: Container[ModelSource]) -> None:
    """Raise UserError if a model leaves the room of its weights to a missing plan."""
    for one in models:
        if one.offload == "components" and one not in planned:
            raise UserError(
                f"offload is components, and the memory of {one.path} is not planned; say what each device has for "
                "weights, as in --weights-memory 8GB"
            )


def _coming(plan: MemoryPlan, room: int) -> int:
    """Return the bytes of a run and of weights that come for it, beside what stays."""
    if plan.source.offload == "components":
        return room + plan.largest_run_bytes
    return plan.needed_bytes - plan.beside.num_bytes - _resident(plan)


def _resident(plan: MemoryPlan) -> int:
    """Return the bytes that stay on a device while other models run."""
    return sum(one.num_bytes for one in plan.components) if plan.source.offload == "none" else 0


def _show(source: ModelSource, plan: MemoryPlan, planner: Planner) -> None:
    if not plan.fits:
        raise UserError(f"{source.name or source.path} {refusal(planner, plan)}")
    largest = planner.largest(plan) if plan.shape.frames == 1 else None  # For clips this takes minutes.
    console.print(f"{source.name or source.path}, planned:", highlight=False, markup=False)
    for line in plan_lines(plan, largest):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def plan_lines(plan: MemoryPlan, largest: Shape | None) -> Iterator[str]:
    """Write a plan as lines: where each component goes, what each stage has on the device, and what is left."""
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
    """Yield a line for each device that has told what it had at its start: this, as planned, and what is left."""
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
