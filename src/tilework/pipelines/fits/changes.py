"""Changes that make a model fit into the memory of a device; the cheapest one that suffices is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilework.core.model import ModelSource
from tilework.pipelines.fits.plan import MemoryPlan, Planner

_FP8, _NF4 = (("", "fp8"),), (("", "nf4"),)
CHANGES: tuple[Mapping[str, Any], ...] = (
    # Nearly the same images.
    {"vae_tiling": True},
    {"dtype": "bfloat16"},
    # The same images, later: weights come for each stage.
    {"offload": "components"},
    # Other images.
    {"quantize": _FP8},
    {"quantize": _FP8, "offload": "components"},
    {"quantize": _NF4},
    {"quantize": _NF4, "offload": "components"},
    # The same images, much later: weights come for each layer of each step.
    {"offload": "layers", "quantize": ()},
)
"""Possible changes of a source, the cheapest first. Each is tried without and with tiles, in 16 bits."""
_OPTIONS = ("dtype", "quantize", "offload", "vae_tiling")


def cheapest_change(planner: Planner, plan: MemoryPlan) -> MemoryPlan | None:
    """Return the plan with the cheapest change that makes it fit; None if none does."""
    source = plan.source
    dtype = source.dtype if source.dtype == "float16" else "bfloat16"
    for change in CHANGES:
        if "quantize" in change and source.weights_files:  # The plan cannot know which other files there are.
            continue
        for more in ({}, {"vae_tiling": True}):
            settings = {**({} if change.keys() == {"vae_tiling"} else {"dtype": dtype}), **change, **more}
            changed = planner.plan(replace(source, **settings), plan.memory_bytes, plan.shape, plan.beside).fitted()
            if changed.fits:
                return changed
    return None


def options_of(source: ModelSource, usual: ModelSource) -> str:
    """Return the options of `tilework serve` that a source has beyond those of another."""
    words = {
        "dtype": f"--dtype {source.dtype}",
        "quantize": f"--quantize {','.join(f'{name}={one}' if name else one for name, one in source.quantize)}",
        "offload": f"--offload {source.offload}",
        "vae_tiling": "--vae-tiling",
    }
    return " ".join(words[name] for name in _OPTIONS if getattr(source, name) != getattr(usual, name))
