"""Sizes and numbers of frames that a stock pipeline makes, and its defaults.

They are tried (`probe`), as far as a call shows before it computes anything; else they are read from configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from diffusers import AutoencoderKLCogVideoX
from PIL import Image as Pillow

from tilework.core.model import PictureInput, StepRange
from tilework.pipelines.components import denoisers_of
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.stock.component_calls import config_of
from tilework.pipelines.stock.modular import takes_odd_sides
from tilework.pipelines.stock.probe import Probe
from tilework.pipelines.stock.stock_arguments import StockArguments

_SIDE = 1024
_CLIP = 49  # Frames of a clip if a given clip decides it, or if it is not known.
_SQUARED = 8  # The factor of Kandinsky.
_STEPS = "num_inference_steps"
_EDITED = "video"
_FEW = 17  # Frames of a clip to try.
_MOST = 4  # Times the default number of frames.
_SPATIAL = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_spatial_scale_factor")
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
_NEEDED_NUMBERS = ("control_mode",)  # Kind of control image for a control network.
_POSITIONS = "temporal_max_seq_length"  # Of a motion module, whose positions are learnt.


@dataclass(slots=True, eq=False)
class Limits:
    """The limits and defaults of a pipeline, whose components are watched (`component_calls`).

    Sides are in pixels. A clip has `frames` by default, an image has one. See `ModelInfo` for the others.

    Raises:
        UnsupportedModel: the call needs what no request can give, or does not say how many frames it makes.
    """

    pipeline: Any
    arguments: StockArguments
    needed: dict[str, int] = field(init=False)
    height: int = field(init=False)
    width: int = field(init=False)
    frames: int = field(init=False)
    side_multiple: int = field(init=False)
    max_side: int = field(init=False)
    frame_multiple: int = field(init=False)
    max_frames: int = field(init=False)
    frames_of: str = field(init=False)
    _pictures: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.frame_multiple = _configured_frame_multiple(self.pipeline)
        self.side_multiple = _configured_multiple(self.pipeline)
        self.height = self.width = _configured_side(self.pipeline)
        self.needed = {}
        self._pictures = {one.name for one in self.arguments.pictures() if one.required}
        self._read_defaults(self._plain())
        self._try_sides()
        self.frames_of = self._deciding_clip()
        self._try_frames()

    def step_ranges(self) -> tuple[StepRange, ...]:
        """Return the numbers of steps that the call takes, as far as it says so at once: all, or its default."""
        default = self.arguments.default(_STEPS)
        if default is None or self._probe({_STEPS: default}).refusal is not None:
            return ((1, None),)
        takes_others = all(self._probe({_STEPS: steps}).refusal is None for steps in (default + 1, 2 * default))
        return ((1, None),) if takes_others else ((default, default),)

    def pictures(self) -> tuple[PictureInput, ...]:
        """Return the arguments that are images; those that the call cannot do without are required."""
        given = self.arguments.pictures(self.max_frames)
        # Several control networks get an image each.
        networks = len(getattr(getattr(self.pipeline, "controlnet", None), "nets", ()))
        control = "control_image" if "control_image" in self.arguments else "image"
        return tuple(
            replace(
                one,
                required=one.name in self._pictures,
                most=networks if networks and one.name == control else one.most,
            )
            for one in given
        )

    def _plain(self) -> Probe:
        """Probe a request with no more than it needs, which is found by adding to it."""
        refused = self._probe({})
        optional = [one.name for one in self.arguments.pictures() if one.name not in self._pictures]
        numbers = [name for name in _NEEDED_NUMBERS if name in self.arguments]
        known = self._pictures
        for name in (*optional, *numbers) if refused.refusal is not None else ():
            self._pictures = known | ({name} & set(optional))
            self.needed = dict.fromkeys({name} & set(numbers), 0)
            plain = self._probe({})
            if plain.refusal is None:
                return plain
        self.needed = {}
        self._pictures = known
        if isinstance(refused.refusal, TypeError) and "required positional" in str(refused.refusal):
            raise UnsupportedModel(f"a request cannot give what its call needs: {refused.refusal}")
        return refused

    def _read_defaults(self, plain: Probe) -> None:
        """Read the size and the number of frames that the call uses if they are left out."""
        for side in ("height", "width"):
            read = plain.values.get(side)
            stated = self.arguments.default(side, getattr(self.pipeline, f"default_{side}", None))
            value = read if isinstance(read, int) and read > 0 else stated
            setattr(self, side, value or getattr(self, side))
        name = self.arguments.frames
        if name is None:
            clips = [one for one in self.arguments.pictures() if one.is_clip]
            self.frames = (_configured_frames(self.pipeline) or _CLIP) if clips else 1
            return
        read = plain.values.get(name)
        if not isinstance(read, int) or name in plain.given:
            read = self.arguments.default(name, getattr(self.pipeline, "default_num_frames", None))
        if self.arguments.is_modular and not isinstance(read, int):
            read = _CLIP  # Some block decides it.
        if not isinstance(read, int):
            raise UnsupportedModel(f"{type(self.pipeline).__name__} does not say how many frames it makes by default")
        self.frames = read

    def _try_sides(self) -> None:
        """Find the least multiple of which the call takes an odd number; if it takes none but its default, use that."""
        for multiple in [self.side_multiple << doubled for doubled in range(5)]:
            sides = {name: self._odd(getattr(self, name), multiple) for name in ("height", "width")}
            if self._keeps(sides):
                self.side_multiple = multiple
                break
        else:
            default = {"height": self.height, "width": self.width}
            if self.height == self.width and self._keeps(default):
                self.side_multiple = self.max_side = self.height
                return
        self.max_side = 2 * max(self.height, self.width)

    @staticmethod
    def _odd(side: int, multiple: int) -> int:
        return max(side // multiple - 1, 2) // 2 * 2 * multiple + multiple

    def _deciding_clip(self) -> str:
        name = self.arguments.frames
        for one in self.arguments.pictures():
            if not one.is_clip:
                continue
            if name is None or (one.name == _EDITED and one.name in self._pictures):
                return one.name
            if self._probe({name: _FEW}).refusal is None and self._probe({name: 2 * _FEW - 1}).refusal is not None:
                return one.name
        return ""

    def _try_frames(self) -> None:
        """Allow a few times the default number of frames if the call takes them; else the default."""
        if self.frames == 1:
            self.frame_multiple = self.max_frames = 1
            return
        if (self.frames - 1) % self.frame_multiple:
            if self.frames_of and self.arguments.frames is None:
                self.frames -= (self.frames - 1) % self.frame_multiple
            else:  # The last latents are cut to this number.
                self.frame_multiple = 1
        if self._has_fixed_frames():
            self.frame_multiple = self.frames - 1
            self.max_frames = self.frames
            return
        positions = [config_of(part).get(_POSITIONS) for part in denoisers_of(self.pipeline).values()]
        longest = min([one for one in positions if isinstance(one, int)], default=_MOST * self.frames)
        self.frames = min(self.frames, longest)
        self.max_frames = min(longest, self.frames * _MOST)
        name = self.arguments.frames
        if name is not None and not self.frames_of:
            most = self.max_frames - (self.max_frames - 1) % self.frame_multiple
            self.max_frames = most if self._keeps({name: most}) else self.frames
            if self.max_frames == self.frames and not self._keeps({name: 1}):
                self.frame_multiple = self.frames - 1

    def _has_fixed_frames(self) -> bool:
        """Return whether only the default number of frames fits into the model: its positions, or its tiles."""
        learnt = [config_of(part).get("video_length") for part in denoisers_of(self.pipeline).values()]
        tile = getattr(getattr(self.pipeline, "vae", None), "kernel", None)
        return any(isinstance(one, int) for one in learnt) or isinstance(tile, tuple)

    def _keeps(self, given: Mapping[str, int]) -> bool:
        probe = self._probe(given)
        # A pipeline that draws at another size and scales to the requested one keeps that under another name.
        values = {name: probe.values.get(f"orig_{name}", probe.values.get(name)) for name in given}
        return probe.refusal is None and all(values[name] in (value, None) for name, value in given.items())

    def _probe(self, given: Mapping[str, int]) -> Probe:
        wanted = {name: value for name, value in given.items() if name in self.arguments}
        size = (given.get("width", self.width), given.get("height", self.height))
        picture = Pillow.new("RGB", size, "gray")
        clips = {one.name for one in self.arguments.pictures() if one.is_clip} & self._pictures
        pictures = {name: [picture] * _FEW if name in clips else picture for name in self._pictures}
        frames = self.arguments.frames
        plain: dict[str, Any] = {"prompt": "a"} if "prompt" in self.arguments else {}
        if clips and frames is not None and self.arguments.default(frames) is not None:
            plain[frames] = _FEW
        area = self.arguments.of_area(size[0] * size[1])
        generator = torch.Generator().manual_seed(0)
        return Probe(self.pipeline, {**plain, **pictures, **self.needed, **area, **wanted, "generator": generator})


def _configured_side(pipeline: Any) -> int:
    """Return the default side: the pipeline's, in latents, or that of its denoiser's configuration."""
    sizes = [getattr(pipeline, "default_sample_size", None)]
    sizes += [config_of(part).get("sample_size") for part in denoisers_of(pipeline).values()]
    size = next((size for size in sizes if isinstance(size, int) and size > 1), None)
    return _SIDE if size is None else size * _first(pipeline, _SPATIAL, 8)


def _configured_frames(pipeline: Any) -> int | None:
    found = (config_of(part).get("sample_frames") for part in denoisers_of(pipeline).values())
    return next((frames for frames in found if isinstance(frames, int)), None)


def _configured_frame_multiple(pipeline: Any) -> int:
    """Return the frames per latent. CogVideoX's decoder only makes them from an odd number of latents."""
    multiple = _first(pipeline, _TEMPORAL, 1)
    vae = getattr(pipeline, "vae", None)
    return multiple * vae.num_latent_frames_batch_size if isinstance(vae, AutoencoderKLCogVideoX) else multiple


def _configured_multiple(pipeline: Any) -> int:
    """Return the pixels per token: those of a latent, times the latents that become one token.

    Adapters cut images into blocks, and Kandinsky rounds up to the square of its factor.
    """
    latent = _first(pipeline, _SPATIAL, 8)
    patches = [_patch(config_of(part)) for part in denoisers_of(pipeline).values()]
    packs = 2 if hasattr(pipeline, "_pack_latents") and latent < 32 else 1
    blocks = getattr(getattr(pipeline, "adapter", None), "downscale_factor", 1)
    rounded = _SQUARED**2 if hasattr(pipeline, "movq") else 1
    multiple = math.lcm(latent * max([packs, *patches]), blocks, rounded)
    return multiple if takes_odd_sides(pipeline, multiple) else 2 * multiple


def _patch(config: Any) -> int:
    size = config.get("patch_size", config.get("all_patch_size", 1))
    while isinstance(size, list | tuple):
        size = size[-1]
    return size if isinstance(size, int) else 1


def _first(pipeline: Any, names: tuple[str, ...], otherwise: int) -> int:
    return next((value for name in names if isinstance(value := getattr(pipeline, name, None), int)), otherwise)
