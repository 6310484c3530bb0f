"""Restart of a worker that was forked from a process that has used CUDA: it could not use CUDA itself.

Workers are forked from a process that has imported the libraries, and imports ask for devices. Through NVML the
question is harmless; if NVML does not answer, CUDA is asked. So a worker checks what it was born with. If CUDA was
touched, it replaces its program by a fresh one, with the same process id and pipe, seconds later. Rejected: to start
all workers of CUDA that way, which costs each of them these seconds; and to decide in the server's process, which is
not the one that forks.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from tilework.comm.messages import from_bytes, to_bytes
from tilework.core.model import Source
from tilework.core.wire.commands import Site

_OPEN_FILES = Path("/proc/self/fd")
_OF_CUDA = "/dev/nvidia-uvm"
"""File that a process opens when it initialises CUDA, but not when it asks NVML."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_PROGRAM = "import sys; sys.path[:] = {path!r}; from tilework.worker.start.anew import resume; resume({pipe}, {memory})"


def was_born_with_cuda() -> bool:
    """Return whether this process was forked from one that has used CUDA: torch says so, or its open files show it."""
    return bool(torch.cuda._is_in_bad_fork()) or any(map(_is_of_cuda, _OPEN_FILES.iterdir()))


def _is_of_cuda(link: Path) -> bool:
    try:
        return str(link.readlink()).startswith(_OF_CUDA)
    except OSError:  # The entry of the directory itself, which is closed.
        return False


def begin_anew(connection: socket.socket, sources: Sequence[Source], site: Site) -> NoReturn:
    """Replace the program of this process by one that serves with these arguments."""
    memory = os.memfd_create("tilework-worker", os.MFD_ALLOW_SEALING)  # Exec does not close it, as it does other files.
    with open(memory, "wb", closefd=False) as file:
        file.write(to_bytes((tuple(sources), site)))
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(memory, 0, os.SEEK_SET)
    connection.set_inheritable(True)
    program = _PROGRAM.format(path=sys.path, pipe=connection.fileno(), memory=memory)
    os.execv(sys.executable, [sys.executable, "-c", program])


def resume(pipe: int, memory: int) -> None:
    """Serve, as the program that `begin_anew` has started, with this pipe and the contents of this memory."""
    from tilework.worker.process import serve

    with open(memory, "rb") as file:
        sources, site = from_bytes(file.read())
    serve(socket.socket(fileno=pipe), sources, site)
