"""The files of batches, and batches themselves as files, in the durable directory of a server."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import ValidationError

from tilework.server.schema.batch_answers import BatchAnswer, FileAnswer
from tilework.store.files import OpenFile
from tilework.store.results import Result

_FILE = re.compile(r"(file|output)-[0-9a-f]{32}", re.ASCII)
_BATCH = re.compile(r"batch-[0-9a-f]{32}", re.ASCII)
_OUTPUT = "output"


class ShelfFull(Exception):
    """There is no room for another file."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch of a tenant. `base_url` is that of its client, for URLs in answers."""

    tenant: str
    base_url: str
    answer: BatchAnswer


@dataclass(frozen=True, slots=True)
class BatchShelf:
    """Files of tenants below `path`, of `max_bytes` in all: beyond that no more are taken. Blocks while it reads."""

    path: Path
    max_bytes: int

    def add(self, tenant: str, content: bytes) -> FileAnswer:
        """Keep a file of calls. Raises ShelfFull, OSError."""
        self.check_room(len(content))
        place = self._place(tenant) / f"file-{uuid4().hex}"
        _write(place, content)
        return _answer(place)

    def check_room(self, num_bytes: int) -> None:
        """Raises ShelfFull."""
        held = sum(map(_num_bytes, self.path.glob("tenant-*/*")))
        if held + num_bytes > self.max_bytes:
            raise ShelfFull(f"the files of batches take {held} bytes of {self.max_bytes}")

    def file(self, tenant: str, file_id: str) -> Path | None:
        """The file of a tenant, if there is one of this id."""
        place = self._place(tenant) / file_id
        return place if _FILE.fullmatch(file_id) and place.is_file() else None

    def files(self, tenant: str) -> list[FileAnswer]:
        """Newest first."""
        found = [one for one in self._place(tenant).iterdir() if _FILE.fullmatch(one.name)]
        return [_answer(one) for one in sorted(found, key=lambda one: (-one.stat().st_mtime_ns, one.name))]

    def answer(self, place: Path) -> FileAnswer:
        """About a file that `file` has found."""
        return _answer(place)

    def content(self, place: Path) -> Result:
        """What a file that `file` has found holds now; more may be written to it meanwhile. The caller closes it."""
        file = place.open("rb")
        return OpenFile(file, 0, os.fstat(file.fileno()).st_size, "application/jsonl")

    def new_output(self, tenant: str) -> str:
        """The id of an empty file for answers. Raises OSError."""
        place = self._place(tenant) / f"{_OUTPUT}-{uuid4().hex}"
        _write(place, b"")
        return place.name

    # Batches.

    def keep(self, batch: StoredBatch) -> None:
        """Write a batch as it stands. Raises OSError."""
        place = self._place(batch.tenant) / batch.answer.id
        _write(place, f"{batch.base_url}\n{batch.answer.model_dump_json()}".encode())

    def batches(self, tenant: str | None = None) -> list[StoredBatch]:
        """Those of a tenant, or all, newest first. One that cannot be read is left out."""
        known = [one.name.removeprefix("tenant-") for one in self.path.glob("tenant-*")]
        owners = known if tenant is None else [tenant]
        found = [
            batch
            for owner in owners
            for place in self._place(owner).iterdir()
            if _BATCH.fullmatch(place.name) and (batch := _read(owner, place)) is not None
        ]
        return sorted(found, key=lambda one: (-one.answer.created_at, one.answer.id))

    def batch(self, tenant: str, batch_id: str) -> StoredBatch | None:
        place = self._place(tenant) / batch_id
        return _read(tenant, place) if _BATCH.fullmatch(batch_id) and place.is_file() else None

    def _place(self, tenant: str) -> Path:
        place = self.path / f"tenant-{tenant}"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place


def _read(tenant: str, place: Path) -> StoredBatch | None:
    base_url, _, document = place.read_text("utf-8").partition("\n")
    try:
        return StoredBatch(tenant, base_url, BatchAnswer.model_validate_json(document))
    except ValidationError:  # Another version has written it.
        return None


def _write(place: Path, content: bytes) -> None:
    """All of it or nothing, whenever the process is killed."""
    new = place.with_suffix(".new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, place)


def _num_bytes(place: Path) -> int:
    """0 if it has gone since it was listed: it was deleted, or has got its name."""
    with suppress(FileNotFoundError):
        return place.stat().st_size
    return 0


def _answer(place: Path) -> FileAnswer:
    status = place.stat()
    return FileAnswer(
        id=place.name,
        bytes=status.st_size,
        created_at=int(status.st_mtime) or int(time.time()),
        filename=f"{place.name}.jsonl",
        purpose="batch_output" if place.name.startswith(_OUTPUT) else "batch",
    )
