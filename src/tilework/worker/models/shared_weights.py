"""One copy of the weights on the host for all workers of a node: files that each worker maps into its memory."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from tilework.core.component import ALIGNMENT, Component
from tilework.pipelines.components import weights_of
from tilework.pipelines.cuda.copies import Sending, SideCopies
from tilework.worker.models.pinned import PinnedFiles, bytes_of
from tilework.worker.models.room import RESERVE_BYTES

_log = logging.getLogger(__name__)
_MADV_POPULATE_READ = 22  # Since Linux 5.14; Python has no name for it.
_BLOCK_BYTES = 64 << 20  # Mapped at once: a multiple of any page size; takes some hundredths of a second.


class NoRoom(OSError):
    """A file of weights does not fit beside the others."""


class SharedWeights:
    """Files in `directory`, each with the weights of a component, named by its digest.

    The first worker that loads a component writes its file; the others wait for it, map the file as well, and free
    their own copy. The mapping is private: a worker that changed a weight would change it for itself. Workers that are
    killed leave at most an incomplete file, which is not used. The owner of the directory removes the files.

    A device reads files that are `pinned` by itself; with `copies` it does so beside what runs there.
    """

    def __init__(self, directory: Path, copies: SideCopies | None = None, pinned: PinnedFiles | None = None) -> None:
        self._directory = directory
        self._copies = copies
        self._pinned = pinned or PinnedFiles()
        if copies is not None:
            self._pinned.wait = copies.finish

    def share(self, module: nn.Module) -> str | None:
        """Let the weights of a module lie in the file; return its name. None if there is no room for it.

        Without room the module keeps its own weights, and the log says so. Weights keep their bits, and tied weights
        stay tied.
        """
        tensors = weights_of(module)
        name = digest_of(tensors)
        try:
            self.keep(name, tensors)
            self.map(name, tensors, [Form.of(tensor) for tensor in tensors])
        except OSError as error:
            _log.warning("weights are not shared between workers: %s", error)
            for tensor in tensors:
                tensor.data = tensor.data.clone()
            return None
        return name

    def keep(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Write the file unless it is there. Raises NoRoom, or another OSError if it cannot be written at all."""
        path = self._directory / name
        self._directory.mkdir(parents=True, exist_ok=True)
        with _locked(self._directory / f"{name}.lock"):
            if not path.exists():
                self._write(path, tensors)

    def keep_if_possible(self, component: Component, weights: Sequence[Tensor], forgets: Sequence[str] = ()) -> bool:
        """Write the file of a component, if need be in place of `forgets`, and then of the least recently used files.

        Returns False if that is impossible: then each use reads the component from the directory of its model.
        """
        try:
            try:
                self.keep(component.digest, weights)
            except NoRoom:
                self.make_room(sum(Form.of(weight).num_bytes for weight in weights), forgets)
                self.keep(component.digest, weights)
        except OSError as error:
            _log.warning("the host keeps no copy of a component of %d bytes: %s", component.num_bytes, error)
            return False
        return True

    @contextmanager
    def reading(self, name: str, *, waits: bool = True) -> Iterator[bool]:
        """Hold the right to read a component and keep its file; waits while another process reads the same.

        Yields whether this process may read: always, if it `waits`.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        with _locked(self._directory / f"{name}.reading", waits=waits) as is_ours:
            yield is_ours

    def has(self, name: str) -> bool:
        return (self._directory / name).exists()

    def make_room(self, num_bytes: int, first: Sequence[str] = ()) -> None:
        """Remove files until they free this number of bytes: those of `first`, in this order, then those that were
        mapped or written the longest ago.

        Workers that have mapped them keep them until they unmap them.
        """
        ranks = {name: rank - len(first) for rank, name in enumerate(first)}
        files = [path for path in self._directory.iterdir() if not path.suffix]
        files.sort(key=lambda path: (ranks.get(path.name, 0), _used_ns(path)))
        while files and num_bytes > 0:
            with suppress(FileNotFoundError):  # Another worker has removed it.
                num_bytes -= files[0].stat().st_size
                files[0].unlink()
            del files[0]

    def map(self, name: str, tensors: Sequence[Tensor], forms: Sequence[Form]) -> None:
        """Let weights of these forms, whose memory may have been freed, lie in the file, or in a copy on a device.

        Raises FileNotFoundError.
        """
        for _ in self.open(name, forms).bring(tensors):
            pass

    def open(self, name: str, forms: Sequence[Form]) -> WeightsFile:
        """Open the file with weights of these forms. It stays usable even if another worker removes it.

        Raises FileNotFoundError.
        """
        path = self._directory / name
        offsets, size = laid_out(forms)
        if any(form.device.type == "cuda" for form in forms):
            mapped = self._pinned.map(path, size)
        else:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        with suppress(FileNotFoundError):  # Another worker may have needed the room since.
            os.utime(path)
        return WeightsFile(mapped, offsets, forms)

    def send(self, name: str, tensors: Sequence[Tensor], forms: Sequence[Form]) -> Sending | None:
        """Begin to bring weights of these forms, whose memory was freed, to their device, beside what runs there.

        Returns None if that is impossible: there are no copies beside runs, or the device does not read the file by
        itself yet. To enable that takes longer than the copy, and the host would wait for it.
        """
        mapped = None if self._copies is None else self._pinned.known(self._directory / name)
        if self._copies is None or mapped is None:
            return None
        file = WeightsFile(mapped, laid_out(forms)[0], forms)
        there, sending = self._copies.send([file.weight(index) for index in range(len(forms))])
        for tensor, copy in zip(tensors, there, strict=True):
            tensor.data = copy
        return sending

    def _write(self, path: Path, tensors: Sequence[Tensor]) -> None:
        """Write the file under another name, and rename it when it is complete. Raises NoRoom, OSError."""
        offsets, size = laid_out([Form.of(tensor) for tensor in tensors])
        free = shutil.disk_usage(self._directory).free
        if size + RESERVE_BYTES > free:
            raise NoRoom(f"{self._directory} has {free} bytes left, and a component takes {size}")
        incomplete = path.with_suffix(".incomplete")
        try:
            with incomplete.open("wb") as file:
                for tensor, offset in zip(tensors, offsets, strict=True):
                    file.seek(offset)
                    file.write(_bytes(tensor))
                file.truncate(size)
            incomplete.rename(path)
        finally:
            incomplete.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, eq=False)
class WeightsFile:
    """The open file of a component, with its weights of these `forms` at these `offsets`."""

    mapped: mmap.mmap
    offsets: Sequence[int]
    forms: Sequence[Form]

    def bring(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the weights lie in the file, or in a copy on their device, a block after each `next`."""
        end = 0
        for index, (tensor, offset, form) in enumerate(zip(tensors, self.offsets, self.forms, strict=True)):
            while end < offset + form.num_bytes:
                self._populate(end)
                end += _BLOCK_BYTES
                yield
            tensor.data = self.weight(index).to(form.device)

    def weight(self, index: int) -> Tensor:
        """Return a weight as it lies in the file."""
        return placed(bytes_of(self.mapped), self.offsets[index], self.forms[index])

    def _populate(self, start: int) -> None:
        """Map the pages of a block. Older kernels do it page by page, when a run first reads them."""
        with suppress(OSError, ValueError):
            self.mapped.madvise(_MADV_POPULATE_READ, start, min(_BLOCK_BYTES, len(self.mapped) - start))


@dataclass(frozen=True, slots=True)
class Form:
    """Properties of a weight, without its memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_contiguous: bool
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Form:
        return Form(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_contiguous(), tensor.device)

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.count * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return a weight without memory."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def shaped(self) -> Tensor:
        """Return a weight with its shape and the memory of one element, for libraries that look at shapes."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


def digest_of(tensors: Sequence[Tensor]) -> str:
    """Return a hash of the types, shapes and bits of weights."""
    digest = sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def laid_out(forms: Sequence[Form]) -> tuple[list[int], int]:
    """Return the offset of each weight in memory where one follows another, as in the file, and the total length."""
    offsets = []
    end = 0
    for form in forms:
        offsets.append(end)
        end += -(-form.num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, max(end, ALIGNMENT)


def placed(memory: Tensor, offset: int, form: Form) -> Tensor:
    """Return a weight as it lies in these bytes, or a copy if it is empty or its rows are not adjacent."""
    if not form.count:
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=memory.device)
    there = memory[offset : offset + form.num_bytes].view(form.dtype).view(form.shape)
    if form.is_contiguous:
        return there
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=memory.device).copy_(there)


def _used_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # Another worker has removed it.
        return 0


@contextmanager
def _locked(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Hold a lock that the end of the process frees; yield whether it is held. It always is if `waits`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
