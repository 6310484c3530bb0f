"""What a modular pipeline does in its blocks that a classic one does in methods of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.modular_pipelines import ModularPipeline, PipelineState

GUIDER = "guider"
"""The component that has the guidance scale."""
_TRIED = {"height": 64, "width": 64, "batch_size": 1, "num_images_per_prompt": 1, "latents": torch.zeros(1, 16, 4)}


def hide_progress(pipeline: Any) -> None:
    """Switch progress bars off. The method of a modular pipeline reaches the blocks of its first level only."""
    for one in (pipeline, *_blocks(pipeline)):
        if hasattr(one, "set_progress_bar_config"):
            one.set_progress_bar_config(disable=True)


def steps_left(pipeline: Any, steps: int, strength: float) -> int:
    """How many steps a pipeline with a sampler of its own makes of `steps`, found by running its blocks that decide it.

    Raises:
        Exception: what a block raises, or ValueError if there is none, or they disagree.
    """
    found: set[int] = set()
    for block in _blocks(pipeline):
        inputs = {one.name: one for one in block.inputs}
        if block.sub_blocks or not {"strength", "num_inference_steps"} <= inputs.keys():
            continue
        tried = {**_TRIED, "num_inference_steps": steps, "strength": strength}
        if inputs.get("timesteps") is not None and inputs["timesteps"].required:
            tried["timesteps"] = pipeline.scheduler.timesteps
        state = PipelineState()
        for name, one in inputs.items():
            state.set(name, tried.get(name, one.default))
        block(pipeline, state)
        found.add(len(state.get("timesteps")) // pipeline.scheduler.order)
    (only,) = found
    return only


def _blocks(pipeline: Any) -> Iterator[Any]:
    waiting = [pipeline._blocks] if isinstance(pipeline, ModularPipeline) else []  # `blocks` is a copy.
    while waiting:
        block = waiting.pop()
        yield block
        waiting.extend(getattr(block, "sub_blocks", {}).values())
