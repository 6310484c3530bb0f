"""A whole request on one family: all stages of its graph, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilework.core.wire.spec import Image, Spec
from tilework.pipelines.family import Family, StepState, Values


def draw(
    family: Family,
    spec: Spec,
    on_step: Callable[[int], None] = lambda _steps_done: None,
    step: Callable[[StepState], None] | None = None,
) -> Image:
    """Draw the image of a request; `on_step` gets the number of steps done. Without `step` each is made alone."""
    values: dict[str, Any] = {}
    outputs: Values = {}
    num_done = 0
    for stage in family.info.graph.itinerary(spec.steps).stages:
        if stage.has_steps:
            state = family.begin(stage.name, spec, values)
            while state.steps_done < state.num_steps:
                if step is None:
                    family.step([state])
                else:
                    step(state)
                on_step(num_done + state.steps_done)
            num_done += state.num_steps
            outputs = family.finish(state)
        else:
            (outputs,) = family.run(stage.name, [spec], [values])
        values.update(outputs)
    return family.image(spec, outputs)


def begin_steps(family: Family, spec: Spec) -> StepState:
    """Return the state before the first step of a request's first stage with steps; runs the stages before it."""
    values: dict[str, Any] = {}
    for stage in family.info.graph.stages:
        if stage.has_steps:
            return family.begin(stage.name, spec, values)
        values.update(family.run(stage.name, [spec], [values])[0])
    raise ValueError(f"no stage of {family.info.name} has steps")
