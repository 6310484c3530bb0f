"""Operations that a modular pipeline does in its blocks, and a classic one in its methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers.modular_pipelines import ModularPipeline, PipelineState

GUIDER = "guider"
"""Name of the component that has the guidance scale."""
_FRAMES = 49  # Of a clip, if neither blocks nor pipeline say it.
_LATENTS = torch.zeros(1, 16, 4)
_TRIED = {"height": 64, "width": 64, "num_frames": 1, "batch_size": 1, "num_images_per_prompt": 1}


def hide_progress(pipeline: Any) -> None:
    """Switch progress bars off. The method of a modular pipeline reaches the blocks of its first level only."""
    for one in (pipeline, *_blocks(pipeline)):
        if hasattr(one, "set_progress_bar_config"):
            one.set_progress_bar_config(disable=True)


def steps_left(pipeline: Any, steps: int, strength: float) -> int:
    """Return how many steps a pipeline with its own sampler makes of `steps`, found by running the deciding blocks.

    Raises:
        Exception: what a block raises, or ValueError if there is none, or they disagree.
    """
    found: set[int] = set()
    for block, inputs in _leaves(pipeline):
        if not {"strength", "num_inference_steps"} <= inputs.keys():
            continue
        tried = {"latents": _LATENTS, "num_inference_steps": steps, "strength": strength}
        if inputs.get("timesteps") is not None and inputs["timesteps"].required:
            tried["timesteps"] = pipeline.scheduler.timesteps
        found.add(len(_run(block, pipeline, tried).get("timesteps")) // pipeline.scheduler.order)
    (only,) = found
    return only


def takes_odd_sides(pipeline: Any, multiple: int) -> bool:
    """Return whether sides of an odd number of multiples are kept, found by running the blocks for the first latents.

    Some blocks round such sides silently. Returns True if no block can be run, as of a classic pipeline.
    """
    for block, inputs in _leaves(pipeline):
        makes_latents = any(one.name == "latents" for one in block.intermediate_outputs)
        if not makes_latents or not {"height", "width"} <= inputs.keys():
            continue
        try:
            even = _num_latents(block, pipeline, 4 * multiple)
        except Exception:  # It needs the results of other blocks.
            continue
        try:
            odd = _num_latents(block, pipeline, 5 * multiple)
        except Exception:
            return False
        if odd * 4**2 != even * 5**2:
            return False
    return True


def _num_latents(block: Any, pipeline: Any, side: int) -> int:
    tried = {"height": side, "width": side, "dtype": torch.float32, "generator": torch.Generator().manual_seed(0)}
    return int(_run(block, pipeline, tried).get("latents").numel())


def _run(block: Any, pipeline: Any, tried: Mapping[str, Any]) -> PipelineState:
    """Run a block on these inputs; the others are usual ones, or have their defaults. May raise any error."""
    state = PipelineState()
    for one in block.inputs:
        state.set(one.name, {**_TRIED, **tried}.get(one.name, one.default))
    block(pipeline, state)
    return state


def input_defaults(pipeline: Any) -> dict[str, Any]:
    """Return the defaults of all inputs by name; None where there is none.

    If blocks differ, the first one with a default counts. Sizes and frames that all of them leave open are those of the
    pipeline, which has them as `default_height` and so on. LTX-2's call requires a number of frames.
    """
    found: dict[str, Any] = {one.name: one.default for one in pipeline.blocks.inputs if one.name is not None}
    for one in (one for block in _blocks(pipeline) for one in block.inputs):
        if one.name in found and found[one.name] is None:
            found[one.name] = one.default
    own = {name: getattr(pipeline, f"default_{name}", None) for name in found}
    own["num_frames"] = own.get("num_frames") or _FRAMES
    return {name: own[name] if value is None else value for name, value in found.items()}


def _leaves(pipeline: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the blocks that have no sub-blocks, with their inputs by name."""
    for block in _blocks(pipeline):
        if not getattr(block, "sub_blocks", {}):
            yield block, {one.name: one for one in block.inputs}


def _blocks(pipeline: Any) -> Iterator[Any]:
    """Yield all blocks in the order in which they run, each before its sub-blocks; none for a classic pipeline."""
    if isinstance(pipeline, ModularPipeline):
        yield from _with_parts(pipeline._blocks)  # `blocks` is a copy.


def _with_parts(block: Any) -> Iterator[Any]:
    yield block
    for part in getattr(block, "sub_blocks", {}).values():
        yield from _with_parts(part)


def names_blocks(pipeline: Any) -> bool:
    """Return whether its guider names blocks to the denoiser that differ in some passes, which no group can share."""
    return bool(getattr(getattr(pipeline, GUIDER, None), "spatio_temporal_guidance_blocks", None))
