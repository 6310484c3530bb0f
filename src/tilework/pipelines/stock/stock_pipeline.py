"""The family of any pipeline of diffusers, classic or modular: its own stock call, in stages and steps.

A request computes exactly what the model's class computes, by construction: there is no other code. The stages are cut
where that code first calls the denoiser, and where it calls something else after its loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from diffusers.modular_pipelines import PipelineState
from torch import Tensor
from transformers import PreTrainedModel

from tilework.core.cache import CacheUse
from tilework.core.comm import Comm
from tilework.core.graph.stage import StageSpec
from tilework.core.model import ModelInfo
from tilework.core.packing import Pack
from tilework.core.preview import preview_shape
from tilework.core.wire.spec import File, Image, Spec
from tilework.pipelines import slices
from tilework.pipelines.arguments import GENERATOR_DEVICE
from tilework.pipelines.bands import bands
from tilework.pipelines.caching.steps import COMPUTED_WHOLE, StepCache, StepCaches
from tilework.pipelines.clips.undecoded import Undecoded, pixels_of, take_undecoded, undecoded
from tilework.pipelines.components import denoisers_of, modules_of
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.family import ANY_SEED, LIVE, Values, Watch
from tilework.pipelines.lora import LoadedLoras
from tilework.pipelines.numerics import check_pictures
from tilework.pipelines.parallel import Parallel
from tilework.pipelines.previews.shrink import preview_of
from tilework.pipelines.sequence import share
from tilework.pipelines.stock.component_calls import ComponentCall, watch_components
from tilework.pipelines.stock.coroutine import StockCall
from tilework.pipelines.stock.glance import Glance, SmallDecoder
from tilework.pipelines.stock.guidance_halves import GuidanceHalves
from tilework.pipelines.stock.model_info import check_pipeline, describe, num_heads
from tilework.pipelines.stock.modular import GUIDER, hide_progress, names_blocks
from tilework.pipelines.stock.shared_calls import (
    can_share,
    fills_caches,
    finish_together,
    iterate_together,
    perturbs_attention,
)
from tilework.pipelines.stock.sound import sound_of, sound_rate
from tilework.pipelines.stock.stock_arguments import GUIDANCE, StockArguments
from tilework.pipelines.stock.walk import Mark, Walk
from tilework.pipelines.video.export import EXPORT, exported, exported_file, sound_values

ENCODED = "encoded"
DECODE = "decode"


@dataclass(slots=True, kw_only=True, eq=False)
class StockState:
    """A `StepState`: a walk between two iterations of the stock loop.

    A step is `order` iterations; the last one may be fewer. `cache` is what its steps keep, if it asks for that.
    """

    spec: Spec
    stage: str
    num_steps: int
    order: int
    walk: Walk
    cache: StepCache | None = None

    @property
    def steps_done(self) -> int:
        """See `StepState`."""
        if not self.walk.is_in_loop:
            return self.num_steps
        return min(self.walk.num_iterations // self.order, self.num_steps - 1)

    @property
    def ends_step(self) -> bool:
        """True if a step is done when the present iteration is counted."""
        return not self.walk.is_in_loop or (self.walk.num_iterations + 1) % self.order == 0

    @property
    def is_torn(self) -> bool:
        """See `StepState`."""
        return self.walk.is_torn

    def take_cache_use(self) -> CacheUse | None:
        """See `StepState`."""
        if self.cache is None:
            return None
        use, self.cache.use = self.cache.use, CacheUse()
        return use

    def use_cache(self, degree: int) -> None:
        """Give the next calls of its denoisers its cache. In a group they are computed whole."""
        if self.cache is not None and degree > 1:
            self.cache.forget(COMPUTED_WHOLE)
        self.walk.call.slot.cache = self.cache if degree == 1 else None


class StockPipeline:
    """A `Family` over a stock pipeline. See `family.Family` for the contract.

    Between its stages a request goes on where it paused, if it is still there; else it is replayed (`walk`).
    """

    def __init__(self, pipeline: Any, name: str, overrides: Mapping[str, Any], library: str) -> None:
        hide_progress(pipeline)
        self._pipeline = pipeline
        self._arguments = StockArguments(pipeline)
        self._parallel = Parallel()
        self._loras = LoadedLoras(pipeline)
        self._denoisers = denoisers_of(pipeline)
        check_pipeline(pipeline, self._arguments)
        # All of them, or none: a group that can share one of two would have to split in the middle of a request.
        shared = [share(denoiser, self._parallel) for denoiser in self._denoisers.values()]
        can_split = all(shared) and not perturbs_attention(pipeline) and not names_blocks(pipeline)
        max_degree = min(map(num_heads, self._denoisers.values())) if can_split else 1
        self._can_share = can_share(pipeline, self._denoisers.values())
        self._step_caches = StepCaches([] if fills_caches(pipeline) else self._denoisers.values())
        watch_components(pipeline)
        check_pictures(pipeline)
        take_undecoded(pipeline)
        self._info = replace(
            describe(pipeline, self._arguments, name, overrides, library, max_degree, self._can_share),
            caches=self._step_caches.kinds,
        )
        self._graph = self._info.graph
        self._sound_rate = sound_rate(pipeline)
        self._device: torch.device = pipeline.device
        self._text_encoders = {name for name, part in pipeline.components.items() if isinstance(part, PreTrainedModel)}

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        return modules_of(self._pipeline)

    @property
    def loras(self) -> LoadedLoras:
        return self._loras

    @property
    def leaves_out(self) -> bool:
        """True if the forward pass that runs now may leave out a part of its work."""
        return self._step_caches.is_running

    @property
    def parallel(self) -> Parallel:
        return self._parallel

    def join(self, comm: Comm, spec: Spec) -> None:
        self._parallel.join(comm, guided=False)

    @torch.no_grad()
    def run(self, stage: str, specs: Sequence[Spec], values: Sequence[Values], sliced: bool = False) -> list[Values]:
        if stage == EXPORT.name:
            return [exported(spec, one) for spec, one in zip(specs, values, strict=True)]
        before, after = self._graph.stages[0].name, self._graph.stages[2].name
        assert stage in (before, after)
        if stage == before:
            return [self._encode(spec) for spec in specs]
        if len(specs) > 1 and not sliced:
            walks = [self._decoding(spec, of_spec) for spec, of_spec in zip(specs, values, strict=True)]
            return [self._decoded(result) for result in finish_together(walks, self._answer)]
        return [self._decode(spec, one, sliced) for spec, one in zip(specs, values, strict=True)]

    def _decode(self, spec: Spec, values: Values, sliced: bool) -> Values:
        """Return the outputs of a request. Frames become pixels as they are decoded, if the stock call allows it.

        It does not allow it if it changes them before it makes images of them. Then it is replayed, and gets all
        frames.
        """
        walk = self._decoding(spec, values)
        clips: list[Undecoded] = []
        try:
            return self._decoded(walk.finish(partial(self._answer, walk, sliced=sliced, clips=clips)))
        except Exception:
            if not any(clip.is_open for clip in clips):
                raise
        walk = self._decoding(spec, {name: value for name, value in values.items() if name != LIVE})
        return self._decoded(walk.finish(partial(self._answer, walk, sliced=sliced)))

    def _decoded(self, result: Any) -> Values:
        """Return the outputs of the decode, given the result of the stock call."""
        sound = sound_values(sound_of(result, self._sound_rate)) if self._sound_rate else {}
        return {self._written(2): pictures_of(result), **sound}

    def _encode(self, spec: Spec) -> Values:
        walk = self._begin(spec)
        walk.encode()
        return {self._written(0): {ENCODED: walk.encoded}, LIVE: walk, ANY_SEED: not walk.has_drawn_to_encode}

    @torch.no_grad()
    def begin(self, stage: str, spec: Spec, values: Values) -> StockState:
        walk = values.get(LIVE)
        if not isinstance(walk, Walk) or walk.is_torn or walk.num_iterations:
            walk = self._begin(spec)
            walk.encode_again(values[self._written(0)][ENCODED])
        return self._state(stage, spec, walk)

    @torch.no_grad()
    def step(self, states: Sequence[StockState], pack: Pack | None = None, watch: Watch | None = None) -> None:
        before = [state.steps_done for state in states]
        while behind := [state for state, done in zip(states, before, strict=True) if state.steps_done == done]:
            glances = [self._glance(state, watch) for state in behind]
            for state in behind:
                state.use_cache(self._parallel.degree)
            if pack is not None and self._can_share and self.parallel.degree == 1:
                iterate_together([state.walk for state in behind], glances)
            else:
                for state, glance in zip(behind, glances, strict=True):
                    self._iterate(state.walk, glance)
        for state, done in zip(states, before, strict=True):
            if state.steps_done != done + 1:
                raise UnsupportedModel(
                    f"the pipeline makes {state.walk.num_iterations} iterations of {state.num_steps} steps"
                )

    def _glance(self, state: StockState, watch: Watch | None) -> Glance | None:
        """Return a glance at the next iteration, if the request wants previews; it shows one if a step ends there."""
        if watch is None or not state.spec.preview_every:
            return None

        def show(denoisers: Mapping[str, list[Any]], samplers: list[Any]) -> None:
            if state.ends_step:
                watch(state, partial(self._preview, state, denoisers, samplers))

        return Glance(show)

    @torch.no_grad()
    def _preview(self, state: StockState, denoisers: Mapping[str, list[Any]], samplers: list[Any]) -> Image:
        """Return the image that the stock call makes of these answers. See `glance`."""
        spec = state.spec
        small = preview_shape(spec.shape)
        walk = self._begin(spec)
        walk.encode_again(state.walk.encoded)
        walk.skim(denoisers, samplers)
        result = walk.finish(SmallDecoder(walk, spec.shape, small).answer)
        return preview_of(pictures_of(result).numpy(), small)

    def _iterate(self, walk: Walk, glance: Glance | None) -> None:
        if self._parallel.degree % 2 or (walk.pending is not None and walk.pending.keeps_state):
            walk.iterate(self._ask, onlooker=glance)
            return
        halves = GuidanceHalves(self._parallel, walk.expected)
        try:
            walk.iterate(halves.answer, halves, glance)
        except BaseException:
            walk.is_torn |= halves.is_open
            raise

    def finish(self, state: StockState) -> Values:
        # Texts that the loop was given have no more effect; a given image may be put into the last latents.
        mark = {**self.export(state), ENCODED: state.walk.encoded_hollow(self._text_encoders)}
        return {self._written(1): mark, LIVE: state.walk}

    def export(self, state: StockState) -> Values:
        mark = state.walk.mark()
        return {one.name: getattr(mark, one.name) for one in fields(Mark)}

    @torch.no_grad()
    def restore(self, stage: str, spec: Spec, values: Values, exported: Values) -> StockState:
        mark = Mark(**exported)
        walk = values.get(LIVE)
        if not isinstance(walk, Walk) or walk.is_torn or walk.num_iterations > mark.num_iterations:
            walk = self._begin(spec)
            walk.encode_again(values[self._written(0)][ENCODED])
        with self._parallel.suspended():  # Other members may go on where they are.
            walk.replay(mark, ComponentCall.run)
        return self._state(stage, spec, walk)

    def _ask(self, call: ComponentCall) -> Any:
        """Answer a call. No group can share one that keeps a cache: each of its devices has the whole."""
        with self._parallel.suspended() if call.keeps_state else nullcontext():
            return call.run()

    def _decoding(self, spec: Spec, values: Values) -> Walk:
        """Return a walk of a request that has left its loop."""
        latents = dict(values[self._written(1)])
        walk = values.get(LIVE)
        encoded = latents.pop(ENCODED)
        mark = Mark(**latents)
        if not isinstance(walk, Walk) or walk.is_torn or walk.num_iterations > mark.num_iterations:
            walk = self._begin(spec)
            walk.encode_again(encoded)
        walk.replay(mark)
        return walk

    def _answer(
        self, walk: Walk, call: ComponentCall, sliced: bool = False, clips: list[Undecoded] | None = None
    ) -> Any:
        """Answer a call after the loop. With `clips` the answer may be a clip that is not decoded yet."""
        if sliced and call.method == DECODE:
            return (slices.decode(getattr(self._pipeline, call.component), call.args[0], sliced),)
        if clips is not None and call.method == DECODE:
            clip = undecoded(call.owner, self._parallel.comm, call.args, call.kwargs)
            if clip is not None:
                clips.append(clip)
                return clip.answer
        with walk.call.randomness():  # A decoder may draw noise.
            if call.method != DECODE or not call.args:
                return call.run()
            return bands.decode(call.owner, self._parallel.comm, call.stock, *call.args, **call.kwargs)

    def image(self, spec: Spec, values: Values) -> Image:
        picture: Tensor = values[self._written(2)]
        frames, rows, columns, _ = picture.shape
        return Image(height=rows, width=columns, pixels=picture.cpu().numpy().tobytes(), frames=frames)

    def file(self, spec: Spec, values: Values) -> File:
        return exported_file(values)

    def _begin(self, spec: Spec) -> Walk:
        generator = torch.Generator(str(spec.arguments.get(GENERATOR_DEVICE, "cpu"))).manual_seed(spec.seed)
        call = StockCall(self._pipeline, self._arguments.of(spec, generator))
        guider: Any = call.own.get(GUIDER)  # Guiders of a second denoiser or of sound keep their scale.
        if self._arguments.is_modular and hasattr(guider, GUIDANCE):
            guider.guidance_scale = spec.guidance_scale
        return Walk(call=call, generator=generator)

    def _state(self, stage: str, spec: Spec, walk: Walk) -> StockState:
        share = self._graph.stage(stage).spec.steps
        assert share is not None
        order = max((getattr(part, "order", 1) for part in walk.call.own.values()), default=1)
        return StockState(
            spec=spec,
            stage=stage,
            num_steps=share.of(spec.steps),
            order=order,
            walk=walk,
            cache=self._step_caches.of(spec),
        )

    def _written(self, index: int) -> str:
        """Return the name of a stage's first output, before any sound."""
        return self._spec(index).outputs[0]

    def _spec(self, index: int) -> StageSpec:
        return self._graph.stages[index].spec


def pictures_of(result: Any) -> Tensor:
    """Return (frames, rows, columns, 3), 8 bits, of a stock call's result: an image, or a clip."""
    if isinstance(result, PipelineState):
        result = [value for name in ("images", "videos") if (value := result.get(name)) is not None]
    result = result[0]
    while isinstance(result[0], list):
        (result,) = result
    if isinstance(result[0], Tensor):
        clip: Tensor = result[0]
        return clip
    return pixels_of(result)
