"""The files and batches of a tenant on the disk, and the scan of them at a start. Everything here blocks."""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tilework.server.batches.answers import INDEX
from tilework.server.schema.batch_answers import BatchAnswer, FileAnswer

logger = logging.getLogger("tilework.server")

Purpose = Literal["batch", "batch_output"]
TENANT = "tenant-"
"""Prefix of the name of a tenant's folder."""
OUTPUT, ERRORS = "output", "error"
"""Prefixes of the ids of files of answers: of those with status 200, and of others."""
_CALLS = "file"
_NEW = ".new"
_FILE = re.compile(r"((?:file|output|error)-[0-9a-f]{32})(?:\.([0-9]{1,11}))?", re.ASCII)
"""Name of a file: its id, and its expiry in seconds since 1970 if its client has set one."""
_BATCH = re.compile(r"batch-[0-9a-f]{32}", re.ASCII)


def new_number() -> str:
    """Make the end of an id, 32 hexadecimal digits: half of them are the time, and half cannot be guessed."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


def age_of(made_s: int, one_id: str) -> tuple[int, str]:
    """Return a key by which files, or batches, sort in the order in which they were made."""
    return made_s, one_id.partition("-")[2]


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch of a tenant. `base_url` is the one that its client uses, for URLs in answers."""

    tenant: str
    base_url: str
    answer: BatchAnswer


@dataclass(slots=True)
class KeptFile:
    """A file: its place, its expiry if its client has set one, and the batch whose answers it has, if any.

    `num_calls` counts the calls of a file of calls that was checked and has no mistake, by endpoint.
    """

    place: Path
    num_bytes: int
    created_s: int
    expires_s: int | None = None
    batch_id: str | None = None
    num_calls: dict[str, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.place.name.partition(".")[0]

    @property
    def purpose(self) -> Purpose:
        return "batch" if self.id.startswith(_CALLS) else "batch_output"

    def answer(self, expires_s: int | None) -> FileAnswer:
        return FileAnswer(
            id=self.id,
            bytes=self.num_bytes,
            created_at=self.created_s,
            expires_at=expires_s,
            filename=f"{self.id}.jsonl",
            purpose=self.purpose,
        )


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """The part of a batch that is known without reading it. `output_ttl_s` is for its answers, from its end on."""

    id: str
    created_s: int
    ended_s: int | None
    calls_id: str
    answers_ids: tuple[str, ...]
    has_answers: bool
    output_ttl_s: int | None

    @classmethod
    def of(cls, answer: BatchAnswer) -> KeptBatch:
        times_s = (answer.completed_at, answer.failed_at, answer.expired_at, answer.cancelled_at)
        counts = answer.request_counts
        expiry = answer.output_expires_after
        return cls(
            id=answer.id,
            created_s=answer.created_at,
            ended_s=next((one for one in times_s if one is not None), None),
            calls_id=answer.input_file_id,
            answers_ids=tuple(one for one in (answer.output_file_id, answer.error_file_id) if one is not None),
            has_answers=counts.completed + counts.failed > 0,
            output_ttl_s=None if expiry is None else expiry.seconds,
        )

    @property
    def file_ids(self) -> tuple[str, ...]:
        return self.calls_id, *self.answers_ids


@dataclass(slots=True)
class FoundOnDisk:
    """Files and batches of a tenant that are on the disk.

    `held` are the ids of files of batches of another version, which cannot be read and are left as they are.
    """

    files: dict[str, KeptFile] = field(default_factory=dict)
    batches: dict[str, KeptBatch] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)


def scan(path: Path) -> tuple[dict[str, FoundOnDisk], list[StoredBatch]]:
    """Return what each tenant has, and the batches that have not ended, the oldest first. Remove what a kill has left.

    Raises OSError.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found: dict[str, FoundOnDisk] = {}
    unfinished: list[StoredBatch] = []
    for folder in path.glob(f"{TENANT}*"):
        tenant = folder.name.removeprefix(TENANT)
        found[tenant], more = _scan_tenant(tenant, folder)
        unfinished += more
    return found, sorted(unfinished, key=lambda one: (one.answer.created_at, one.answer.id))


def read_batch(tenant: str, place: Path) -> StoredBatch | None:
    """Read a batch; None if another version has written it. Raises OSError."""
    base_url, _, document = place.read_text("utf-8", errors="replace").partition("\n")
    try:
        return StoredBatch(tenant, base_url, BatchAnswer.model_validate_json(document))
    except ValidationError:
        return None


def write_batch(folder: Path, batch: StoredBatch) -> None:
    """Write a batch. Raises OSError."""
    _write(folder / batch.answer.id, f"{batch.base_url}\n{batch.answer.model_dump_json()}".encode())


def write_calls(folder: Path, content: bytes, expires_s: int | None) -> KeptFile:
    """Write a file of calls. Raises OSError."""
    place = folder / f"{_CALLS}-{new_number()}{'' if expires_s is None else f'.{expires_s}'}"
    _write(place, content)
    return KeptFile(place, len(content), int(place.stat().st_mtime), expires_s)


def new_answers(folder: Path, begin: str, created_s: int) -> KeptFile:
    """Make an empty file for answers, whose id begins with `begin` (`OUTPUT` or `ERRORS`). Raises OSError."""
    place = folder / f"{begin}-{new_number()}"
    _write(place, b"")
    return KeptFile(place, 0, created_s)


def remove(places: Iterable[Path]) -> None:
    """Remove these files with their indexes, in order. Raises OSError."""
    for place in places:
        for one in (place, place.with_name(place.name + INDEX)):
            with suppress(FileNotFoundError):
                one.unlink()


def _scan_tenant(tenant: str, folder: Path) -> tuple[FoundOnDisk, list[StoredBatch]]:
    found = FoundOnDisk()
    unfinished: list[StoredBatch] = []
    indexes: list[Path] = []
    for place in map(Path, os.scandir(folder)):
        if place.name.endswith(_NEW):
            place.unlink()
        elif place.name.endswith(INDEX):
            indexes.append(place)
        elif name := _FILE.fullmatch(place.name):
            status = place.stat()
            expires_s = None if name[2] is None else int(name[2])
            found.files[name[1]] = KeptFile(place, status.st_size, int(status.st_mtime), expires_s)
        elif not _BATCH.fullmatch(place.name):
            continue
        elif (batch := read_batch(tenant, place)) is None:
            logger.warning("the batch %s is of another version of Tilework, and is left as it is", place)
            found.held.update(one[1] for one in _FILE.finditer(place.read_text("utf-8", errors="replace")))
        else:
            found.batches[batch.answer.id] = kept = KeptBatch.of(batch.answer)
            if kept.ended_s is None:
                unfinished.append(batch)
    _assign_answers(found)
    _remove_unowned(found)
    needed = {one + INDEX for batch in unfinished for one in KeptBatch.of(batch.answer).answers_ids}
    for place in indexes:
        if place.name not in needed and place.name.removesuffix(INDEX) not in found.held:
            place.unlink()
    return found, unfinished


def _assign_answers(found: FoundOnDisk) -> None:
    """Assign answers to their batches. A file is as old as its batch: its own time has changed since."""
    for batch in found.batches.values():
        for file_id in batch.answers_ids:
            if (file := found.files.get(file_id)) is not None:
                file.created_s = batch.created_s
                file.batch_id = batch.id


def _remove_unowned(found: FoundOnDisk) -> None:
    """Remove empty files of answers that no batch names: a kill came before its batch was written, or after its end."""
    for file in list(found.files.values()):
        is_unowned = file.batch_id is None and file.id not in found.held
        if file.purpose == "batch_output" and is_unowned and not file.num_bytes:
            del found.files[file.id]
            remove([file.place])


def _write(place: Path, content: bytes) -> None:
    """Write all of a file or nothing, whenever the process is killed."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = place.with_name(place.name + _NEW)
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, place)
    except OSError:
        new.unlink(missing_ok=True)
        raise
