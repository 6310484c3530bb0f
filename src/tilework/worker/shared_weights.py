"""One copy of the weights for all CPU workers of a node: files that each worker maps into its memory."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)
_ALIGNMENT = 64  # Of torch's own memory. Kernels round differently where tensors begin elsewhere.
_RESERVE_BYTES = 1 << 30  # Left free for the states of jobs, which lie on the same device.


class SharedWeights:
    """Files in `directory`, each with the weights of a component, named by a hash of their content.

    The first worker that loads a component writes its file; the others wait for it, map the file as well, and let their
    own copy go. The mapping is private: a worker that changed a weight would change it for itself. Workers that are
    killed leave at most an incomplete file, which is not used. Who owns the directory removes the files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def share(self, module: nn.Module) -> str | None:
        """Let the weights of a module lie in the file; returns its name. None if there is no room for it.

        Then the module has weights of its own, and the log says so. Weights keep their bits, and tied weights stay
        tied.
        """
        tensors = _tensors(module)
        name = _digest(tensors)
        path = self._directory / name
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with _locked(self._directory / f"{name}.lock"):
                if not path.exists():
                    self._write(path, tensors)
            places = _map(path, tensors)
        except OSError as error:
            _log.warning("weights are not shared between workers: %s", error)
            for tensor in tensors:
                tensor.data = tensor.data.clone()
            return None
        for tensor, place in zip(tensors, places, strict=True):
            tensor.data = place
        return name

    def _write(self, path: Path, tensors: Sequence[Tensor]) -> None:
        """Write the file under another name, and rename it when it is complete. Raises OSError."""
        size, free = _layout(tensors)[1], shutil.disk_usage(self._directory).free
        if size + _RESERVE_BYTES > free:
            raise OSError(f"{self._directory} has {free} bytes left, and a component takes {size}")
        incomplete = path.with_suffix(".incomplete")
        try:
            with incomplete.open("wb") as file:
                for tensor, offset in zip(tensors, _layout(tensors)[0], strict=True):
                    file.seek(offset)
                    file.write(_bytes(tensor))
                file.truncate(size)
            incomplete.rename(path)
        finally:
            incomplete.unlink(missing_ok=True)


def _tensors(module: nn.Module) -> list[Tensor]:
    """All weights of a module, tied ones once, in the order of their names."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [named[name] for name in sorted(named)]


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """The offset of each tensor in the file, and the length of the file."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(end, _ALIGNMENT)


def _map(path: Path, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as they lie in the file; copies of those that are empty, or not contiguous."""
    offsets, size = _layout(tensors)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    return [
        torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
        if tensor.numel() and tensor.is_contiguous()
        else tensor.data.clone()
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the end of the process frees."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
