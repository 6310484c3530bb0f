"""The sound that a stock pipeline makes with its clip."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines import PipelineState

from tilework.pipelines.numerics import require_finite
from tilework.pipelines.stock.component_calls import config_of
from tilework.pipelines.video.export import Sound

_RATE = "output_sampling_rate"


def sound_rate(pipeline: Any) -> int:
    """Return the samples per second of the sound, as the vocoder says; 0 if the pipeline makes none.

    diffusers' examples for these classes read it there, too.
    """
    rate = config_of(getattr(pipeline, "vocoder", None)).get(_RATE)
    return rate if isinstance(rate, int) else 0


def sound_of(result: Any, rate: int) -> Sound:
    """Return the sound in the result of the stock call. Raises NotFinite."""
    audio = result.get("audio") if isinstance(result, PipelineState) else result.audio
    require_finite(audio[0], "sound")
    return Sound(audio[0].float().cpu(), rate)
