"""The plan of memory of a start: printed before anything is loaded, and refused with what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tilework.cli.console import UserError, console
from tilework.cli.views.memory_plan import plan_lines
from tilework.core.model import ModelSource
from tilework.pipelines.errors import ModelError
from tilework.pipelines.fits.changes import cheapest_change, options_of
from tilework.pipelines.fits.plan import MemoryPlan, Planner


def weights_room(models: Sequence[ModelSource], memory_bytes: int, weights_bytes: int | None) -> int | None:
    """What a device with this free memory has for weights, if they come and go; None: all stay.

    Prints the plan of each model. The room is `weights_bytes`, unless that is left to the plan: `--offload components`.

    Raises:
        UserError: a model does not fit.
    """
    planners = dict(_planners(models))
    comes_and_goes = weights_bytes is not None
    planned = {
        one: planner.plan(replace(one, offload="components") if comes_and_goes else one, memory_bytes)
        for one, planner in planners.items()
    }
    room = weights_bytes
    for source, alone in planned.items():
        others = sum(_resident(plan) for one, plan in planned.items() if one is not source)
        plan = replace(alone, memory_bytes=memory_bytes - others)
        _show(source, plan, planners[source])
        if plan.source.offload == "components" and not comes_and_goes:
            room = plan.weights_room_bytes if room is None else min(room, plan.weights_room_bytes)
    return room


def refusal(planner: Planner, plan: MemoryPlan) -> str:
    """Why a plan does not fit, and the cheapest change that would."""
    short = f"needs {plan.needed_bytes / 1e9:.1f} GB for {plan.shape}, and {plan.memory_bytes / 1e9:.1f} GB are free"
    other = cheapest_change(planner, plan)
    if other is None:
        return f"{short}; no change of dtype, --quantize or --offload would fit: take a larger device, or --cell"
    options = options_of(other.source, plan.source)
    return f"{short}; with {options} it needs {other.needed_bytes / 1e9:.1f} GB"


def _planners(models: Sequence[ModelSource]) -> Iterator[tuple[ModelSource, Planner]]:
    """Of those whose files say enough; of others it is said that they are not planned."""
    from tilework.pipelines.model_index import INDEX, model_directory
    from tilework.pipelines.workflow.source import is_workflow

    for one in models:
        directory: Path | None = None if is_workflow(one.path) else model_directory(one.path)
        try:
            if directory is not None and (directory / INDEX).is_file():
                yield one, Planner.of(str(directory))
                continue
            reason = "it is no directory of a classic pipeline"
        except ModelError as problem:
            reason = str(problem)
        console.print(f"{one.path}: its memory is not planned; {reason}", soft_wrap=True, highlight=False, markup=False)


def _resident(plan: MemoryPlan) -> int:
    """What stays on a device while other models run."""
    return sum(one.num_bytes for one in plan.components) if plan.source.offload == "none" else 0


def _show(source: ModelSource, plan: MemoryPlan, planner: Planner) -> None:
    if not plan.fits:
        raise UserError(f"{source.name or source.path} {refusal(planner, plan)}")
    largest = planner.largest(plan) if plan.shape.frames == 1 else None  # Of clips that takes minutes.
    console.print(f"{source.name or source.path}, planned:", highlight=False, markup=False)
    for line in plan_lines(plan, largest):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
