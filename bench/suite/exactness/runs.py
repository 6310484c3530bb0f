"""Requests of the sweep, and the ways to run one: by the stock pipeline, alone, moved, in shared passes, in a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from suite.exactness.models import TEXT_LENGTH, TRANSFORMERS, U_NETS
from tilework.core.comm import Comm
from tilework.core.wire import Image, Spec
from tilework.patches.layout import pack
from tilework.pipelines.family import Family, StepState

PROMPTS = ("a red circle on a blue background", "a green square", "a small yellow star on black", "blue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a request ended with: latents of float32, pixels (height, width, 3) of bytes.

    `predictions` are errors of single predictions, each against what the same model predicts alone for the same state;
    where it was asked for.
    """

    latents: Tensor
    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    predictions: tuple[float, ...] = ()


def relative_error(result: Tensor, reference: Tensor) -> float:
    """The largest difference over the largest value."""
    result, reference = result.float(), reference.float()
    return float((result - reference).abs().max() / reference.abs().max())


def levels(result: Run, reference: Run) -> int:
    """The largest difference of two pictures, of 255."""
    return int(np.abs(result.pixels.astype(np.int16) - reference.pixels.astype(np.int16)).max())


def by_stock(pipeline: Any, family: str, spec: Spec, others: int = 0) -> Run:
    """The stock pipeline's own call; with `others`, that many more rows with prompts and seeds of their own."""
    kept: list[Tensor] = []

    def keep(_pipeline: Any, _index: int, _time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept[:] = [tensors["latents"]]
        return {}

    prompts = [spec.prompt, *(PROMPTS[index % len(PROMPTS)] for index in range(others))]
    seeds = [spec.seed, *(spec.seed + 1000 + index for index in range(others))]
    text: dict[str, Any] = {}
    if family not in U_NETS:
        text["max_sequence_length"] = TEXT_LENGTH if family in TRANSFORMERS else 0
    if spec.negative_prompt:  # Families differ in what an empty one is.
        text["negative_prompt"] = [spec.negative_prompt] * len(prompts)
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline(
        prompts,
        height=spec.height,
        width=spec.width,
        num_inference_steps=spec.steps,
        guidance_scale=spec.guidance_scale,
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
        callback_on_step_end=keep,
        **text,
    ).images
    return Run(latents=kept[0][:1].float(), pixels=np.asarray(pictures[0]))


def alone(model: Family, spec: Spec) -> Run:
    state = begin(model, spec)
    while not is_done(state):
        model.advance(state, model.predict([state])[0])
    return ended(model, state)


def moved(here: Family, there: Family, spec: Spec) -> Run:
    """From one instance to the other after each iteration, as between workers."""
    state = begin(here, spec)
    while not is_done(state):
        here.advance(state, here.predict([state])[0])
        conditioning = there.restore_conditioning(here.export_conditioning(state.conditioning))
        state = there.restore(here.export(state), state.spec, conditioning)
        here, there = there, here
    return ended(here, state)


def shared(model: Family, specs: Sequence[Spec]) -> list[Run]:
    """All together: each iteration is one forward pass for those that are not done."""
    states = [begin(model, spec) for spec in specs]
    errors: list[list[float]] = [[] for _ in specs]
    while running := [index for index, state in enumerate(states) if not is_done(state)]:
        members = [states[index] for index in running]
        for index, prediction in zip(running, model.predict(members, pack), strict=True):
            errors[index].append(relative_error(prediction, model.predict([states[index]])[0]))
            model.advance(states[index], prediction)
    return [ended(model, state, errors[index]) for index, state in enumerate(states)]


def in_group(model: Family, comm: Comm, spec: Spec) -> Run:
    """As a member of a group; all members get the same predictions."""
    state, errors = begin(model, spec), list[float]()
    is_guided = model.info.two_passes and spec.guidance_scale > 1
    while not is_done(state):
        model.parallel.join(comm, is_guided)
        try:
            prediction = model.predict([state])[0]
        finally:
            model.parallel.leave()
        errors.append(relative_error(prediction, model.predict([state])[0]))
        model.advance(state, prediction)
    return ended(model, state, errors)


def begin(model: Family, spec: Spec) -> StepState:
    return model.begin(spec, model.encode(spec))


def ended(model: Family, state: StepState, errors: Sequence[float] = ()) -> Run:
    return Run(latents=state.latents.float(), pixels=_pixels(model.decode(state)), predictions=tuple(errors))


def is_done(state: StepState) -> bool:
    return state.steps_done >= state.spec.steps


def _pixels(image: Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(image.pixels, dtype=np.uint8).reshape(image.height, image.width, 3)
