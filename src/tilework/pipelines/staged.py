"""The common part of all families: a stock pipeline, split into stages and steps over its own components."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from tilework.core.cache import CacheKind, CacheUse
from tilework.core.comm import Comm
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import StageSpec
from tilework.core.model import ModelInfo
from tilework.core.packing import Layout, Pack, PredictChange, Reuse, Size
from tilework.core.preview import preview_shape
from tilework.core.wire.spec import File, Image, Spec
from tilework.pipelines.arguments import GENERATOR_DEVICE, generator_device, offered
from tilework.pipelines.caching.requests import reuse_of
from tilework.pipelines.caching.steps import COMPUTED_WHOLE, StepCache, StepCaches
from tilework.pipelines.components import ComponentGroups, decodes_in_tiles, modules_of, shares_decode
from tilework.pipelines.defaults import Defaults, resolve
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.families.latent_state import Conditioning, LatentState
from tilework.pipelines.family import ANY_SEED, Values, Watch
from tilework.pipelines.lora import LoadedLoras
from tilework.pipelines.numerics import check_pictures
from tilework.pipelines.packing import Packing
from tilework.pipelines.parallel import Parallel
from tilework.pipelines.sampler import check_sampler, generator_argument, memory_of, step_ranges, usual

Pieces = Mapping[str, Sequence[Tensor]]
"""Conditioning by name, of each image of a packed batch, in the order in which they were given."""

_DECODE = "decode"
_OF_BLOCKS = (CacheKind.PATCH, CacheKind.IMAGE)

Run = Callable[[Sequence[Spec], Sequence[Values], bool], list[Values]]
"""Runs a stage without steps, in slices or not, for one or several requests."""


def one_by_one(run: Callable[[Spec, Values], Values]) -> Run:
    """Return a runner of a stage that requests do not share, which knows no slices."""
    return lambda specs, values, _: [run(spec, one) for spec, one in zip(specs, values, strict=True)]


class StagedPipeline(ABC):
    """A family over the stock `pipeline`; see `family.Family` for the contract. `denoiser` is its largest component.

    The sides of a patch (`core.packing`) are multiples of `cell_multiple`. `arguments` are those of the stock call that
    requests may give, with their limits (see `arguments.offered`). A subclass adds a stage by its `stages`, and by a
    method in `_at_once`.

    Any sampler that the stock pipeline accepts is served. A stochastic one draws from the request's generator, after
    the initial latents. Stock SDXL does the same; stock SD3 and FLUX give their samplers no generator: there the image
    depends on what else the process drew, here on the seed alone.

    Raises:
        UnsupportedModel: the sampler does not fit the pipeline.
        InvalidDefaults: see `defaults.resolve`.
    """

    stages: ClassVar[tuple[StageSpec, ...]] = latent_diffusion("").specs

    def __init__(
        self,
        pipeline: Any,
        denoiser: Any,
        stock: Defaults,
        overrides: Mapping[str, Any],
        library: str,
        *,
        family: str,
        side_multiple: int,
        two_passes: bool,
        max_degree: int,
        cell_multiple: int,
        arguments: Mapping[str, float | None],
    ) -> None:
        self._pipeline = pipeline
        self._arguments = arguments
        check_pictures(pipeline)
        # diffusers' own property walks all modules on each read: 0.5 ms, and a worker reads it in each step.
        self._device: torch.device = denoiser.device
        self._denoiser = denoiser
        self._step_caches = StepCaches([denoiser])
        self._parallel = Parallel()
        self._loras = LoadedLoras(pipeline)
        self._packing = Packing(denoiser)
        self._cell_multiple = cell_multiple
        self._defaults = resolve(stock, overrides, side_multiple)
        self._info = ModelInfo(
            name=self._defaults.name,
            family=family,
            side_multiple=side_multiple,
            max_side=self._defaults.max_side,
            default_height=self._defaults.height,
            default_width=self._defaults.width,
            default_steps=self._defaults.steps,
            default_guidance_scale=float(self._defaults.guidance_scale),
            parameters=_num_parameters(pipeline),
            library=library,
            two_passes=two_passes,
            max_degree=max_degree,
            stages=self.stages,
            words=self._defaults.words,
        )
        self._at_once: dict[str, Run] = {
            "encode": one_by_one(self._run_encode),
            _DECODE: self._run_decode,
        }
        self._shares = {stage.name: stage.steps for stage in self.stages if stage.steps is not None}
        self.cache_forest: PredictChange | None = None  # The model's, if it has one.
        self._step_arguments = self._accepted_by(pipeline.scheduler)
        check_sampler(pipeline, self._info, self._sampler)

    @cached_property
    def info(self) -> ModelInfo:
        return replace(
            self._info,
            stages=tuple(
                replace(
                    one,
                    batchable=one.batchable and self._packing.is_possible,
                    sliceable=one.sliceable and not decodes_in_tiles(self._pipeline),
                    degrees=self._degrees(one),
                )
                for one in ComponentGroups.of(self._pipeline).named(self.stages, previews=self._defaults.previews)
            ),
            step_ranges=step_ranges(self._info, self._sampler),
            caches=(*(_OF_BLOCKS if self._packing.is_possible else ()), *self._step_caches.kinds),
            arguments=(
                generator_device(self._device.type),
                *offered(self._pipeline, self._arguments, self._scheduled_steps),
            ),
        )

    def _degrees(self, stage: StageSpec) -> tuple[int, ...] | None:
        shares = stage.name == _DECODE and self._info.max_degree > 1 and shares_decode(self._pipeline)
        return None if shares else stage.degrees

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
    def pass_context(self) -> object:
        """Object that a forward pass depends on now, besides its arguments (`cuda.graphs`)."""
        return self._packing.layout

    @property
    def leaves_out(self) -> bool:
        """True if the forward pass that runs now may leave out a part of its work."""
        layout = self._packing.layout
        return self._step_caches.is_running or (layout is not None and layout.leaves_out)

    @property
    def parallel(self) -> Parallel:
        return self._parallel

    def join(self, comm: Comm, spec: Spec) -> None:
        self._parallel.join(comm, self._is_guided(spec))

    @abstractmethod
    def encode(self, spec: Spec) -> Conditioning:
        """Return what the denoiser needs of the request's texts and size."""

    @abstractmethod
    def _set_timesteps(self, sampler: Any, spec: Spec) -> None: ...
    @abstractmethod
    def _draw_latents(self, spec: Spec, dtype: torch.dtype, sampler: Any, generator: torch.Generator) -> Tensor:
        """Draw the initial latents, of the conditioning's `dtype`, scaled for `sampler`."""

    @abstractmethod
    def _forward(self, state: LatentState, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Make one forward pass for this rank's rows; return the prediction for all rows."""

    @abstractmethod
    def _forward_packed(self, layout: Layout, patches: Tensor, times: Tensor, conditioning: Pieces) -> Tensor:
        """Make one forward pass for all images of `layout`; return their prediction (P, C, h, w).

        `times` has one number per image, of float32, in the order of the batch.
        """

    @abstractmethod
    def _estimate(self, state: LatentState, prediction: Tensor) -> Tensor:
        """Return the clean latents that the model predicts, by its prediction for the next iteration; float32."""

    @abstractmethod
    def _decode(self, latents: Tensor, sliced: bool = False, comm: Comm | None = None) -> Tensor:
        """Return the images as a tensor, before the stock pipeline's `image_processor`; `latents` have the same layout.

        (images, channels, rows, columns), of the type that `begin` draws. `sliced` and `comm` need a single one: see
        `slices.decode`.
        """

    @torch.no_grad()
    def run(self, stage: str, specs: Sequence[Spec], values: Sequence[Values], sliced: bool = False) -> list[Values]:
        return self._at_once[stage](specs, values, sliced)

    def _run_encode(self, spec: Spec, values: Values) -> Values:
        return {"conditioning": dict(self.encode(spec).tensors), ANY_SEED: True}

    def _run_decode(self, specs: Sequence[Spec], values: Sequence[Values], sliced: bool) -> list[Values]:
        latents = [self._unpack(one["latents"], spec) for spec, one in zip(specs, values, strict=True)]
        # Several images have one size. Slices save memory, which decoding several at a time would need again.
        batches = latents if sliced else [torch.cat(latents)]
        comm = self._parallel.comm
        pictures = [one for batch in batches for one in self._pictures_of(self._decode(batch, sliced, comm))]
        return [{"picture": torch.from_numpy(np.array(picture))} for picture in pictures]

    @torch.no_grad()
    def begin(self, stage: str, spec: Spec, values: Values) -> LatentState:
        conditioning = Conditioning(values["conditioning"])
        sampler = self._sampler(spec)
        generator = _generator(spec).manual_seed(spec.seed)
        num_iterations = len(sampler.timesteps)
        if num_iterations <= (spec.steps - 1) * sampler.order:
            name = type(sampler).__name__
            raise UnsupportedModel(f"{name} makes {num_iterations} iterations of {spec.steps} steps; ask for fewer")
        dtype = conditioning.tensors["encoder_hidden_states"].dtype
        latents = self._draw_latents(spec, dtype, sampler, generator)
        return self._caching(
            LatentState(
                spec=spec,
                stage=stage,
                num_steps=self._shares[stage].of(spec.steps),
                conditioning=conditioning,
                latents=latents,
                sampler=sampler,
                generator=generator,
            )
        )

    def _caching(self, state: LatentState) -> LatentState:
        """Give a state a cache that holds nothing yet, if its request asks for one."""
        if (cache := self._step_caches.of(state.spec)) is not None:
            state.reuse = cache
            return state
        given = reuse_of(state.spec, self._size(state), self._info.default_height, self._cell_multiple)
        if isinstance(given, Reuse):
            given.predict = self.cache_forest
        state.reuse = given and (self._no_cache(state.spec) or given)
        return state

    def _no_cache(self, spec: Spec) -> str:
        """Return why this family cannot cache a request that others could; empty if it can."""
        return "" if self._packing.is_possible else "the model has an adapter, with which nothing is packed"

    def finish(self, state: LatentState) -> Values:
        return {"latents": state.latents}

    def step(self, states: Sequence[LatentState], pack: Pack | None = None, watch: Watch | None = None) -> None:
        """Make one step of each state. It may take several iterations; states that need fewer wait for the others."""
        before = [state.steps_done for state in states]
        while behind := [state for state, done in zip(states, before, strict=True) if state.steps_done == done]:
            for state, prediction in zip(behind, self.predict(behind, pack), strict=True):
                if watch is not None and state.ends_step:
                    watch(state, partial(self.preview, state, prediction))
                state.is_torn = True
                self.advance(state, prediction)
                state.is_torn = False

    @torch.no_grad()
    def predict(self, states: Sequence[LatentState], pack: Pack | None = None) -> list[Tensor]:
        """Return the guided prediction for the next iteration of each state, in order. See `step`."""
        if pack is None or self._parallel.degree > 1 or not self._packing.is_possible:
            return [self._predict_whole(state) for state in states]
        batches: dict[Hashable, list[int]] = {}
        for index, state in enumerate(states):
            key = id(state) if isinstance(state.reuse, StepCache) else self._packing_key(state)
            batches.setdefault(key, []).append(index)
        predictions: dict[int, Tensor] = {}
        for batch in batches.values():
            members = [states[index] for index in batch]
            alone = len(members) == 1 and not isinstance(members[0].reuse, Reuse)
            predicted = [self._predict_one(members[0])] if alone else self._predict_packed(members, pack)
            predictions.update(zip(batch, predicted, strict=True))
        return [predictions[index] for index in range(len(states))]

    @torch.no_grad()
    def advance(self, state: LatentState, prediction: Tensor) -> None:
        """Make the iteration that `prediction` is for."""
        arguments = {name: state.spec.arguments.get(name, value) for name, value in self._step_arguments.items()}
        if "generator" in arguments:
            arguments["generator"] = state.generator
        step = state.sampler.step(prediction, state.timestep, state.latents, return_dict=False, **arguments)
        state.latents = step[0]
        state.iteration_index += 1

    @torch.no_grad()
    def preview(self, state: LatentState, prediction: Tensor) -> Image:
        """Return the clean image that the model predicts by `prediction`, the one for the state's next iteration."""
        whole, small = state.spec.shape, preview_shape(state.spec.shape)
        latents = self._unpack(self._estimate(state, prediction), state.spec)
        rows, columns = latents.shape[-2:]
        # The mean of latents decodes to about the mean of the pixels, at a fraction of the cost.
        size = (rows * small.height // whole.height, columns * small.width // whole.width)
        decoded = self._decode(interpolate(latents, size, mode="area").to(state.latents.dtype))
        (picture,) = self._pictures_of(decoded)
        return Image(height=picture.height, width=picture.width, pixels=picture.tobytes())

    def image(self, spec: Spec, values: Values) -> Image:
        (output,) = self.info.graph.stages[-1].spec.outputs
        picture: Tensor = values[output]
        rows, columns, _ = picture.shape
        return Image(height=rows, width=columns, pixels=picture.cpu().numpy().tobytes())

    def file(self, spec: Spec, values: Values) -> File:
        raise TypeError(f"{self.info.name} makes no clips, so no stage of it writes a file")

    def export(self, state: LatentState) -> Values:
        return {
            "latents": state.latents,
            "sampler": memory_of(state.sampler),
            "iteration_index": state.iteration_index,
            "generator": state.generator.get_state(),
        }

    def restore(self, stage: str, spec: Spec, values: Values, exported: Values) -> LatentState:
        sampler = copy.deepcopy(self._pipeline.scheduler)
        generator = _generator(spec)
        vars(sampler).update(exported["sampler"])
        generator.set_state(exported["generator"].cpu())
        return self._caching(
            LatentState(
                spec=spec,
                stage=stage,
                num_steps=self._shares[stage].of(spec.steps),
                conditioning=Conditioning(values["conditioning"]),
                latents=exported["latents"],
                sampler=sampler,
                generator=generator,
                iteration_index=exported["iteration_index"],
            )
        )

    def _unpack(self, latents: Tensor, spec: Spec) -> Tensor:
        """Return latents in the image's layout, (1, channels, rows, columns), if a family packs them otherwise."""
        return latents

    def _pictures_of(self, decoded: Tensor) -> list[Any]:
        """Convert a decoded tensor to images of PIL as the stock pipeline does."""
        pictures: list[Any] = self._pipeline.image_processor.postprocess(decoded, output_type="pil")
        return pictures

    def _is_guided(self, spec: Spec) -> bool:
        return self._info.two_passes and spec.guidance_scale > 1

    def _predict_whole(self, state: LatentState) -> Tensor:
        """Predict without a pack; what was kept of the state cannot be used after it."""
        if isinstance(state.reuse, Reuse):
            state.reuse = replace(state.reuse, use=state.reuse.use + CacheUse(off=COMPUTED_WHOLE))
        return self._predict_one(state)

    def _predict_one(self, state: LatentState) -> Tensor:
        guided = self._is_guided(state.spec)
        rows = self._parallel.rows
        latents = torch.cat([state.latents] * 2) if guided else state.latents
        conditioning = {name: rows(tensor) for name, tensor in state.conditioning.tensors.items()}
        prediction = self._forward(state, rows(latents), conditioning)
        if guided:
            negative, positive = prediction.chunk(2)
            prediction = self._guide(state, negative, positive)
        return prediction

    def _denoise(self, state: LatentState, context: str = "cond", /, **inputs: Any) -> Tensor:
        """Return the first output of the denoiser, through the cache of whole steps if the request has one.

        Calls of one `context` follow each other from step to step.
        """
        cache = state.reuse
        denoiser = self._denoiser
        if isinstance(cache, StepCache) and self._parallel.degree > 1:
            cache.forget(COMPUTED_WHOLE)
        elif isinstance(cache, StepCache):
            denoiser = partial(cache.call, denoiser, context, denoiser)
        prediction: Tensor = denoiser(return_dict=False, **inputs)[0]
        return prediction

    def _guide(self, state: LatentState, negative: Tensor, positive: Tensor) -> Tensor:
        return negative + state.spec.guidance_scale * (positive - negative)

    def _packing_key(self, state: LatentState) -> Hashable:
        """Return a key; states with equal keys can share a forward pass."""
        tensors = state.conditioning.tensors
        size = self._size(state)
        return (
            size if any(side % self._cell_multiple for side in size) else None,
            state.reuse.patch if isinstance(state.reuse, Reuse) else None,
            state.latents.dtype,
            *((name, tensors[name].shape[1:], tensors[name].dtype) for name in sorted(tensors)),
        )

    def _predict_packed(self, states: Sequence[LatentState], pack: Pack) -> list[Tensor]:
        passes = [2 if self._is_guided(state.spec) else 1 for state in states]
        rows = [state for state, count in zip(states, passes, strict=True) for _ in range(count)]
        inputs = [self._picture(state) for state in states]
        pictures = [picture for picture, count in zip(inputs, passes, strict=True) for _ in range(count)]
        reuses = tuple(state.reuse for state in rows if isinstance(state.reuse, Reuse))
        layout = pack(tuple(self._size(state) for state in rows), self._cell_multiple, self.device, reuses)
        times = torch.stack(layout.arrange([state.timestep.to(self.device).float() for state in rows]))
        conditioning = {name: _pieces(name, states, passes) for name in states[0].conditioning.tensors}
        with self._packing.running(layout):
            predicted = self._forward_packed(layout, layout.split(pictures), times, conditioning)
        halves = iter([self._prediction(picture) for picture in layout.assemble(predicted)])
        return [
            self._guide(state, next(halves), next(halves)) if count == 2 else next(halves)
            for state, count in zip(states, passes, strict=True)
        ]

    def _size(self, state: LatentState) -> Size:
        rows, columns = state.latents.shape[2:]
        return rows, columns

    def _picture(self, state: LatentState) -> Tensor:
        """Return the input of the denoiser in the image's layout (channels, rows, columns) of `_size`."""
        return state.latents[0]

    def _prediction(self, picture: Tensor) -> Tensor:
        """Invert `_picture`, for the output of the denoiser."""
        return picture[None]

    def _sampler(self, spec: Spec) -> Any:
        """Return a new sampler for a request, at its first step."""
        sampler = copy.deepcopy(self._pipeline.scheduler)
        self._set_timesteps(sampler, spec)
        return sampler

    def _scheduled_steps(self, name: str, values: tuple[float, ...]) -> int | None:
        """See `arguments.offered`."""
        spec = replace(usual(self._info), steps=len(values))
        try:
            asked, default = self._sampler(replace(spec, arguments={name: values})), self._sampler(spec)
        except Exception:  # Samplers may raise any error.
            return None
        if asked.order != 1 or asked.timesteps.equal(default.timesteps):
            return None
        return len(asked.timesteps)

    def _accepted_by(self, sampler: Any) -> Mapping[str, Any]:
        """Return extra arguments of `sampler.step`; the generator is set for each request."""
        return generator_argument(sampler)


def _generator(spec: Spec) -> torch.Generator:
    """Return a generator of the CPU unless the request asks for another: its numbers are the same on every device."""
    return torch.Generator(str(spec.arguments.get(GENERATOR_DEVICE, "cpu")))


def stack(layout: Layout, pieces: Pieces) -> dict[str, Tensor]:
    """Join each name's pieces along the first dimension, in the order of the batch."""
    return {name: torch.cat(layout.arrange(tensors)) for name, tensors in pieces.items()}


def _pieces(name: str, states: Sequence[LatentState], passes: Sequence[int]) -> list[Tensor]:
    return [
        piece
        for state, count in zip(states, passes, strict=True)
        for piece in state.conditioning.tensors[name].chunk(count)
    ]


def _num_parameters(pipeline: Any) -> int:
    return sum(parameter.numel() for module in modules_of(pipeline).values() for parameter in module.parameters())
