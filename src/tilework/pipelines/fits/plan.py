"""The plan of a model's memory on a device: what lies where, the memory of a run, and the largest image that fits."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilework.core.model import ModelSource
from tilework.core.request import Shape
from tilework.pipelines.clips.decoders import decoder_of
from tilework.pipelines.clips.memory import TensorMeter, decode_bytes
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.fits.beside import SERVER, Beside
from tilework.pipelines.fits.parts import ModelPart, read_parts
from tilework.pipelines.fits.steps import STEPS, Latents, shorten, step_bytes
from tilework.pipelines.setup.quantize import schemes_of, shown

_log = logging.getLogger(__name__)
_STEP_PX = 64
_MOST_PX, _MOST_OF_CLIPS_PX = 4096, 2048
_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentPlan:
    """A component with the bytes of its weights, and the `scheme` by which they are quantised; empty if none is."""

    name: str
    kind: str
    num_bytes: int
    scheme: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Memory of a device while a stage runs: the weights of these components, and the run beside them.

    `run_bytes` is None if it is not planned: for encodes, which take little, and if nothing is known of it.
    """

    name: str
    components: tuple[str, ...]
    weights_bytes: int
    run_bytes: int | None

    @property
    def num_bytes(self) -> int:
        return self.weights_bytes + (self.run_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory that a model takes on a device with `memory_bytes` to draw this `shape`, and the memory `beside` it."""

    source: ModelSource
    memory_bytes: int
    shape: Shape
    components: tuple[ComponentPlan, ...]
    stages: tuple[StagePlan, ...]
    beside: Beside

    @property
    def needed_bytes(self) -> int:
        return self.beside.num_bytes + max(stage.num_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.memory_bytes

    def fitted(self) -> MemoryPlan:
        """Return the same plan with less `beside` the model, if it fits only that way."""
        return replace(self, beside=self.beside.lowered(max(0, self.needed_bytes - self.memory_bytes)))

    @property
    def num_planned(self) -> int:
        """Number of stages for which the memory of a run is known."""
        return sum(stage.run_bytes is not None for stage in self.stages)

    @property
    def weights_room_bytes(self) -> int:
        """Bytes left for weights beside a run of this shape: those of each stage fit into it, if the plan fits."""
        return self.memory_bytes - self.beside.num_bytes - self.largest_run_bytes

    @property
    def largest_run_bytes(self) -> int:
        """Largest bytes of a stage's run beside weights, as far as it is planned."""
        return max(stage.run_bytes or 0 for stage in self.stages)


@dataclass(slots=True, eq=False)
class Planner:
    """Plans for one model, whose configurations are read once."""

    parts: Sequence[ModelPart]
    _runs: dict[tuple[Any, ...], int | None] = field(default_factory=dict)
    _shortened: dict[str, nn.Module] = field(default_factory=dict)

    @staticmethod
    def of(path: str) -> Planner:
        """Return the planner of the model in a directory.

        Raises ModelNotFound or UnsupportedModel: it has no classic pipeline whose classes are known.
        """
        parts = read_parts(Path(path))
        if not any(part.is_denoiser for part in parts):
            raise UnsupportedModel(f"{path}: no component is a denoiser, so its memory cannot be planned")
        return Planner(parts)

    @property
    def default_shape(self) -> Shape:
        """Shape that its stock pipeline draws by default; 1024x1024 if that is not known."""
        denoiser = self._denoisers[0].module
        row = STEPS.get(type(denoiser).__name__)
        config: Any = denoiser.config
        return Shape(1024, 1024) if row is None else row.shape(config, self._scales[1])

    def plan(
        self, source: ModelSource, memory_bytes: int, shape: Shape | None = None, beside: Beside = SERVER
    ) -> MemoryPlan:
        """Plan the memory of a device for a model with these settings, and the memory `beside` it; loads nothing.

        Raises:
            ModelNotFound: as `ModelPart.num_bytes`.
            UnsupportedModel: `source.quantize` names a component that there is not, or the model takes no such size.
        """
        shape = shape or self.default_shape
        if (most := self._most_px) is not None and max(shape.height, shape.width) > most:
            raise UnsupportedModel(f"size {shape}: sides of this model are at most {most} px; give a smaller one")
        names = [part.name for part in self.parts]
        dtype = _dtype(source)
        schemes = schemes_of(source.quantize, [part.name for part in self._denoisers], names)
        sizes = {part.name: part.num_bytes(dtype, schemes.get(part.name)) for part in self.parts}
        components = tuple(
            ComponentPlan(
                name=part.name,
                kind=part.kind,
                num_bytes=sizes[part.name],
                scheme=shown(schemes.get(part.name, part.quantized_by)),
            )
            for part in self.parts
        )
        return MemoryPlan(
            source=source,
            memory_bytes=memory_bytes,
            shape=shape,
            components=components,
            stages=tuple(self._stages(source, sizes, shape)),
            beside=beside,
        )

    def largest(self, plan: MemoryPlan) -> Shape | None:
        """Return the largest square that fits in place of a plan's shape, with as many frames; None if none does.

        Found by bisection, since the memory of a run grows with its size.
        """
        frames = plan.shape.frames
        most = _MOST_PX if frames == 1 else _MOST_OF_CLIPS_PX
        low, high = 0, min(most, self._most_px or most) // _STEP_PX
        while low < high:
            middle = (low + high + 1) // 2
            shape = Shape(middle * _STEP_PX, middle * _STEP_PX, frames)
            larger = self.plan(plan.source, plan.memory_bytes, shape, plan.beside)
            # A stage that is planned for the plan's shape, but not for this one, is too large for the model itself.
            fits = larger.fits and larger.num_planned >= plan.num_planned
            low, high = (middle, high) if fits else (low, middle - 1)
        return Shape(low * _STEP_PX, low * _STEP_PX, frames) if low else None

    @property
    def _most_px(self) -> int | None:
        """Largest number of pixels along the longest side that all denoisers take; None: any number."""
        rows = [(STEPS.get(type(one.module).__name__), one.module.config) for one in self._denoisers]
        known = [most for row, config in rows if row is not None and (most := row.most(config)) is not None]
        return min(known) * self._scales[1] if known else None

    def _stages(self, source: ModelSource, sizes: Mapping[str, int], shape: Shape) -> Iterator[StagePlan]:
        decoders = [part.name for part in self.parts if part.decodes]
        denoisers = [part.name for part in self._denoisers]
        encoders = [part.name for part in self.parts if not part.decodes and not part.is_denoiser]
        for stage, names, run_bytes in (
            ("encode", encoders, None),
            ("diffuse", [*denoisers, *(decoders if source.previews else ())], self._step_bytes(source, shape)),
            ("decode", decoders, self._decode_bytes(source, shape)),
        ):
            there = [part.name for part in self.parts] if source.offload == "none" else names
            weights_bytes = sum(sizes[name] for name in there)
            if source.offload == "layers":  # The layer that runs, and the next one, which is copied meanwhile.
                dtype = _dtype(source)
                layers = [part.largest_layer_bytes(dtype) for part in self.parts if part.name in names]
                weights_bytes = 2 * max(layers, default=0)
            yield StagePlan(name=stage, components=tuple(names), weights_bytes=weights_bytes, run_bytes=run_bytes)

    def _step_bytes(self, source: ModelSource, shape: Shape) -> int | None:
        dtype = _dtype(source)
        temporal, pixels = self._scales
        latents = Latents(1 + (shape.frames - 1) // temporal, shape.height // pixels, shape.width // pixels, dtype)
        key = ("step", latents)
        if key not in self._runs:
            self._runs[key] = _if_known(lambda: self._of_denoisers(dtype, latents), "a step")
        return self._runs[key]

    def _decode_bytes(self, source: ModelSource, shape: Shape) -> int | None:
        dtype = _dtype(source)
        vae = self._autoencoder
        if vae is None:
            return None
        if dtype == torch.float16 and vae.config.get("force_upcast"):
            dtype = torch.float32
        key = ("decode", shape, dtype, source.vae_tiling)
        if key not in self._runs:
            nn.Module.to(vae, dtype)
            vae.use_tiling = source.vae_tiling
            self._runs[key] = _if_known(lambda: _decode_bytes(vae, shape, self._scales[1]), "a decode")
        return self._runs[key]

    def _of_denoisers(self, dtype: torch.dtype, latents: Latents) -> int | None:
        taken = [step_bytes(self._short(part, dtype), latents) for part in self._denoisers]
        return None if None in taken else max(one for one in taken if one is not None)

    def _short(self, part: ModelPart, dtype: torch.dtype) -> nn.Module:
        if part.name not in self._shortened:
            self._shortened[part.name] = copy.deepcopy(part.module)
            shorten(self._shortened[part.name])
        return nn.Module.to(self._shortened[part.name], dtype)

    @property
    def _denoisers(self) -> list[ModelPart]:
        return [part for part in self.parts if part.is_denoiser]

    @property
    def _autoencoder(self) -> Any:
        """Autoencoder of images or clips, beside which there may be one of sound; None if there is none."""
        found = {part.name: part.module for part in self.parts if part.decodes}
        return found.get("vae") or next(iter(found.values()), None)

    @property
    def _scales(self) -> tuple[int, int]:
        """Frames beyond the first for each latent beyond the first, and pixels of a side for each latent."""
        vae = self._autoencoder
        if vae is None:
            return 1, 1
        decoder = decoder_of(vae)
        return (1, _pixels_of(vae)) if decoder is None else decoder.scales(vae)


def _if_known(run: Callable[[], int | None], what: str) -> int | None:
    """Return the memory of a run; None if the model's own code does not run that way.

    Its pipeline may call it otherwise, or it cannot draw the size.
    """
    try:
        return run()
    except Exception as error:
        _log.info("%s is not planned: %s: %s", what, type(error).__name__, error)
        return None


def _decode_bytes(vae: Any, shape: Shape, pixels: int) -> int | None:
    """Return the memory of a decode beside the weights, with the pixels; None if its class is not known."""
    if decoder_of(vae) is not None:
        return decode_bytes(vae, shape.frames, shape.height, shape.width, tensors_alone=True)
    channels = vae.config.get("latent_channels") or vae.config.get("z_dim")
    if shape.frames > 1 or channels is None:
        return None
    frames = (1,) if "z_dim" in vae.config else ()  # Autoencoders of clips that draw images.
    sides = shape.height // pixels, shape.width // pixels
    latents = torch.empty((1, channels, *frames, *sides), dtype=vae.dtype, device=_META)
    with torch.no_grad(), TensorMeter(tensors_alone=True) as meter:
        picture = vae.decode(latents, return_dict=False)[0]
        del picture
    return int(meter.peak_bytes)


def _pixels_of(vae: Any) -> int:
    """Return the pixels of a side for each latent; 8, as usual, if the configuration does not say it."""
    ratio: int = getattr(vae, "spatial_compression_ratio", 0)
    blocks = vae.config.get("block_out_channels")
    return ratio or (8 if blocks is None else 2 ** (len(blocks) - 1))


def _dtype(source: ModelSource) -> torch.dtype:
    found: torch.dtype = getattr(torch, source.dtype)
    return found
