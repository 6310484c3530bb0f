"""Arguments of a stock call: their names and defaults, and their values for a request's spec."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from diffusers.modular_pipelines import ModularPipeline
from PIL import Image as Pillow

from tilework.core.model import PictureInput
from tilework.core.wire.spec import Spec
from tilework.pipelines.arguments import ARGUMENTS, GENERATOR_DEVICE
from tilework.pipelines.stock.modular import input_defaults

REQUIRED = inspect.Parameter.empty
GUIDANCE = "guidance_scale"
FRAMES = ("num_frames", "frames", "video_length")
"""Names for the number of frames of a clip; a call has one of them at most."""
FRAME_RATES = ("frame_rate", "fps")
"""Names for the frames per second, in calls that pass them to the model."""
_PICTURES = (
    PictureInput(name="image"),
    PictureInput(name="mask_image", is_mask=True),
    PictureInput(name="control_image"),
    PictureInput(name="control_mask", is_mask=True),
    PictureInput(name="image_reference"),
    PictureInput(name="reference_images", most=4),
    PictureInput(name="video", is_clip=True),
    PictureInput(name="control_video", is_clip=True),
    PictureInput(name="conditioning_frames", is_clip=True),
)
"""Arguments that are images, and the largest number of them where a list is taken."""
_SEVERAL = {
    **dict.fromkeys(("Flux2Pipeline", "Flux2KleinPipeline", "QwenImageEditPlusPipeline", "OmniGenPipeline"), "image"),
    "Flux2KleinInpaintPipeline": "image_reference",
}
"""Arguments that may be a list of images, by class. In other classes a list has one for each image to make."""


class StockArguments:
    """The arguments of a pipeline's call by name, with their defaults; REQUIRED for those that have none."""

    def __init__(self, pipeline: Any) -> None:
        self.is_modular = isinstance(pipeline, ModularPipeline)
        self.defaults: dict[str, Any] = dict(_modular(pipeline) if self.is_modular else _classic(pipeline))
        self._class_name = type(pipeline).__name__
        self._tensors = frozenset() if self.is_modular else _tensors(pipeline)

    def __contains__(self, name: str) -> bool:
        return name in self.defaults

    def default(self, name: str, otherwise: Any = None) -> Any:
        """Return the default of an argument; `otherwise` if it has none, or None."""
        value = self.defaults.get(name)
        return otherwise if value is None or value is REQUIRED else value

    @property
    def takes_scale(self) -> bool:
        """True if the guidance scale is a number that the call has a default for."""
        return isinstance(self.default(GUIDANCE), int | float)

    @property
    def names(self) -> list[str]:
        """Arguments of `pipelines.arguments.ARGUMENTS` that it has."""
        return [name for name in ARGUMENTS if name in self.defaults]

    @property
    def frames(self) -> str | None:
        """Name in FRAMES that it has, if any."""
        return next((name for name in FRAMES if name in self.defaults), None)

    @property
    def frame_rate(self) -> str | None:
        """Name in FRAME_RATES that it has, if any."""
        return next((name for name in FRAME_RATES if name in self.defaults), None)

    def pictures(self, most_frames: int = 1) -> tuple[PictureInput, ...]:
        """Return the arguments that are images; a clip has `most_frames` at most.

        Arguments without a default are required, and those that the class needs according to its name.
        """
        return tuple(
            replace(one, required=self._needs(one), most=self._most(one, most_frames))
            for one in _PICTURES
            if one.name in self.defaults and not (one.is_clip and one.name in self._tensors)
        )

    def _most(self, one: PictureInput, most_frames: int) -> int:
        if one.is_clip:
            return most_frames
        return 4 if one.name == _SEVERAL.get(self._class_name) else one.most

    def _needs(self, one: PictureInput) -> bool:
        """Return whether an image is required. The class name tells: even required ones have the default None."""
        if self.defaults[one.name] is REQUIRED:
            return True
        if self.is_modular or one.name in ("image_reference", "reference_images"):
            return False
        kinds = ("Img2Img", "Inpaint", "Edit", "ImageToVideo", "VideoToVideo", "InstructPix2Pix", "Fill", "Control")
        return any(kind in self._class_name for kind in kinds)

    def of_area(self, pixels: int) -> dict[str, int]:
        """Return the argument that keeps the given size: Kontext would change it to one of about its own area."""
        return {"max_area": pixels} if "max_area" in self.defaults else {}

    def of(self, spec: Spec, generator: torch.Generator) -> dict[str, Any]:
        """Return the arguments of the stock call for a request."""
        given: dict[str, Any] = {
            "prompt": spec.prompt,
            "negative_prompt": spec.negative_prompt,
            "height": spec.height,
            "width": spec.width,
            self.frames or "": spec.frames,
            "num_inference_steps": spec.whole_steps or spec.steps,
            GUIDANCE: spec.guidance_scale if self.takes_scale else None,
            self.frame_rate or "": None if spec.video is None else _whole(spec.video.fps),
            "output_type": "pil",
        }
        kept = {name: value for name, value in given.items() if name in self.defaults and value is not None}
        kept |= {name: value for name, value in spec.arguments.items() if name != GENERATOR_DEVICE}
        clips = {one.name for one in _PICTURES if one.is_clip}
        for name, pictures in spec.pictures.items():
            opened = [Pillow.frombytes("RGB", (one.width, one.height), one.pixels) for one in pictures]
            kept[name] = opened if name in clips or len(opened) > 1 else opened[0]
        kept |= self.of_area(spec.height * spec.width)
        kept["generator"] = generator
        return kept


def _whole(rate: float) -> int | float:
    """Return an integral rate as an integer: some calls require that."""
    return int(rate) if rate.is_integer() else rate


def _classic(pipeline: Any) -> Mapping[str, Any]:
    parameters = inspect.signature(type(pipeline).__call__).parameters
    return {name: one.default for name, one in parameters.items() if name != "self"}


def _tensors(pipeline: Any) -> frozenset[str]:
    """Return the arguments that are a tensor and no list, according to their annotations."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    annotations = {name: str(one.annotation) for name, one in parameters.items()}
    return frozenset(name for name, text in annotations.items() if "Tensor" in text and "list" not in text)


def _modular(pipeline: Any) -> Mapping[str, Any]:
    required = {one.name for one in pipeline.blocks.inputs if one.required}
    defaults = input_defaults(pipeline)
    return {name: REQUIRED if value is None and name in required else value for name, value in defaults.items()}
