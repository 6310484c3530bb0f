"""Two ways to have pictures depend less on their neighbours in half precision, tried here and not served.

*Float32 around*: the denoiser alone computes in half precision; sampler and guidance in float32. *Fixed rows*: a
request is always computed in a pass of the same number of rows, with copies of itself if it has no neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from suite.exactness.runs import Run, alone, begin, ended, is_done, levels, relative_error, shared
from tilework.core.wire import Spec
from tilework.patches.layout import pack
from tilework.pipelines.family import Family, StepState

FLOAT32_AROUND, FIXED_ROWS = "float32 around", "fixed rows"
_ROWS = 4
_PAIRS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One request, alone and beside three others: of its size with fixed rows, of other sizes else.

    `apart` is how many levels of 255 these two pictures differ, `distances` are the errors of their latents against
    float32, and `cost` is the time alone over the time alone as served.
    """

    way: str
    apart: int
    distances: tuple[float, float]
    cost: float


def trials(model: Family, spec: Spec, reference: Tensor) -> Iterator[Trial]:
    """`reference` are the latents of the stock pipeline in float32."""
    alike = [replace(spec, seed=spec.seed + 100 + index) for index in range(_ROWS - 1)]
    mixed = [replace(other, height=spec.width + 16, width=spec.height) for other in alike]

    def trial(way: str, cost: float, lonely: Run, crowded: Run) -> Trial:
        distances = (relative_error(lonely.latents, reference), relative_error(crowded.latents, reference))
        return Trial(way=way, apart=levels(lonely, crowded), distances=distances, cost=cost)

    served = partial(alone, model, spec)
    yield trial("as served", 1.0, served(), shared(model, [spec, *mixed])[0])
    for way, run, lonely, crowded in (
        (FLOAT32_AROUND, _float32_around, [spec], [spec, *mixed]),
        (FIXED_ROWS, _fixed, [spec] * _ROWS, [spec, *alike]),
    ):
        cost = _ratio(served, partial(run, model, lonely))
        yield trial(way, cost, run(model, lonely)[0], run(model, crowded)[0])


def _fixed(model: Family, specs: Sequence[Spec]) -> list[Run]:
    states = [begin(model, spec) for spec in specs]
    _iterate(model, states)
    return [ended(model, state) for state in states]


def _float32_around(model: Any, specs: Sequence[Spec]) -> list[Run]:
    """Together, with latents of float32; the denoiser gets and makes tensors of its own type."""
    pipeline = model._pipeline
    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
    half: torch.dtype = denoiser.dtype

    def narrow(_module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (args[0].to(half), *args[1:]), options
        return args, {**options, "hidden_states": options["hidden_states"].to(half)}

    def widen(_module: Any, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.float() for tensor in output)

    states = [begin(model, spec) for spec in specs]
    for state in states:
        state.latents = state.latents.float()
    with ExitStack() as hooks:
        hooks.callback(denoiser.register_forward_pre_hook(narrow, with_kwargs=True).remove)
        hooks.callback(denoiser.register_forward_hook(widen).remove)
        _iterate(model, states)
    for state in states:
        state.latents = state.latents.to(half)
    return [ended(model, state) for state in states]


def _iterate(model: Family, states: Sequence[StepState]) -> None:
    """To the end; all states have the same number of iterations."""
    while not is_done(states[0]):
        for state, prediction in zip(states, model.predict(states, pack), strict=True):
            model.advance(state, prediction)


def _ratio(served: Callable[[], object], other: Callable[[], object]) -> float:
    """The median time of `other` over that of `served`, by turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_PAIRS):
        for call, taken in zip((served, other), times, strict=True):
            start_s = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start_s)
    return median(times[1]) / median(times[0])
