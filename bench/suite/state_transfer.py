"""The time to move a state between two processes, and that of as many plain bytes by the same transport.

One side packs a state, puts the blob down and reports it; this process passes the report on as a command; the other
side takes the blob and unpacks it. Bare, it is a file of as many bytes, written and read at once, in the same
directory, and a message each way.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.commands import ImportState
from tilework.core.wire.reports import Ended
from tilework.core.wire.spec import Spec
from tilework.pipelines import serialization
from tilework.runtime.state_blobs import StateBlobDirectory
from tilework.runtime.worker_process import forkserver_context
from tilework.worker.state_blobs import StateBlobs

CPU = torch.device("cpu")
SPEC = Spec(prompt="", height=8, width=8, steps=1, guidance_scale=1.0, seed=0)


@dataclass(frozen=True, slots=True)
class Load:
    """What is transferred next: tensors of `num_bytes` in all, or as many bytes bare."""

    num_bytes: int
    num_tensors: int
    bare: bool


class StateTransfer:
    """Two running processes. `seconds` may be called any number of times."""

    def __init__(self, source: Connection, target: Connection, blobs: StateBlobDirectory) -> None:
        self._source, self._target, self._blobs = source, target, blobs

    def seconds(self, load: Load) -> float:
        """From the source's first move to when the target could begin; on the machine's one monotonic clock."""
        self._target.send(load)
        self._source.send(load)
        report: Ended = self._source.recv()
        (blob,) = report.blobs.values()
        self._target.send(ImportState(1, "", SPEC, 1, (SavedState(0, 1, blob),), known=False))
        end_ns: int = self._target.recv()
        self._blobs.discard(blob)
        return (end_ns - report.start_ns) / 1e9


@contextmanager
def transferring() -> Iterator[StateTransfer]:
    blobs = StateBlobDirectory()
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    context = forkserver_context()
    members = [
        context.Process(target=member, args=(theirs, blobs.path, device_id), daemon=True)
        for device_id, (member, (_, theirs)) in enumerate(zip((_source, _target), pipes, strict=True))
    ]
    for member in members:
        member.start()
    try:
        yield StateTransfer(pipes[0][0], pipes[1][0], blobs)
    finally:
        for ours, _ in pipes:
            ours.send(None)
        for member in members:
            member.join()
        blobs.close()


def _source(connection: Connection, directory: Path, device_id: int) -> None:
    torch.set_num_threads(1)
    blobs = StateBlobs(directory, device_id)
    for load in iter(connection.recv, None):
        state = _tensors(load)
        whole = b"x" * load.num_bytes
        start_ns = time.monotonic_ns()
        if load.bare:
            blob = StateBlob("bare", load.num_bytes)
            (directory / blob.name).write_bytes(whole)
        else:
            blob = blobs.write(serialization.serialize(state))
        connection.send(Ended(1, start_ns, time.monotonic_ns(), steps_done=1, blobs={1: blob}))


def _target(connection: Connection, directory: Path, device_id: int) -> None:
    torch.set_num_threads(1)
    blobs = StateBlobs(directory, device_id)
    for load in iter(connection.recv, None):
        command: ImportState = connection.recv()
        (state,) = command.states
        if load.bare:
            taken: Any = (directory / state.blob.name).read_bytes()
        else:
            taken = serialization.deserialize(blobs.read(state.blob), CPU)
        connection.send(time.monotonic_ns())
        assert len(taken) == (load.num_bytes if load.bare else load.num_tensors)


def _tensors(load: Load) -> dict[str, torch.Tensor]:
    """As a state or a conditioning holds them: in half precision."""
    numbers = load.num_bytes // load.num_tensors // 2
    return {f"tensor {index}": torch.ones(numbers, dtype=torch.bfloat16) for index in range(load.num_tensors)}
