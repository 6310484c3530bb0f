"""Writes the folder of a fake model."""

from __future__ import annotations

import importlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from tilework.pipelines.fake.component import Component, FakeModel, Guider, Sampler, Tokenizer, Weights

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}
"""Names of types in safetensors."""


def write_model(
    model: FakeModel,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    note: Callable[[str, int], None] = lambda name, num_bytes: None,
) -> int:
    """Write the folder of a model, and return the number of bytes of its weights.

    Weights are the initial ones of the libraries' classes, on `device`, rounded to `dtype`. On the device "meta"
    nothing is computed: the files have all names, shapes and sizes, and holes for the weights, which read as zeros and
    take no room on file systems that know sparse files. `note` is called with the name and bytes of each component with
    weights once it is written.

    Raises:
        FileExistsError: the directory has files already.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(str(directory))
    index = {"_class_name": model.pipeline, "_diffusers_version": diffusers.__version__, **model.options}
    total = 0
    for name, component in model.components.items():
        index[name], num_bytes = _write(component, directory / name, dtype, device)
        if num_bytes:
            note(name, num_bytes)
        total += num_bytes
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def bytes_of(model: FakeModel, dtype: torch.dtype) -> int:
    """Return the number of bytes of a model's weights. Computes nothing else."""
    weights = [part for part in model.components.values() if isinstance(part, Weights)]
    modules = [build(part, dtype, torch.device("meta")) for part in weights]
    return sum(tensor.nbytes for module in modules for tensor in _tensors(module).values())


def _write(component: Component, directory: Path, dtype: torch.dtype, device: torch.device) -> tuple[list[str], int]:
    """Write a component; return its entry in the index, and the bytes of its weights."""
    match component:
        case Sampler(name, config) | Guider(name, config):
            getattr(diffusers, name)(**config).save_pretrained(directory)
            return ["diffusers", name], 0
        case Tokenizer(make, max_length):
            tokenizer = make(max_length)
            tokenizer.save_pretrained(directory)
            return ["transformers", type(tokenizer).__name__], 0
        case Weights(library, name):
            module = build(component, dtype, device)
            _save_config(module, library, directory)
            prefix = "" if library == "transformers" else "diffusion_pytorch_"
            return [library, name], _save_weights(module, directory / f"{prefix}model.safetensors")


def build(component: Weights, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Build the module of a component on a device, with the initial weights of its class."""
    with _default(dtype), device:
        if component.library == "transformers":
            cls = getattr(transformers, component.name)
            module = cls(cls.config_class(**component.config))
        else:
            place = diffusers
            if component.library != "diffusers":
                place = importlib.import_module(f"diffusers.pipelines.{component.library}")
            module = getattr(place, component.name)(**component.config)
    built: torch.nn.Module = module
    return built


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _save_config(module: Any, library: str, directory: Path) -> None:
    if library != "transformers":
        module.save_config(directory)
    else:
        module.config.architectures = [type(module).__name__]
        module.config.save_pretrained(directory)


def _save_weights(module: torch.nn.Module, path: Path) -> int:
    """Write a safetensors file, and return the bytes of its weights; those on the device "meta" become holes.

    The library's own `save_file` would copy all weights of a device to the host first, whose memory may also hold the
    folder.
    """
    tensors = _tensors(module)
    with path.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors.values():
            if tensor.is_meta:
                file.seek(tensor.nbytes, os.SEEK_CUR)
            else:
                file.write(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
        file.truncate()
    return sum(tensor.nbytes for tensor in tensors.values())


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's file in order: types with more bytes first, so that all values are aligned.

    A weight with several names has the first of them.
    """
    parameters = dict(module.named_parameters())
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in module.state_dict().items() if name not in every}
    found = {name: parameter.detach() for name, parameter in parameters.items()} | buffers
    return dict(sorted(found.items(), key=lambda item: -item[1].itemsize))


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the header of a safetensors file in which the values of these tensors follow each other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        place = [end, end + tensor.nbytes]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        end = place[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
