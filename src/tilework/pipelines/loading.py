"""From a `ModelSource` to a loaded family: find the model, check it, load it without surprises."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline

from tilework.core.wire import ModelSource
from tilework.pipelines.defaults import read_overrides
from tilework.pipelines.errors import InvalidSource, ModelNotFound, UnsafeWeights, UnsupportedModel
from tilework.pipelines.family import Family

SHIPPED = "shapes"
INDEX = "model_index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ADAPTERS = {
    "FluxPipeline": "tilework.pipelines.flux:Flux",
    "StableDiffusion3Pipeline": "tilework.pipelines.sd3:StableDiffusion3",
    "StableDiffusionPipeline": "tilework.pipelines.sd:StableDiffusion",
    "StableDiffusionXLPipeline": "tilework.pipelines.sdxl:StableDiffusionXL",
}
"""Adapter by class name of the stock pipeline; called with (pipeline, name, overrides, library)."""
_PICKLED = (".bin", ".ckpt", ".pt", ".pth")


def load(source: ModelSource) -> Family:
    """Load a model onto its device, ready to draw.

    `source.path` is "shapes" (the model that comes with Tilework), a diffusers directory, or a hub id. A directory is
    read without any network; a directory called shapes is reached as ./shapes. `tilework.json` is read from
    directories only.

    Raises:
        ModelError: one of its subclasses, each for one thing that can be wrong.
    """
    dtype, device = _dtype(source), _device(source)
    directory = _directory(source.path)
    index = _read_index(source.path, directory)
    adapter = _adapter(source.path, index)
    overrides = {} if directory is None else read_overrides(directory)
    if directory is not None:
        _check_weights(directory, index)
    pipeline = _load_pipeline(source.path, directory, index, dtype).to(device)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            _settle(part)
    name = source.path if directory is None else directory.resolve().name
    family: Family = pkgutil.resolve_name(adapter)(pipeline, name, overrides, library_versions())
    return family


def quiet() -> None:
    """Keep diffusers and transformers from writing progress bars and advice to a terminal that is not theirs."""
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def library_versions() -> str:
    """The libraries that decide the pixels."""
    return f"torch {torch.__version__}, diffusers {diffusers.__version__}, transformers {transformers.__version__}"


def location(path: str) -> str:
    """The directory that a source's path names, from the root, or the hub id that it is."""
    directory = _directory(path)
    return path if directory is None else str(directory.resolve())


def shipped_directory() -> Path:
    """Where the installed package keeps the model `shapes`."""
    return Path(str(resources.files("tilework"))) / "models" / SHIPPED


def _dtype(source: ModelSource) -> torch.dtype:
    if source.dtype not in DTYPES:
        raise InvalidSource(f"dtype is {source.dtype!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[source.dtype]


def _device(source: ModelSource) -> torch.device:
    try:
        device = torch.device(source.device)
    except RuntimeError as error:
        raise InvalidSource(f"device is {source.device!r}; choose cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSource(f"device is {source.device!r} but torch sees no such device; choose cpu")
    return device


def _directory(path: str) -> Path | None:
    """The model's directory; None if `path` is a hub id."""
    if path == SHIPPED:
        return shipped_directory()
    if Path(path).is_dir():
        return Path(path)
    if Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelNotFound(f"path is {path!r}, which is no directory; give one that holds {INDEX}, or a hub id")
    return None


def _read_index(path: str, directory: Path | None) -> dict[str, Any]:
    """The contents of `model_index.json`: class name of the pipeline, and (library, class) by component."""
    try:
        if directory is None:
            index = DiffusionPipeline.load_config(path)
        else:
            index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        place = path if directory is None else directory
        raise ModelNotFound(
            f"path is {path!r}, but {place} has no readable {INDEX}; give a diffusers directory or hub id ({error})"
        ) from error
    return dict(index)


def _adapter(path: str, index: Mapping[str, Any]) -> str:
    name = index.get("_class_name")
    if name not in ADAPTERS:
        supported = ", ".join(sorted(ADAPTERS))
        raise UnsupportedModel(f"{path}: {INDEX} names the pipeline class {name!r}; supported are {supported}")
    return ADAPTERS[name]


def _check_weights(directory: Path, index: Mapping[str, Any]) -> None:
    for component in index:
        files = sorted((directory / component).glob("*")) if not component.startswith("_") else []
        pickled = [file for file in files if file.suffix in _PICKLED]
        if pickled and not any(file.suffix == ".safetensors" for file in files):
            raise UnsafeWeights(
                f"{pickled[0]}: pickled weights are not read; convert them with "
                "save_pretrained(..., safe_serialization=True)"
            )


def _load_pipeline(path: str, directory: Path | None, index: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The stock pipeline. Components that the index leaves empty (SD3 without T5) must be passed as None."""
    absent = {name: None for name, value in index.items() if value == [None, None]}
    try:
        return DiffusionPipeline.from_pretrained(
            path if directory is None else str(directory),
            local_files_only=directory is not None,
            use_safetensors=True,
            dtype=dtype,
            **absent,
        )
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path}: cannot be loaded; check that the model is complete ({error})") from error


@torch.no_grad()
def _settle(module: torch.nn.Module) -> None:
    """Give every weight memory of its own.

    Safetensors are mapped from the file, where weights lie unaligned; kernels then round differently, by 6e-7. The
    weights are not marked as frozen: convolutions in float16 on CPUs then round differently from stock, by 8e-3.
    """
    module.eval()
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
