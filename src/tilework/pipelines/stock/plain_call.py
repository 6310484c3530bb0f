"""The image of a request by the plain call of its stock pipeline: none of Tilework's code computes anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tilework.core.model import ModelSource
from tilework.core.wire.spec import Image, Spec
from tilework.pipelines.arguments import GENERATOR_DEVICE
from tilework.pipelines.defaults import read_overrides
from tilework.pipelines.loading import load_stock
from tilework.pipelines.model_index import model_directory
from tilework.pipelines.numerics import pin_numerics
from tilework.pipelines.stock.modular import GUIDER, hide_progress
from tilework.pipelines.stock.stock_arguments import GUIDANCE, StockArguments
from tilework.pipelines.stock.stock_pipeline import pictures_of

_LENGTH = "max_sequence_length"


def stock_picture(source: ModelSource, spec: Spec) -> Image:
    """Load a model and draw one request; its LoRAs are among those of the source, by name.

    Sets the number of threads and the precision of the whole process, as `pipelines.reference` does.

    Raises:
        ModelError: the model cannot be loaded.
    """
    pin_numerics(source.threads, source.attention)
    pipeline = load_stock(source)
    hide_progress(pipeline)
    _use_loras(pipeline, spec, {one.name: Path(one.path) for one in source.loras})
    taken = StockArguments(pipeline)
    generator = torch.Generator(str(spec.arguments.get(GENERATOR_DEVICE, "cpu"))).manual_seed(spec.seed)
    given = {**_defaults(source, taken), **taken.of(spec, generator)}
    guider: Any = getattr(pipeline, GUIDER, None)
    if taken.is_modular and hasattr(guider, GUIDANCE):
        guider.guidance_scale = spec.guidance_scale
    torch.manual_seed(spec.seed)  # Some calls draw from torch's own generator.
    with torch.no_grad():
        pictures = pictures_of(pipeline(**given))
    frames, rows, columns, _ = pictures.shape
    return Image(height=rows, width=columns, pixels=pictures.cpu().numpy().tobytes(), frames=frames)


def _defaults(source: ModelSource, taken: StockArguments) -> dict[str, Any]:
    """Return arguments of the call from the model's own file of defaults, beside those that every request gives."""
    directory = model_directory(source.path)
    overrides = {} if directory is None else read_overrides(directory)
    return {_LENGTH: overrides[_LENGTH]} if _LENGTH in overrides and _LENGTH in taken else {}


def _use_loras(pipeline: Any, spec: Spec, files: Mapping[str, Path]) -> None:
    names = [f"lora_{index}" for index in range(len(spec.loras))]  # PEFT's names have no dots.
    for name, one in zip(names, spec.loras, strict=True):
        file = files[one.name]
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name)
    if names:
        pipeline.set_adapters(names, [one.scale for one in spec.loras])
