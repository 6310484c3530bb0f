"""Loads the family of a `ModelSource`: finds the model, checks it, and loads it."""

from __future__ import annotations

import pkgutil
from typing import Any, cast

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline

from tilework.core.model import DEVICES, DTYPES, ModelSource
from tilework.pipelines.defaults import read_overrides
from tilework.pipelines.errors import InvalidSource, ModelNotFound
from tilework.pipelines.family import Family
from tilework.pipelines.model_index import ModelIndex, read_model_index


def load(source: ModelSource) -> Family:
    """Load a model onto its device, ready to draw.

    `source.path` is "shapes" (the model that comes with Tilework), a diffusers directory, or a hub id. A directory is
    read without any network; a directory called shapes is reached as ./shapes. `tilework.json` is read from
    directories only.

    Raises:
        ModelError: one of its subclasses, each for one thing that can be wrong.
    """
    dtype, device = _dtype(source), _device(source)
    index = read_model_index(source.path)
    overrides = {} if index.directory is None else read_overrides(index.directory)
    pipeline = _stock(index, dtype, device)
    name = source.path if index.directory is None else index.directory.resolve().name
    family: Family = pkgutil.resolve_name(index.adapter)(pipeline, name, overrides, library_versions())
    return family


def load_stock(source: ModelSource) -> Any:
    """The diffusers pipeline of a model on its device, with the very weights that `load` draws with.

    Raises:
        ModelError: as `load`.
    """
    dtype, device = _dtype(source), _device(source)
    return _stock(read_model_index(source.path), dtype, device)


def quiet() -> None:
    """Turn off the progress bars and advice of diffusers and transformers."""
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def library_versions() -> str:
    """The versions of the libraries that compute the pixels."""
    return f"torch {torch.__version__}, diffusers {diffusers.__version__}, transformers {transformers.__version__}"


def _dtype(source: ModelSource) -> torch.dtype:
    if source.dtype not in DTYPES:
        raise InvalidSource(f"dtype is {source.dtype!r}; choose one of {', '.join(DTYPES)}")
    return cast(torch.dtype, getattr(torch, source.dtype))


def _device(source: ModelSource) -> torch.device:
    if source.device not in DEVICES:
        raise InvalidSource(f"device is {source.device!r}; choose one of {', '.join(DEVICES)}")
    if source.device == "cuda" and not torch.cuda.is_available():
        raise InvalidSource(f"device is {source.device!r}, but torch sees no such device; choose cpu")
    return torch.device(source.device)


def _stock(index: ModelIndex, dtype: torch.dtype, device: torch.device) -> Any:
    pipeline = _load_pipeline(index, dtype).to(device)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            _copy_weights(part)
    return pipeline


def _load_pipeline(index: ModelIndex, dtype: torch.dtype) -> Any:
    """The stock pipeline. Components that the index leaves empty (SD3 without T5) must be passed as None."""
    absent = {name: None for name, value in index.components.items() if value == [None, None]}
    try:
        return DiffusionPipeline.from_pretrained(
            index.path if index.directory is None else str(index.directory),
            local_files_only=index.directory is not None,
            use_safetensors=True,
            dtype=dtype,
            **absent,
        )
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{index.path}: cannot be loaded; check that the model is complete ({error})") from error


@torch.no_grad()
def _copy_weights(module: torch.nn.Module) -> None:
    """Copy every weight into memory of its own.

    Safetensors are mapped from the file, where weights lie unaligned; kernels then round differently, by 6e-7. The
    weights are not marked as frozen: convolutions in float16 on CPUs then round differently from stock, by 8e-3.
    """
    module.eval()
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
