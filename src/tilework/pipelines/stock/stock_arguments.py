"""What a stock call takes: the names and defaults of its arguments, and those of a request's spec."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.modular_pipelines import ModularPipeline
from PIL import Image as Pillow

from tilework.core.model import PictureInput
from tilework.core.wire import Image, Spec
from tilework.pipelines.arguments import ARGUMENTS, GENERATOR_DEVICE
from tilework.pipelines.stock.modular import input_defaults

REQUIRED = inspect.Parameter.empty
GUIDANCE = "guidance_scale"
_PICTURES = {
    "image": 1,
    "mask_image": 1,
    "control_image": 1,
    "image_reference": 4,
    "reference_images": 4,
}
"""Arguments that are pictures, and how many of them are taken at most where a list is."""
_SEVERAL = frozenset({"Flux2Pipeline", "Flux2KleinPipeline", "QwenImageEditPlusPipeline", "OmniGenPipeline"})
_MASKS = frozenset({"mask_image"})


class StockArguments:
    """The arguments of a pipeline's call by name, with their defaults; REQUIRED for those that have none."""

    def __init__(self, pipeline: Any) -> None:
        self.is_modular = isinstance(pipeline, ModularPipeline)
        self.defaults: dict[str, Any] = dict(_modular(pipeline) if self.is_modular else _classic(pipeline))
        self._class_name = type(pipeline).__name__

    def __contains__(self, name: str) -> bool:
        return name in self.defaults

    def default(self, name: str, otherwise: Any = None) -> Any:
        """The default of an argument; `otherwise` if it has none, or None."""
        value = self.defaults.get(name)
        return otherwise if value is None or value is REQUIRED else value

    @property
    def takes_scale(self) -> bool:
        """Whether the guidance scale is a number that the call has a default for."""
        return isinstance(self.default(GUIDANCE), int | float)

    @property
    def names(self) -> list[str]:
        """The arguments of `pipelines.arguments.ARGUMENTS` that it has."""
        return [name for name in ARGUMENTS if name in self.defaults]

    def pictures(self) -> tuple[PictureInput, ...]:
        """The arguments that are pictures."""
        most = 4 if self._class_name in _SEVERAL else 1
        return tuple(
            PictureInput(
                name=name,
                required=self.defaults[name] is REQUIRED or self._needs(name),
                most=max(usual, most) if name == "image" else usual,
                is_mask=name in _MASKS,
            )
            for name, usual in _PICTURES.items()
            if name in self.defaults
        )

    def _needs(self, name: str) -> bool:
        """Stock calls give pictures the default None even where there is no way without: their names tell."""
        if self.is_modular:
            return False
        kinds = ("Img2Img", "Inpaint", "Edit", "ImageToVideo", "InstructPix2Pix", "Fill", "Control")
        return any(kind in self._class_name for kind in kinds)

    def of(self, spec: Spec, generator: torch.Generator) -> dict[str, Any]:
        """The arguments of the stock call for a request. An empty negative prompt is as none."""
        given: dict[str, Any] = {
            "prompt": spec.prompt,
            "negative_prompt": spec.negative_prompt or None,
            "height": spec.height,
            "width": spec.width,
            "num_frames": spec.frames,
            "num_inference_steps": spec.whole_steps or spec.steps,
            GUIDANCE: spec.guidance_scale if self.takes_scale else None,
            "output_type": "pil",
        }
        kept = {name: value for name, value in given.items() if name in self.defaults and value is not None}
        kept |= {name: value for name, value in spec.arguments.items() if name != GENERATOR_DEVICE}
        kept |= {name: self._pictures(pictures) for name, pictures in spec.pictures.items()}
        if "max_area" in self.defaults:  # Kontext would change the size to one of about this area.
            kept["max_area"] = spec.height * spec.width
        kept["generator"] = generator
        return kept

    def _pictures(self, pictures: tuple[Image, ...]) -> Any:
        opened = [Pillow.frombytes("RGB", (one.width, one.height), one.pixels) for one in pictures]
        return opened[0] if len(opened) == 1 else opened


def _classic(pipeline: Any) -> Mapping[str, Any]:
    parameters = inspect.signature(type(pipeline).__call__).parameters
    return {name: one.default for name, one in parameters.items() if name != "self"}


def _modular(pipeline: Any) -> Mapping[str, Any]:
    required = {one.name for one in pipeline.blocks.inputs if one.required}
    defaults = input_defaults(pipeline)
    return {name: REQUIRED if value is None and name in required else value for name, value in defaults.items()}
