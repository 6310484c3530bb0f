"""Tensors and samplers as bytes, bit for bit, to move them from one worker's device to another's."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_IN_BAND_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SerializedState:
    """The result of `serialize`: a small pickle, and the memory of the large tensors, which is not copied again."""

    head: bytes
    buffers: Sequence[memoryview]


def serialize(contents: Any) -> SerializedState:
    """Serialize `contents`, which must not be modified while the result is in use."""
    file = io.BytesIO()
    buffers: list[memoryview] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        with buffer.raw() as memory:
            if memory.nbytes <= _IN_BAND_BYTES:
                return True
        buffers.append(buffer.raw())
        return False

    _Pickler(file, protocol=5, buffer_callback=keep_in_band).dump(contents)
    return SerializedState(file.getvalue(), buffers)


def deserialize(serialized: SerializedState, device: torch.device) -> Any:
    """The contents of a serialized state. Tensors of an accelerator are placed on `device`, those of the CPU stay
    there.

    The tensors use the memory of `serialized.buffers`. A sampler is unpickled, which runs code, so `serialized` must
    come from a worker.
    """
    return _Unpickler(io.BytesIO(serialized.head), device, serialized.buffers).load()


def room(num_bytes: int) -> memoryview:
    """Memory to read a buffer into, aligned like torch's own: unaligned inputs may round differently."""
    memory: Any = torch.empty(num_bytes, dtype=torch.uint8).numpy()
    return memoryview(memory)


class _Pickler(pickle.Pickler):
    def reducer_override(self, contents: Any) -> Any:
        if type(contents) is not Tensor:
            return NotImplemented
        plain = contents.detach().contiguous().cpu()
        memory: Any = plain.flatten().view(torch.uint8).numpy() if plain.numel() else b""
        where = "cpu" if contents.device.type == "cpu" else "device"
        return _tensor, (_Place(where), plain.dtype, tuple(plain.shape), pickle.PickleBuffer(memory))

    def persistent_id(self, contents: Any) -> Any:
        return contents.where if isinstance(contents, _Place) else None


@dataclass(frozen=True, slots=True)
class _Place:
    where: str


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device, buffers: Sequence[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._device = device

    def persistent_load(self, where: Any) -> torch.device:
        return torch.device("cpu") if where == "cpu" else self._device


def _tensor(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], memory: Any) -> Tensor:
    if not len(memory):
        return torch.empty(shape, dtype=dtype, device=device)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    # Small tensors lie in the pickle, at any address.
    owned = flat.clone() if len(memory) <= _IN_BAND_BYTES else flat
    return owned.view(dtype).reshape(shape).to(device)
