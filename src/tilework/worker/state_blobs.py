"""State blobs: serialized states as files in the node's shared memory, which the runtime removes."""

from __future__ import annotations

import errno
import logging
import os
import struct
import time
from itertools import count
from pathlib import Path

from tilework.core.wire.blobs import StateBlob
from tilework.pipelines.cuda.copies import DIRECT, Copies
from tilework.pipelines.serialization import BadState, SerializedState, room

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_POLL_S = 0.05
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


class TruncatedStateBlob(Exception):
    """The file of a blob is shorter than it was written."""


class StateBlobs:
    """Writes the blobs of one worker, and reads those of all workers of the node.

    A file holds the number of pieces, their lengths, and the pieces: the head of the serialized state and its buffers.
    It appears under its name only when it is complete. A name is never used again, not even by a worker of a later
    server that has the same process id.

    When the memory is full, a worker waits for up to `patience_s`: other requests end and free theirs. `copies` bring
    the tensors of states from its device and back.
    """

    def __init__(self, directory: Path, device_id: int, patience_s: float = 10.0, copies: Copies = DIRECT) -> None:
        self._directory = directory
        self.copies = copies
        self._patience_s = patience_s
        self._prefix = f"{device_id}-{os.getpid()}-{time.monotonic_ns():x}"
        self._numbers = count()

    def write(self, serialized: SerializedState) -> StateBlob:
        """Write a blob. Raises OSError, for instance when the memory stays full."""
        name = f"{self._prefix}-{next(self._numbers)}"
        pieces = [memoryview(serialized.head), *serialized.buffers]
        head = _COUNT.pack(len(pieces)) + b"".join(_LENGTH.pack(len(piece)) for piece in pieces)
        begin_s = waited_s = time.monotonic()
        while True:
            try:
                return StateBlob(name, self._write_file(name, [memoryview(head), *pieces]))
            except OSError as error:
                if error.errno not in _FULL or waited_s > begin_s + self._patience_s:
                    raise
            if waited_s == begin_s:
                _log.warning("there is no room for a state in %s: waiting for room", self._directory)
            time.sleep(_POLL_S)
            waited_s = time.monotonic()

    def _write_file(self, name: str, pieces: list[memoryview]) -> int:
        """Write a file; return its number of bytes."""
        hidden = self._directory / f".{name}"
        try:
            with hidden.open("wb", buffering=0) as file:
                num_bytes = sum(_write_all(file.fileno(), piece) for piece in pieces)
            hidden.rename(self._directory / name)
        except OSError:
            hidden.unlink(missing_ok=True)
            raise
        return num_bytes

    def remove(self, blob: StateBlob) -> None:
        """Remove a blob that this worker has written but not reported."""
        (self._directory / blob.name).unlink(missing_ok=True)

    def read(self, blob: StateBlob) -> SerializedState:
        """Read a blob; its file stays.

        Raises:
            FileNotFoundError: the blob was removed.
            TruncatedStateBlob: it ends too early.
            BadState: it holds nothing.
        """
        with (self._directory / blob.name).open("rb", buffering=0) as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            (num_pieces,) = _COUNT.unpack(_read_all(descriptor, _COUNT.size, size, DIRECT))
            table = _read_all(descriptor, num_pieces * _LENGTH.size, size, DIRECT)
            pieces = [_read_all(descriptor, length, size, self.copies) for (length,) in _LENGTH.iter_unpack(table)]
        if not pieces:
            raise BadState(f"the blob {blob.name} is empty")
        head, *buffers = pieces
        return SerializedState(bytes(head), buffers)


def _write_all(descriptor: int, piece: memoryview) -> int:
    written = 0
    while written < len(piece):
        written += os.write(descriptor, piece[written:])
    return written


def _read_all(descriptor: int, length: int, size: int, copies: Copies) -> memoryview:
    """Read the next `length` bytes of a file of `size` bytes; allocate no more than that, whatever the file says."""
    if length > size:
        raise TruncatedStateBlob(f"a blob of {size} bytes ends before {length} more")
    memory = room(length, copies)
    filled = 0
    while filled < length:
        got = os.readv(descriptor, [memory[filled:]])
        if not got:
            raise TruncatedStateBlob(f"a blob ends after {filled} of {length} bytes")
        filled += got
    return memory
