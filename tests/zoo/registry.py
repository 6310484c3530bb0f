"""All models of the zoo by name, and the one function that builds them."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import diffusers
import torch

from tilework.pipelines.support.record import KINDS
from zoo.model import ZooModel

MODULES = (
    "stable_diffusion",
    "stable_diffusion_xl",
    "stable_diffusion_3",
    "flux",
    "flux_relatives",
    "flux2",
    "qwen",
    "sana",
    "wan",
    "ltx",
    "hunyuan",
    "cogvideox",
    "image_models",
    "kandinsky",
    "video_models",
    "unet_video",
    "ltx2",
    "cosmos",
    "newer_images",
    "kolors",
    "modular",
)
"""The files of this folder that have a tuple `MODELS`."""


def _collect() -> Mapping[str, ZooModel]:
    found: dict[str, ZooModel] = {}
    for module in MODULES:
        for model in importlib.import_module(f"zoo.{module}").MODELS:
            assert model.name not in found, f"two models are called {model.name}"
            assert model.kind in KINDS, f"{model.name} is of no known kind: {model.kind}"
            found[model.name] = model
    return found


ZOO: Mapping[str, ZooModel] = _collect()


def build(model: ZooModel) -> Any:
    """The pipeline of a model: random weights, the same each time; progress bars off, modules in eval mode."""
    torch.manual_seed(0)
    kind = getattr(diffusers, model.class_name)
    parts = dict(model.components())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = _modular(kind, parts) if model.modular else kind(**_absent(kind) | parts)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            _fill_zeros(part.eval())
    quiet(pipeline)
    return pipeline


def quiet(pipeline: Any) -> None:
    """Switch the progress bars of a pipeline off, or of all blocks of a modular one."""
    if hasattr(pipeline, "set_progress_bar_config"):
        pipeline.set_progress_bar_config(disable=True)
    blocks = getattr(pipeline, "_blocks", None) or pipeline
    for block in getattr(blocks, "sub_blocks", {}).values():
        quiet(block)


def _absent(kind: type) -> dict[str, Any]:
    """Components that the constructor requires, as absent ones; those of the model take their place."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]
    return {parameter.name: None for parameter in parameters if parameter.default is parameter.empty}


def _modular(kind: type, parts: dict[str, Any]) -> Any:
    pipeline = kind()
    pipeline.update_components(**parts)
    return pipeline


@torch.no_grad()
def _fill_zeros(module: torch.nn.Module) -> None:
    """Give weights that start as zeros small random values.

    The outputs of a control network and the gates of many blocks start as zeros: a model that was never trained
    would ignore the control picture, and a test could not see whether it arrives.
    """
    for name, parameter in module.named_parameters():
        if name.endswith("weight") and parameter.is_floating_point() and not parameter.any():
            parameter.normal_(std=0.05)
