"""Previews of a stock call's image, from the middle of its loop.

A second stock call makes them: it runs through its loop as if each step ended with the latents that the model predicts
now, and decodes them. So whatever a pipeline does after its loop is done to the preview, too, and no model is called
but the decoder.

Rejected: a decoder of previews for each class, which would have to know how it packs its latents. Allegro draws none:
its decoder makes nothing of latents that are fewer than its tiles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from tilework.core.request import Shape
from tilework.pipelines.previews.estimate import clean
from tilework.pipelines.previews.shrink import shrunk
from tilework.pipelines.stock.component_calls import ComponentCall
from tilework.pipelines.stock.walk import Walk

_DECODE = "decode"
_DECODES_WHOLE = frozenset({"AutoencoderKLAllegro"})
"""Decoders that make nothing of latents that are fewer than their tiles."""


def can_glance(pipeline: Any) -> bool:
    """Return whether latents of this pipeline can be decoded in small."""
    return all(type(one).__name__ not in _DECODES_WHOLE for one in pipeline.components.values())


class Glance:
    """An `Onlooker` of one iteration. `show` gets the answers that `Walk.skim` takes."""

    def __init__(self, show: Callable[[Mapping[str, list[Any]], list[Any]], None]) -> None:
        self._show = show
        self._clean: list[Tensor] = []

    def before_step(self, call: ComponentCall) -> None:
        kind: Any = type(call.owner)
        given = _step_signature(kind).bind(call.owner, *call.args, **call.kwargs).arguments
        token_times = given.get("per_token_timesteps")
        self._clean.append(clean(call.owner, given["model_output"], given["timestep"], given["sample"], token_times))

    def before_end(self, denoisers: Mapping[str, list[Any]], samplers: list[Any]) -> None:
        answers = [_with(answer, latents) for answer, latents in zip(samplers, self._clean, strict=True)]
        self._show(denoisers, answers)


class SmallDecoder:
    """Answers the calls after the loop of a walk of a `whole` size: the first decoder gets fewer latents."""

    def __init__(self, walk: Walk, whole: Shape, small: Shape) -> None:
        self._walk = walk
        self._whole = whole
        self._small = small
        self._decoder: Any = None

    def answer(self, call: ComponentCall) -> Any:
        with self._walk.call.randomness():
            if call.method != _DECODE or self._decoder not in (None, call.owner) or not call.args:
                return call.run()
            self._decoder = call.owner  # Later decoders are for sound.
            latents, *others = call.args
            return call.stock(shrunk(latents, self._whole, self._small), *others, **call.kwargs)


def _with(answer: Any, latents: Tensor) -> Any:
    """Return the recorded answer of a sampler with these latents in place of its own."""
    if isinstance(answer, Tensor):
        return latents.to(answer.dtype) if answer.shape == latents.shape else answer
    if isinstance(answer, dict):
        return {name: _with(one, latents) for name, one in answer.items()}
    if isinstance(answer, list | tuple):
        return type(answer)(_with(one, latents) for one in answer)
    return answer


@cache
def _step_signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.step)
