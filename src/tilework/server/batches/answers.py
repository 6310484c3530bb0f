"""A file of answers, one a line, and beside it an index: which calls have an answer, and where each answer ends."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from io import RawIOBase
from pathlib import Path

INDEX = ".index"
"""Suffix of an index, after the name of its file of answers."""
_RECORD = struct.Struct("<IQ")  # The number of a call's line, and the offset after its answer.
_NUMBER = re.compile(rb'\{"id": "batch-[0-9a-f]{32}-(\d{1,9})"')
_HEAD_BYTES = 64
_PIECE_BYTES = 1 << 23
_NO_CALL = 0


class AnswerFile:
    """The answers of a batch. Methods block; one thread at a time calls them, `begin` and then `read_on` first.

    `numbers` are the lines of calls that have an answer, and `end` is the offset after the last answer.

    An answer is written before its record in the index. So whenever the process is killed, every answer that the index
    names is there, and answers that it does not name follow the last one that it does: a start reads only these. What
    follows the last newline was cut off, and is removed.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.index = place.with_name(place.name + INDEX)
        self.numbers: set[int] = set()
        self.end = 0
        self._at = 0
        self._head = b""
        self._num_records = 0
        self._unwritten: list[bytes] = []

    def begin(self) -> None:
        """Take over the answers that the index names. Raises OSError."""
        size = self.place.stat().st_size
        self.numbers = set()
        self.end = 0
        self._num_records = 0
        self._unwritten = []
        self._head = b""
        for number, end in self._records():
            if not self.end < end <= size:  # More of the answers was cut off than of the index.
                break
            self.numbers.add(number)
            self.end = end
            self._num_records += 1
        if self.end and not self._is_behind_newline():
            self.numbers = set()
            self.end = 0
            self._num_records = 0
        with suppress(FileNotFoundError):
            os.truncate(self.index, self._num_records * _RECORD.size)  # A later answer must not match a dropped record.
        self._at = self.end

    def read_on(self) -> bool:
        """Find more answers after those known; return whether there may be still more. Raises OSError."""
        with self.place.open("rb") as file:
            file.seek(self._at)
            piece = file.read(_PIECE_BYTES)
        for head, end in self._lines(piece):
            found = _NUMBER.match(head)
            self._note(int(found[1]) if found else _NO_CALL, end)
        self._at += len(piece)
        self._write_records()
        if len(piece) == _PIECE_BYTES:
            return True
        self.numbers.discard(_NO_CALL)
        os.truncate(self.place, self.end)
        return False

    def append(self, number: int, line: bytes) -> None:
        """Write the answer of the call in line `number`. Raises OSError: then `begin` anew, for some may be there."""
        with self.place.open("r+b", buffering=0) as file:
            file.truncate(self.end)  # A write that failed may have left something there.
            file.seek(self.end)
            _write_all(file, line)
        self._note(number, self.end + len(line))
        self._write_records()

    def forget(self) -> None:
        """Remove the index, which is of no use once no more answers come. Raises OSError."""
        with suppress(FileNotFoundError):
            self.index.unlink()

    def _records(self) -> Iterator[tuple[int, int]]:
        with suppress(FileNotFoundError):
            content = self.index.read_bytes()
            yield from _RECORD.iter_unpack(content[: len(content) // _RECORD.size * _RECORD.size])

    def _is_behind_newline(self) -> bool:
        with self.place.open("rb") as file:
            file.seek(self.end - 1)
            return file.read(1) == b"\n"

    def _lines(self, piece: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the head of each line that ends in a piece, which begins at `_at`, and the offset after the line."""
        begin = 0
        while (cut := piece.find(b"\n", begin)) >= 0:
            yield self._head + piece[begin : min(cut, begin + _HEAD_BYTES - len(self._head))], self._at + cut + 1
            self._head = b""
            begin = cut + 1
        self._head += piece[begin : begin + _HEAD_BYTES - len(self._head)]

    def _note(self, number: int, end: int) -> None:
        self.numbers.add(number)
        self.end = end
        self._unwritten.append(_RECORD.pack(number, end))

    def _write_records(self) -> None:
        """Write the records, also those that could not be written earlier: the index has no gaps."""
        if not self._unwritten:
            return
        with os.fdopen(os.open(self.index, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
            file.seek(self._num_records * _RECORD.size)
            _write_all(file, b"".join(self._unwritten))
        self._num_records += len(self._unwritten)
        self._unwritten = []


def _write_all(file: RawIOBase, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) or 0 :]
