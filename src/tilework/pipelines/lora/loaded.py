"""The LoRAs of a loaded pipeline, on its device.

diffusers and PEFT read and attach the files, as `load_lora_weights` does for the stock pipeline. The weights of the
model stay as they are: a layer with LoRAs computes its own output, and adds theirs. So requests with different LoRAs
follow each other at no cost, and a request without LoRAs has exactly the model's outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import nn

from tilework.core.lora import UsedLora
from tilework.pipelines.component_files import check_is_pulled
from tilework.pipelines.components import modules_of
from tilework.pipelines.errors import ModelError
from tilework.pipelines.numerics import is_finite

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class InvalidLora(ModelError):
    """A file is no LoRA of this model."""


@dataclass(frozen=True, slots=True)
class AddedLora:
    """A LoRA on the device: the components whose computation it changes, and its size there."""

    changes: frozenset[str]
    num_bytes: int


class LoadedLoras:
    """The LoRAs of a stock pipeline. None is in use at first; layers without active LoRAs compute as before.

    Any name is allowed: PEFT, which takes names for those of modules, gets numbers.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._keys: dict[str, str] = {}
        self._num_added = 0
        self._layers: list[LoraLayer] = []
        self._used: tuple[UsedLora, ...] = ()

    @torch.no_grad()
    def add(self, name: str, file: Path) -> AddedLora:
        """Read a LoRA from a safetensors file onto the device.

        Raises:
            InvalidLora: it cannot be read, is not of this model, or has values that are NaN or infinite; nothing has
                changed then.
        """
        if not hasattr(self._pipeline, "load_lora_weights"):
            raise InvalidLora(f"{type(self._pipeline).__name__} takes no LoRAs in this version of diffusers")
        if file.suffix != ".safetensors" or not file.is_file():
            raise InvalidLora(f"{file} is no file that ends with .safetensors; save the LoRA as one")
        check_is_pulled(file, InvalidLora)
        key = f"number_{self._num_added}"
        self._num_added += 1
        place = {"weight_name": file.name, "local_files_only": True, "use_safetensors": True}
        try:
            with _silent():  # The error says what is wrong.
                self._pipeline.load_lora_weights(str(file.parent), adapter_name=key, **place)
                added = self._check(key, file, self._num_tensors(str(file.parent), place))
        except Exception as error:
            self._delete(key)
            if isinstance(error, InvalidLora | MemoryError | torch.OutOfMemoryError):
                raise
            first = " ".join(map(str.strip, str(error).splitlines()[:2]))
            raise InvalidLora(f"{file} is not for this model ({type(error).__name__}: {first})") from error
        self._keys[name] = key
        self._let_none_compute()
        return added

    def remove(self, name: str) -> None:
        """Free the memory of a LoRA."""
        self._delete(self._keys.pop(name))

    def use(self, used: Sequence[UsedLora]) -> None:
        """Compute with these LoRAs, which must be there, and no others from now on."""
        if tuple(used) == self._used:
            return
        keys = [self._keys[one.name] for one in used]
        self._used = tuple(used)
        for layer in self._layers:
            _activate(layer, keys)
            for key, one in zip(keys, used, strict=True):
                layer.set_scale(key, one.scale)

    def _let_none_compute(self) -> None:
        """Find the layers that have LoRAs, and let none compute."""
        self._layers = [layer for _, layer in self._all_layers()]
        for layer in self._layers:
            _move_hooks(layer)
            _activate(layer, [])
        self._used = ()

    def _delete(self, key: str) -> None:
        self._pipeline.delete_adapters([key])
        self._let_none_compute()

    def _all_layers(self) -> Iterator[tuple[str, LoraLayer]]:
        """Yield the layers that have or had LoRAs, each with the name of its component."""
        for name, component in modules_of(self._pipeline).items():
            for layer in component.modules():
                if isinstance(layer, LoraLayer):
                    yield name, layer

    def _check(self, key: str, file: Path, num_tensors: int) -> AddedLora:
        """Return what was added. Raises InvalidLora if it is not the whole file: some of it is of another model."""
        weights = [(name, weight) for name, layer in self._all_layers() for weight in _weights(layer, key)]
        if not weights or len(weights) < num_tensors:
            num_odd = num_tensors - len(weights)
            raise InvalidLora(f"{file} is not for this model: {num_odd} of its {num_tensors} tensors do not fit")
        scales = [layer.scaling.get(key, 1.0) for _, layer in self._all_layers()]
        if not all(map(isfinite, scales)) or not all(is_finite(weight) for _, weight in weights):
            raise InvalidLora(_not_finite(file, weights[0][1].dtype))
        for _, weight in weights:  # As `loading._copy_weights`, and as LoRAs in use in the stock pipeline.
            weight.data = weight.data.clone()
            weight.requires_grad_(True)
        return AddedLora(frozenset(name for name, _ in weights), sum(weight.nbytes for _, weight in weights))

    def _num_tensors(self, directory: str, place: dict[str, Any]) -> int:
        read = self._pipeline.lora_state_dict(directory, **place)
        tensors = read[0] if isinstance(read, tuple) else read
        return sum(not name.endswith(".alpha") for name in tensors)


def _not_finite(file: Path, dtype: torch.dtype) -> str:
    """Return the error for the first tensor of a file that is not finite, or not finite in this dtype of the model."""
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  # It is no dictionary.
            values = tensors.get_tensor(name)
            if not is_finite(values):
                return f"{file}: its tensor {name} has values that are NaN or infinite; train or save the LoRA again"
            if not is_finite(values.to(dtype)):
                return f"{file}: its tensor {name} has values that {dtype} cannot hold; serve with --dtype float32"
    return f"{file}: its weights become NaN or infinite as {dtype}; train or save the LoRA again"


@contextmanager
def _silent() -> Iterator[None]:
    """Silence the log of diffusers and the warnings of PEFT."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def _weights(layer: Any, key: str) -> Iterator[nn.Parameter]:
    """Yield the weights that a LoRA has in a layer."""
    for kind in layer.adapter_layer_names:
        part = getattr(layer, kind, {})
        if key in part:
            yield from part[key].parameters() if isinstance(part[key], nn.Module) else (part[key],)


def _activate(layer: Any, keys: list[str]) -> None:
    """Let a layer compute with these LoRAs, or with none.

    PEFT's own `set_adapter` and `enable_adapters` visit the weights of all LoRAs of a layer, to freeze those that are
    not in use. That takes time in proportion to layers and LoRAs; this sets the other attributes that they set.
    """
    layer._active_adapter = keys
    layer._disable_adapters = not keys


def _move_hooks(layer: Any) -> None:
    """Let hooks see what a layer computes with its LoRAs: they were installed on the layer that it has replaced."""
    base = layer.get_base_layer()
    for kind in _HOOKS:
        getattr(layer, kind).update(getattr(base, kind))
        getattr(base, kind).clear()
