"""Mapped files of weights that a CUDA device reads by itself, at the speed of its link."""

from __future__ import annotations

import logging
import mmap
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_log = logging.getLogger(__name__)
_READ_ONLY = 8  # cudaHostRegisterReadOnly: pages that this process may not write.

Register = Callable[[int, int], bool]
"""Lets the device read this number of bytes at an address; returns False if it cannot."""


def register(address: int, num_bytes: int) -> bool:
    """Register memory with the runtime of CUDA: the pages stay in memory until `unregister`."""
    done = int(_runtime().cudaHostRegister(address, num_bytes, _READ_ONLY)) == 0
    if not done:
        with suppress(RuntimeError):  # CUDA remembers the error, and would blame the next kernel for it.
            torch.zeros(1, device="cuda").add_(1)
    return done


def unregister(address: int) -> None:
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@dataclass(slots=True, eq=False, weakref_slot=True)
class PinnedFiles:
    """Files that a device has loaded from. They stay mapped and registered as long as they exist.

    Registering a file takes a few times as long as copying it, and a copy from memory that is not registered takes six
    times as long (`bench/gpu/run.py loads`): so each file is registered once. A file that another worker has removed is
    unmapped at the next call; until then its memory is not free. Where the device cannot read a file by itself, or the
    limit of locked memory is reached, the copy goes through a buffer of the driver, and the log says so once.
    """

    register: Register = register
    unregister: Callable[[int], None] = unregister
    wait: Callable[[], None] = lambda: None
    """Returns when the device no longer reads any of them; called before a file is unmapped."""
    _mapped: dict[Path, tuple[int, mmap.mmap]] = field(default_factory=dict)
    """Inode and mapping by path."""
    _has_failed: bool = False

    def __post_init__(self) -> None:
        # Memory that is unmapped while it is registered breaks whatever is mapped there next.
        weakref.finalize(self, _unregister_all, self._mapped, self.unregister)

    def map(self, path: Path, num_bytes: int) -> mmap.mmap:
        """Map the contents of a file, read-only. Raises FileNotFoundError."""
        self._forget_removed()
        inode = path.stat().st_ino
        known = self._mapped.get(path)
        if known is not None:
            return known[1]
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ)
        if self.register(_address(mapped), num_bytes):
            self._mapped[path] = inode, mapped
        elif not self._has_failed:
            self._has_failed = True
            _log.warning("the device cannot read the host's copies of weights by itself, so that loads are slow")
        return mapped

    def known(self, path: Path) -> mmap.mmap | None:
        """Return the contents of a file that the device already reads by itself; None for others."""
        self._forget_removed()
        known = self._mapped.get(path)
        return None if known is None else known[1]

    def _forget_removed(self) -> None:
        for path, (inode, mapped) in list(self._mapped.items()):
            if not path.exists() or path.stat().st_ino != inode:
                self.wait()
                del self._mapped[path]
                self.unregister(_address(mapped))


def _unregister_all(mapped: dict[Path, tuple[int, mmap.mmap]], unregister: Callable[[int], None]) -> None:
    for _, one in mapped.values():
        unregister(_address(one))
    mapped.clear()


def _address(mapped: mmap.mmap) -> int:
    return bytes_of(mapped).data_ptr()


def bytes_of(mapped: mmap.mmap) -> torch.Tensor:
    """Return the mapped bytes as a tensor, which is never written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)
