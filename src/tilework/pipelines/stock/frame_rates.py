"""Frame rates of the clips of stock pipelines."""

from __future__ import annotations

import re
from typing import Any

from tilework.pipelines.stock.stock_arguments import StockArguments

_IN_EXAMPLE = re.compile(r"export_to_video\([^)]*fps=(\d+)")
_BY_CLASS = {"MochiPipeline": 30.0, "I2VGenXLPipeline": 16.0}
_OTHERWISE = 8.0  # AnimateDiff, Latte and other early models; the old default of diffusers' `export_to_video`.


def frame_rate(pipeline: Any, arguments: StockArguments) -> float:
    """Return the call's default; else the rate at which the example in its documentation exports a clip.

    Wan 2.2 with five billion weights shares its class with versions of 16 frames per second.
    """
    name = arguments.frame_rate
    stated = None if name is None else arguments.default(name)
    if isinstance(stated, int | float):
        return float(stated)
    if getattr(pipeline, "config", {}).get("expand_timesteps"):
        return 24.0
    found = _IN_EXAMPLE.search(type(pipeline).__call__.__doc__ or "")
    return float(found[1]) if found else _BY_CLASS.get(type(pipeline).__name__, _OTHERWISE)
