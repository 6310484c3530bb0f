"""What the zoo says of one model, and the pictures and clips that its calls take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A tiny model of one class of diffusers, and how its stock call is made."""

    name: str
    """Unique, such as "qwen-image-edit"; the id of its tests."""
    class_name: str
    """Of diffusers: "QwenImageEditPipeline", or the name of a modular pipeline's class."""
    kind: str
    """One of `record.KINDS`."""
    components: Callable[[], Mapping[str, Any]]
    """New components, and the other arguments of the pipeline's constructor; optional ones may be left out."""
    inputs: Mapping[str, Any]
    """The arguments of the stock call, but for the generator and the format of the output."""
    modular: bool = False
    loads: bool = True
    """Whether `save_pretrained` and `from_pretrained` give the same model; a comment at the entry says why not."""

    @property
    def output(self) -> str:
        """What the block of a modular pipeline calls its result."""
        return "videos" if self.kind.endswith("video") else "images"


def entry(
    name: str,
    class_name: str,
    kind: str,
    components: Callable[[], Mapping[str, Any]],
    inputs: Mapping[str, Any],
    **options: bool,
) -> ZooModel:
    """A model of a class whose name ends with "Pipeline", which is left out here."""
    class_name += "Pipeline"
    return ZooModel(name=name, class_name=class_name, kind=kind, components=components, inputs=inputs, **options)


PROMPT: dict[str, Any] = {"prompt": "a red fox"}
GUIDED: dict[str, Any] = {"prompt": "a red fox", "negative_prompt": "blurry"}
STEPS: dict[str, Any] = {"num_inference_steps": 4}
SQUARE: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 4}
"""A picture of 64 px and four steps."""
CLIP: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4}
"""A clip of 32 px and five frames, with four steps."""


def picture(side: int = 64, seed: int = 0) -> PIL.Image.Image:
    """A square picture of noise, the same for the same arguments."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def mask(side: int = 64) -> PIL.Image.Image:
    """A mask whose right half is white: the half to paint."""
    values = np.zeros((side, side), dtype=np.uint8)
    values[:, side // 2 :] = 255
    return PIL.Image.fromarray(values)


def clip(num_frames: int = 5, side: int = 32) -> list[PIL.Image.Image]:
    """Frames of noise, each another one."""
    return [picture(side, seed) for seed in range(num_frames)]
