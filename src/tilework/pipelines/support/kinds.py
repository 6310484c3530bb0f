"""Input and output of a class of pipelines, judged by its name, the arguments of its call and its result."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from diffusers import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import BaseOutput

from tilework.pipelines.components import TIMES

_FROM_ANOTHER = frozenset({"image_embeds", "image_embeddings", "latents"})
_PIXELS = frozenset({"image", "images", "frames", "video", "videos"})
SOUND = "makes sound"


def is_sound(name: str) -> bool:
    """Return whether the name of a class says that it makes sound alone."""
    return "Audio" in name or "Music" in name


class PipelineClass:
    """Properties that a classic pipeline's class shows without an instance."""

    def __init__(self, kind: Any) -> None:
        self._class = kind
        self.name = kind.__name__
        parameters = inspect.signature(kind.__call__).parameters.values()
        named = [one for one in parameters if one.kind is not one.VAR_KEYWORD and one.name != "self"]
        self.arguments: Mapping[str, bool] = {one.name: one.default is one.empty for one in named}
        """Arguments of its call in order, and whether each is required."""
        self.returns = frozenset(_returned(sys.modules[kind.__module__]))

    def apart(self) -> str:
        """Return why it does not make images or clips from texts and images; empty if it does."""
        takes = self.arguments
        makes_pixels = bool(self.returns & _PIXELS)
        if ".deprecated." in self._class.__module__:
            return "deprecated by diffusers"
        if "height" not in takes and (is_sound(self.name) or any(one.startswith("audio_") for one in takes)):
            return SOUND
        if self._says("ShapE"):
            return "makes three-dimensional objects"
        if needed := sorted(name for name in _FROM_ANOTHER if takes.get(name)):
            return f"a part: needs {needed[0]} of another pipeline"
        if self._says("Prior") or ("latents" in takes and not {"prompt", "num_inference_steps"} & takes.keys()):
            return "a part: makes what another pipeline takes, or works on its latents"
        if self.returns and not makes_pixels:
            return f"makes no images, but {', '.join(sorted(self.returns))}"
        if not any("prompt" in name or name in ("image", "video") for name in takes):
            return "takes neither a text nor an image"
        return ""

    def kind(self) -> str:
        """Return one of `record.KINDS`."""
        takes = self.arguments
        if self._says("Control", "Adapter", "Transfer", "WanAnimate") or takes.keys() & {"control_image", "hint"}:
            return "control"
        if self._says("Edit", "Kontext", "Pix2Pix", "I2I", "VisualCloze", "Layered") and not takes.get("video"):
            return "inpaint" if self._says("Inpaint") else "edit"
        if "frames" in self.returns or takes.keys() & {"num_frames", "video_length", "video"}:
            return self._kind_of_clip()
        if self._says("Inpaint", "Fill") or "mask_image" in takes:
            return "inpaint"
        if "strength" in takes or self._says("Img2Img", "Upscale", "SuperResolution", "Refiner", "ImageVariation"):
            return "image to image"
        return "text to image"

    def obstacle(self) -> str:
        """Return why it cannot be served step by step, as far as the class shows; empty if it may be served."""
        if self._says("Combined"):
            return "calls two other pipelines, one after the other"
        for name in ("generator", "num_inference_steps"):
            if name not in self.arguments:
                return f"takes no {name}"
        types = [one for several in self._class._get_signature_types().values() for one in several]
        known: list[Any] = [one for one in types if isinstance(one, type)]
        models = [one for one in known if issubclass(one, ModelMixin) and not hasattr(one, "decode")]
        if models and not any(TIMES & inspect.signature(one.forward).parameters.keys() for one in models):
            return "has no denoiser that is a component"
        if not any(issubclass(one, SchedulerMixin) or "Scheduler" in one.__name__ for one in known):
            return "has no sampler that is a component"
        return ""

    def _kind_of_clip(self) -> str:
        takes = self.arguments
        first = next((name for name in takes if name in ("prompt", "image", "video")), "")
        if self._says("VideoToVideo") or takes.get("video") or first == "video":
            return "video to video"
        if first == "image" or self._says("ImageToVideo", "Image2Video", "I2V") or "mask_video" in takes:
            return "image to video"
        return "text to video"

    def _says(self, *words: str) -> bool:
        return any(word in self.name for word in words)


def _returned(module: Any) -> set[str]:
    """Return the fields of all outputs of pipelines that a module knows."""
    outputs = [
        one
        for name, one in vars(module).items()
        if name.endswith("Output") and isinstance(one, type) and issubclass(one, BaseOutput) and is_dataclass(one)
    ]
    return {one.name for output in outputs for one in fields(output)}
