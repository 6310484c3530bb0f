"""A pipeline inside a workflow: its stages, its values and its requests, under the names of the workflow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from tilework.core.graph.stage import ResultKind, StageSpec, StepShare
from tilework.core.model import ModelInfo
from tilework.core.wire.spec import Spec
from tilework.pipelines.errors import InvalidWorkflow
from tilework.pipelines.family import ANY_SEED, LIVE, Values
from tilework.pipelines.video.export import SOUND
from tilework.pipelines.workflow.definition import Pipeline
from tilework.pipelines.workflow.pictures import image_of

_SPEC_FIELDS = frozenset(one.name for one in fields(Spec))
_KEPT = frozenset((LIVE, ANY_SEED))
_SETTINGS = frozenset(("steps", "guidance_scale", "negative_prompt", "height", "width", "seed"))


@dataclass(frozen=True, eq=False)
class WorkflowPart:
    """A pipeline of a workflow. `info` is that of its family, `prefix` precedes its names.

    The first pipeline takes everything from a request; others take its size and seed.
    """

    pipeline: Pipeline
    info: ModelInfo
    prefix: str
    is_first: bool

    def __post_init__(self) -> None:
        takes = {*(one.name for one in self.info.pictures), "prompt"}
        takes |= {"negative_prompt"} if self.info.takes_negative else set()
        self._check("reads", self.pipeline.reads, takes)
        self._check("settings", self.pipeline.settings, _SETTINGS.union(one.name for one in self.info.arguments))
        steps = self.pipeline.settings.get("steps", self.info.default_steps)
        if type(steps) is not int or steps < 1 or not self.info.can_run(steps):
            raise InvalidWorkflow(
                f"settings of the pipeline {self.pipeline.path!r} have steps = {steps!r}; give a number of steps that "
                "its sampler can run"
            )

    def _check(self, what: str, given: Collection[str], known: Collection[str]) -> None:
        """Raise InvalidWorkflow for a field that the pipeline does not take."""
        for name in given:
            if name not in known:
                raise InvalidWorkflow(
                    f"{what} of the pipeline {self.pipeline.path!r} have {name!r}; it takes {', '.join(sorted(known))}"
                )

    @property
    def makes_clips(self) -> bool:
        return self.info.max_frames > 1

    @cached_property
    def inner_stages(self) -> tuple[StageSpec, ...]:
        """Stages of the family, without one that writes a file: that is the end of the workflow."""
        return tuple(stage.spec for stage in self.info.graph.stages if stage.spec.result is not ResultKind.VIDEO)

    @cached_property
    def stages(self) -> tuple[StageSpec, ...]:
        """Stages in the graph of the workflow. Each reads all that the pipeline reads of others."""
        inner = self.inner_stages
        written = {name for one in inner for name in one.outputs}
        bound = tuple(self.pipeline.reads.values())
        return tuple(
            replace(
                one,
                name=self.prefix + one.name,
                components=tuple(self.prefix + name for name in one.components),
                inputs=tuple(
                    dict.fromkeys(
                        (
                            *(self.value(name) if name in written else self._read(name) for name in one.inputs),
                            *bound,
                        )
                    )
                ),
                outputs=tuple(map(self.value, one.outputs)),
                previews=self.prefix + one.previews if one.previews else "",
                steps=one.steps if one.steps is None or self._steps is None else StepShare(count=self._steps[0]),
            )
            for one in inner
        )

    @cached_property
    def result(self) -> str:
        """Name of the image that the family makes, in the family."""
        return self.inner_stages[-1].outputs[0]

    @property
    def sound(self) -> str | None:
        """Name of the value with the sound of its clip, if it makes any."""
        return self.value(SOUND) if SOUND in self.inner_stages[-1].outputs else None

    def value(self, inner: str) -> str:
        """Return the name of a value of the family."""
        return self.pipeline.returns if inner == self.result else self.prefix + inner

    def inner_values(self, values: Values) -> Values:
        """Return the values that the family knows, by its own names."""
        names = {self.value(name): name for one in self.inner_stages for name in one.outputs}
        return {names.get(name, name): value for name, value in values.items() if name in names or name == LIVE}

    def outer_values(self, values: Values) -> Values:
        """Return the outputs of a stage of the family. Nothing of a request stays alive after its last stage."""
        ended = {LIVE: None} if self.result in values else {}
        return {name if name in _KEPT else self.value(name): value for name, value in values.items()} | ended

    def spec(self, spec: Spec, values: Values) -> Spec:
        """Return the request that the family gets, with the values that the pipeline reads of other stages put in."""
        frames = spec.frames if self.makes_clips else 1
        if self.is_first:
            own = replace(spec, frames=frames)
        else:
            own = replace(
                spec,
                frames=frames,
                negative_prompt=None,
                guidance_scale=self.info.default_guidance_scale,
                arguments={},
                pictures={},
                loras=(),
            )
        read = {field: values[name] for field, name in self.pipeline.reads.items() if name in values}
        texts = {field: value for field, value in read.items() if field in _SPEC_FIELDS}
        pictures = {field: (image_of(value),) for field, value in read.items() if field not in _SPEC_FIELDS}
        own = replace(own, **self._given_fields, **texts, pictures={**own.pictures, **pictures})
        own = replace(own, arguments={**own.arguments, **self._given_arguments})
        if self._steps is not None:
            steps, whole = self._steps
            own = replace(own, steps=steps, whole_steps=whole)
        return own

    @property
    def _given_fields(self) -> Mapping[str, Any]:
        return {key: value for key, value in self.pipeline.settings.items() if key in _SPEC_FIELDS and key != "steps"}

    @property
    def _given_arguments(self) -> Mapping[str, Any]:
        return {key: value for key, value in self.pipeline.settings.items() if key not in _SPEC_FIELDS}

    @cached_property
    def _steps(self) -> tuple[int, int | None] | None:
        """Steps that it makes, and those that its call gets; None: those of the request."""
        if self.is_first and "steps" not in self.pipeline.settings:
            return None
        whole: int = self.pipeline.settings.get("steps", self.info.default_steps)
        for one in self.info.arguments:
            strength = self._given_arguments.get(one.name, one.default)
            if one.strength is not None and strength:
                return one.strength.steps(whole, strength), whole
        return whole, None

    def _read(self, name: str) -> str:
        return self.pipeline.reads.get(name, name)
