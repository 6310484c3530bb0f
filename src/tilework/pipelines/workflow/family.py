"""The family of a workflow: the families of its pipelines, and the user's stages, as one graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilework.core.cache import CacheUse
from tilework.core.comm import Comm
from tilework.core.graph.graph import BadGraph
from tilework.core.graph.stage import StageSpec
from tilework.core.model import ModelInfo
from tilework.core.packing import Pack
from tilework.core.wire.spec import File, Image, Spec
from tilework.pipelines.errors import InvalidWorkflow
from tilework.pipelines.family import Family, StepState, Values, Watch
from tilework.pipelines.video.export import EXPORT, SOUND, exported, exported_file
from tilework.pipelines.workflow.definition import REQUEST_FIELDS, Pipeline, Workflow, unknown_value
from tilework.pipelines.workflow.functions import LoadedFunction, require_picture
from tilework.pipelines.workflow.loras import WorkflowLoras
from tilework.pipelines.workflow.parallels import Parallels
from tilework.pipelines.workflow.parts import WorkflowPart
from tilework.pipelines.workflow.pictures import image_of


@dataclass(frozen=True, slots=True, eq=False)
class PartState:
    """The state of a pipeline's family, wrapped as a state of the workflow's request."""

    spec: Spec
    stage: str
    inner: StepState

    @property
    def num_steps(self) -> int:
        return self.inner.num_steps

    @property
    def steps_done(self) -> int:
        return self.inner.steps_done

    @property
    def is_torn(self) -> bool:
        return self.inner.is_torn

    def take_cache_use(self) -> CacheUse | None:
        return self.inner.take_cache_use()


class WorkflowFamily:
    """A `Family` of a workflow. See `family.Family` for the contract.

    On an accelerator it has the families of all pipelines. On a CPU slot it has none, and only the functions that run
    there.
    """

    def __init__(
        self,
        info: ModelInfo,
        device: torch.device,
        parts: Sequence[tuple[WorkflowPart, Family]],
        functions: Sequence[LoadedFunction],
    ) -> None:
        self.info = info
        self.device = device
        self._parts = {stage.name: (part, family) for part, family in parts for stage in part.stages}
        stages = {stage.name: stage.spec for stage in info.graph.stages}
        self._file_stage = stages.pop(EXPORT.name, None)  # The stage that writes a file, if there is one.
        self._result = list(stages.values())[-1].outputs[0]
        self._families = [family for _, family in parts]
        self._all_parts = parts
        self._functions = {one.function.name: one for one in functions}
        self.parallel = Parallels([one.parallel for one in self._families])
        of_pipelines = {part.prefix: family.loras for part, family in parts if family.loras is not None}
        self.loras = WorkflowLoras(of_pipelines) if of_pipelines else None
        of_parts = {part.prefix + name: one for part, family in parts for name, one in family.modules.items()}
        of_functions = {name: one.modules[name] for one in functions for name in one.components}
        self.modules: Mapping[str, torch.nn.Module] = of_parts | of_functions

    def join(self, comm: Comm, spec: Spec) -> None:
        """Join all families; only the one whose stage runs uses the group. `Parallels.leave` ends it for all."""
        for part, family in self._all_parts:
            family.join(comm, part.spec(spec, {}))

    def run(self, stage: str, specs: Sequence[Spec], values: Sequence[Values], sliced: bool = False) -> list[Values]:
        if stage in self._functions:
            return self._functions[stage].run(specs, values, self.parallel.comm)
        if stage == EXPORT.name:
            return [exported(spec, self._clip(one)) for spec, one in zip(specs, values, strict=True)]
        part, family = self._parts[stage]
        own = [part.spec(spec, one) for spec, one in zip(specs, values, strict=True)]
        inner = [part.inner_values(one) for one in values]
        return [part.outer_values(one) for one in family.run(self._inner(stage), own, inner, sliced)]

    def begin(self, stage: str, spec: Spec, values: Values) -> StepState:
        part, family = self._parts[stage]
        inner = family.begin(self._inner(stage), part.spec(spec, values), part.inner_values(values))
        return PartState(spec, stage, inner)

    def step(self, states: Sequence[PartState], pack: Pack | None = None, watch: Watch | None = None) -> None:
        _, family = self._parts[states[0].stage]
        family.step([state.inner for state in states], pack, None if watch is None else _watching(states, watch))

    def finish(self, state: PartState) -> Values:
        part, family = self._parts[state.stage]
        return part.outer_values(family.finish(state.inner))

    def image(self, spec: Spec, values: Values) -> Image:
        require_picture(self._result, values[self._result])
        return image_of(values[self._result])

    def file(self, spec: Spec, values: Values) -> File:
        return exported_file(values)

    def export(self, state: PartState) -> Values:
        return self._parts[state.stage][1].export(state.inner)

    def restore(self, stage: str, spec: Spec, values: Values, exported: Values) -> StepState:
        part, family = self._parts[stage]
        own, inner = part.spec(spec, values), part.inner_values(values)
        return PartState(spec, stage, family.restore(self._inner(stage), own, inner, exported))

    def _inner(self, stage: str) -> str:
        return stage.removeprefix(self._parts[stage][0].prefix)

    def _clip(self, values: Values) -> Values:
        """Return the inputs of the stage that writes a file, by its own names."""
        assert self._file_stage is not None
        result, *sounds = self._file_stage.inputs
        require_picture(result, values[result])
        return {EXPORT.inputs[0]: values[result]} | ({SOUND: values[sounds[0]]} if sounds else {})


def _watching(states: Sequence[PartState], watch: Watch) -> Watch:
    """Pass `watch` the states of the workflow where a family passes its own."""
    outer = {id(state.inner): state for state in states}
    return lambda inner, draw: watch(outer[id(inner)], draw)


def parts_of(workflow: Workflow, infos: Sequence[ModelInfo]) -> list[WorkflowPart]:
    """Return the pipelines of a workflow with the infos of their models, in its order."""
    many = len(workflow.pipelines) > 1
    return [
        WorkflowPart(pipeline, info, f"{pipeline.name}." if many else "", index == 0)
        for index, (pipeline, info) in enumerate(zip(workflow.pipelines, infos, strict=True))
    ]


def describe_workflow(
    workflow: Workflow, name: str, parts: Sequence[WorkflowPart], functions: Sequence[LoadedFunction]
) -> ModelInfo:
    """Return what clients may ask of a workflow: what its first pipeline takes, of a size that all can draw.

    Raises:
        InvalidWorkflow: a stage reads a value that does not exist, or the pipelines have no size in common.
    """
    first = parts[0].info
    infos = [part.info for part in parts]
    clips = next((part.info for part in parts if part.makes_clips), first)
    given = tuple(one for one in first.pictures if one.name not in parts[0].pipeline.reads)
    known = workflow.written.union(REQUEST_FIELDS, (one.name for one in given))
    _check_reads(workflow, known)
    multiple = math.lcm(*(one.side_multiple for one in infos))
    most = min(one.max_side for one in infos)
    if most < multiple:
        raise InvalidWorkflow(f"{workflow.name}: its pipelines have no size in common; choose others")
    info = replace(
        first,
        name=name or workflow.name,
        family=f"workflow {workflow.name}",
        side_multiple=multiple,
        max_side=most // multiple * multiple,
        default_height=_legal(first.default_height, multiple, most),
        default_width=_legal(first.default_width, multiple, most),
        max_degree=min(one.max_degree for one in infos),
        parameters=sum(one.parameters for one in infos)
        + sum(one.numel() for each in functions for module in each.modules.values() for one in module.parameters()),
        pictures=given,
        default_frames=clips.default_frames,
        max_frames=clips.max_frames,
        frame_multiple=clips.frame_multiple,
        default_fps=clips.default_fps,
        stages=_stages(workflow, parts, functions, known),
        loras=(),
    )
    try:
        stages = info.graph.stages
    except BadGraph as error:
        raise InvalidWorkflow(f"{workflow.name}: {error}") from error
    return replace(info, stages=tuple(stage.spec for stage in stages))


def _check_reads(workflow: Workflow, known: frozenset[str]) -> None:
    """Raise InvalidWorkflow for an image of the request that the first pipeline does not take."""
    for function in workflow.functions:
        for one in function.reads:
            if one not in known and one not in function.optional:
                raise unknown_value(function.name, one, known)


def _stages(
    workflow: Workflow, parts: Sequence[WorkflowPart], functions: Sequence[LoadedFunction], known: frozenset[str]
) -> tuple[StageSpec, ...]:
    of_parts = {part.pipeline: part.stages for part in parts}
    of_functions = {one.function.name: one.function.spec(known, one.components) for one in functions}
    stages = [
        stage
        for node in workflow.nodes
        for stage in (of_parts[node] if isinstance(node, Pipeline) else (of_functions[node.name],))
    ]
    if not any(part.makes_clips for part in parts):
        return tuple(stages)
    read = {name for stage in stages for name in stage.inputs}
    results = [stage.outputs[0] for stage in stages if read.isdisjoint(stage.outputs)]
    sounds = [sound for part in parts if (sound := part.sound) is not None]
    return (*stages, replace(EXPORT, inputs=(*results, *sounds[-1:])))


def _legal(side: int, multiple: int, most: int) -> int:
    """Return a default side that all pipelines can draw."""
    return max(multiple, min(side, most) // multiple * multiple)
