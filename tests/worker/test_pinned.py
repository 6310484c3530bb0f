"""Files that a device reads by itself, with a runtime that only takes notes."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tilework.worker.models.pinned import PinnedFiles, bytes_of


@dataclass
class Runtime:
    registered: dict[int, int] = field(default_factory=dict)
    can: bool = True

    def register(self, address: int, num_bytes: int) -> bool:
        assert address not in self.registered
        if self.can:
            self.registered[address] = num_bytes
        return self.can

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def files(self) -> PinnedFiles:
        return PinnedFiles(self.register, self.unregister)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_file_is_registered_once(tmp_path: Path) -> None:
    runtime, path = Runtime(), write(tmp_path / "a", b"abcd")
    files = runtime.files()
    for _ in range(3):
        assert bytes(bytes_of(files.map(path, 4)).tolist()) == b"abcd"
    assert list(runtime.registered.values()) == [4]


def test_removed_and_replaced_files_are_let_go_at_the_next_call(tmp_path: Path) -> None:
    runtime = Runtime()
    files, first, second = runtime.files(), write(tmp_path / "a", b"abcd"), write(tmp_path / "b", b"ef")
    files.map(first, 4)
    files.map(second, 2)
    second.unlink()
    replacement = write(tmp_path / "new", b"wxyz!")
    replacement.rename(first)
    assert bytes(bytes_of(files.map(first, 5)).tolist()) == b"wxyz!"
    assert list(runtime.registered.values()) == [5]


def test_what_cannot_be_registered_is_mapped_all_the_same_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, path = Runtime(can=False), write(tmp_path / "a", b"abcd")
    files = runtime.files()
    with caplog.at_level(logging.WARNING, "tilework"):
        contents = [bytes(bytes_of(files.map(path, 4)).tolist()) for _ in range(3)]
    assert contents == [b"abcd"] * 3
    assert len(caplog.records) == 1


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Runtime().files().map(tmp_path / "a", 4)


def test_nothing_stays_registered_when_the_files_are_no_longer_needed(tmp_path: Path) -> None:
    runtime = Runtime()
    files = runtime.files()
    files.map(write(tmp_path / "a", b"abcd"), 4)
    files.map(write(tmp_path / "b", b"ef"), 2)
    del files
    gc.collect()
    assert not runtime.registered
