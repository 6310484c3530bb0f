"""Loads the family of a workflow: those of its pipelines, and the user's stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tilework.core.graph.stage import DeviceKind
from tilework.core.model import ModelInfo, ModelSource
from tilework.pipelines.family import Family
from tilework.pipelines.workflow.definition import Pipeline
from tilework.pipelines.workflow.family import WorkflowFamily, describe_workflow, parts_of
from tilework.pipelines.workflow.functions import LoadedFunction
from tilework.pipelines.workflow.source import pipeline_path, read_workflow

LoadPipeline = Callable[[ModelSource], Family]
LoadComponent = Callable[[ModelSource, str], torch.nn.Module]


def load_workflow(
    source: ModelSource, place: Callable[[torch.nn.Module], object] | None, load: LoadPipeline
) -> WorkflowFamily:
    """Load the family of the workflow that a source names, on its device; `load` loads that of a pipeline.

    `place` may put the weights of the user's classes, as those of a pipeline, elsewhere before they go to the device.

    Raises:
        ModelError: the workflow, or a pipeline of it, cannot be served.
    """
    workflow = read_workflow(source.path, source.adapter)
    families = [load(_pipeline_source(source, one)) for one in workflow.pipelines]
    device = families[0].device
    functions = [LoadedFunction.of(one, device, place) for one in workflow.functions]
    parts = parts_of(workflow, [family.info for family in families])
    info = describe_workflow(workflow, source.name, parts, functions)
    return WorkflowFamily(info, device, list(zip(parts, families, strict=True)), functions)


def load_on_slot(source: ModelSource, info: ModelInfo) -> WorkflowFamily:
    """Load the family on a CPU slot, which has no pipeline. `info` is what an accelerator knows of the workflow.

    Raises:
        ModelError: the workflow cannot be read.
    """
    workflow = read_workflow(source.path, source.adapter)
    device = torch.device("cpu")
    here = [one for one in workflow.functions if one.settings.devices is DeviceKind.CPU]
    return WorkflowFamily(info, device, (), [LoadedFunction.of(one, device) for one in here])


def load_workflow_component(source: ModelSource, name: str, load_component: LoadComponent) -> torch.nn.Module:
    """Load a component of a workflow, on the CPU: of a pipeline, which `load_component` reads, or of a user's class.

    Raises:
        ModelError: it cannot be read.
    """
    workflow = read_workflow(source.path, source.adapter)
    for function in workflow.functions:
        if name == function.name or name.startswith(f"{function.name}."):
            return LoadedFunction.of(function, torch.device("cpu")).modules[name]
    first, *others = workflow.pipelines
    if not others:
        return load_component(_pipeline_source(source, first), name)
    prefix, _, inner = name.partition(".")
    (pipeline,) = (one for one in workflow.pipelines if one.name == prefix)
    return load_component(_pipeline_source(source, pipeline), inner)


def _pipeline_source(source: ModelSource, pipeline: Pipeline) -> ModelSource:
    path = pipeline_path(source.path, pipeline.path)
    return replace(source, path=path, name="", adapter=pipeline.adapter, loras=())
