"""The files of batches, and batches themselves, of each tenant: an index in memory of a directory."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilework.server.batches import disk
from tilework.server.batches.disk import FoundOnDisk, KeptBatch, KeptFile, StoredBatch
from tilework.server.config import ServerConfig
from tilework.server.schema.batch_answers import FileAnswer
from tilework.server.text import counted
from tilework.store.files import OpenFile
from tilework.store.results import Result

KEPT_S = 3600
"""Seconds after the end of a batch in which its answers do not make room for another batch."""
_RETRY_S = 60
_MOST_DELETED = 1000  # As many as a page has.


class ShelfFull(Exception):
    """The files of batches take all the room that there is."""


class TooMany(Exception):
    """A tenant has as many files or batches as it may have. `retry_s` is when there may be room."""

    def __init__(self, message: str, retry_s: int = _RETRY_S) -> None:
        super().__init__(message)
        self.retry_s = retry_s


@dataclass(slots=True)
class _Owned:
    """The files and batches of a tenant, with `num_files` files of calls.

    Adding and removing happens under the lock, so that the numbers are those that were checked. `deleted` are the ids
    of the files that were removed last, with their ages. `first_to_go` is the batch that may make room before all
    others, and when, as far as that is known.
    """

    found: FoundOnDisk = field(default_factory=FoundOnDisk)
    first_to_go: tuple[float, str] | None = None
    deleted: dict[str, tuple[int, str]] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_files: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_files = sum(one.purpose == "batch" for one in self.found.files.values())


class BatchShelf:
    """Files and batches of tenants below `path`, within the limits of the settings. Only the event loop uses it.

    Only `open` looks into the directory. All other methods use the index; those that read or write a file do so on a
    thread. A file that is in use by a batch that has not ended neither expires nor is removed.
    """

    def __init__(self, path: Path, config: ServerConfig) -> None:
        self.path = path
        self.num_bytes = 0
        self.unfinished: list[StoredBatch] = []
        """Batches that the previous start has left, the oldest first, to be resumed."""
        self._config = config
        self._tenants: dict[str, _Owned] = {}
        self._opening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Build the index, at the first call. Raises OSError: the next call tries again."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._open())
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        found, self.unfinished = await asyncio.to_thread(disk.scan, self.path)
        self._tenants = {tenant: _Owned(one) for tenant, one in found.items()}
        self.num_bytes = sum(file.num_bytes for one in found.values() for file in one.files.values())

    def lock(self, tenant: str) -> asyncio.Lock:
        """Return the lock to hold while looking at what a tenant has and then adding or removing some."""
        return self._owned(tenant).lock

    # Files.

    def check_room(self, tenant: str, num_bytes: int, num_tenants: int) -> None:
        """Check that a tenant may add a file of calls. Raises ShelfFull, TooMany."""
        most = self._config.max_batch_files
        owned = self._owned(tenant)
        if owned.num_files >= most:
            raise TooMany(
                f"You have {counted(owned.num_files, 'file')} of calls, and may have {most}. Delete those that are "
                "done, or let files expire (expires_after)."
            )
        held = self.num_bytes
        own = sum(one.num_bytes for one in owned.found.files.values())
        if held + num_bytes > (total := self._config.batch_bytes):
            raise ShelfFull(f"the files of batches take {held} bytes of {total}")
        if num_tenants > 1 and own + num_bytes > total // 2:
            raise TooMany(
                f"Your files take {own} bytes. A tenant may have {total // 2}, which leaves room for others. Delete "
                "those that are done, or let files expire (expires_after)."
            )

    async def add(self, tenant: str, content: bytes, expires_s: int | None, num_tenants: int = 1) -> FileAnswer:
        """Keep a file of calls. Raises ShelfFull, TooMany, OSError."""
        async with self.lock(tenant):
            self.check_room(tenant, len(content), num_tenants)
            with self._reserved(len(content)):
                file = await asyncio.to_thread(disk.write_calls, self._folder(tenant), content, expires_s)
            self._add(tenant, file)
        return self.about(tenant, file)

    def file(self, tenant: str, file_id: str) -> KeptFile | None:
        """Return the file of a tenant, if there is one of this id that has not expired."""
        file = self._owned(tenant).found.files.get(file_id)
        return None if file is None or self._is_gone(tenant, file, time.time()) else file

    def files(self, tenant: str) -> list[KeptFile]:
        """Return the files of a tenant, newest first; the order is the same after every start."""
        now_s = time.time()
        found = self._owned(tenant).found
        in_use = _in_use(found)
        kept = [one for one in found.files.values() if one.id in in_use or not self._is_expired(found, one, now_s)]
        return sorted(kept, key=lambda one: disk.age_of(one.created_s, one.id), reverse=True)

    def with_deleted(self, tenant: str, files: list[KeptFile]) -> list[str]:
        """Return the ids of these files, in their order, and between them those of files that were deleted lately."""
        ages = self._owned(tenant).deleted | {one.id: disk.age_of(one.created_s, one.id) for one in files}
        return sorted(ages, key=ages.__getitem__, reverse=True)

    def about(self, tenant: str, file: KeptFile) -> FileAnswer:
        return file.answer(self._expires_s(self._owned(tenant).found, file))

    def content(self, file: KeptFile) -> Result:
        """Open the present content of a file, which may grow. The caller closes it. Blocks. Raises OSError."""
        opened = file.place.open("rb")
        return OpenFile(opened, 0, os.fstat(opened.fileno()).st_size, "application/jsonl")

    def user_of(self, tenant: str, file_id: str) -> str | None:
        """Return the id of a batch that has not ended and has this file, if there is one."""
        return _in_use(self._owned(tenant).found).get(file_id)

    async def delete(self, tenant: str, file: KeptFile) -> None:
        """Delete a file. Raises OSError."""
        await self._remove(tenant, [file])

    async def new_outputs(self, tenant: str, created_s: int) -> tuple[str, str]:
        """Make two empty files, for good answers and for others, and return their ids. Raises OSError."""
        folder = self._folder(tenant)
        begins = (disk.OUTPUT, disk.ERRORS)
        made = [await asyncio.to_thread(disk.new_answers, folder, one, created_s) for one in begins]
        for file in made:
            self._add(tenant, file)
        return made[0].id, made[1].id

    def has_grown(self, file: KeptFile, num_bytes: int) -> None:
        """Note that answers were written to a file, and its size."""
        self.num_bytes += num_bytes - file.num_bytes
        file.num_bytes = num_bytes

    # Batches.

    async def keep(self, batch: StoredBatch) -> None:
        """Write a batch as it stands. Raises OSError."""
        await asyncio.to_thread(disk.write_batch, self._folder(batch.tenant), batch)
        owned = self._owned(batch.tenant)
        kept = KeptBatch.of(batch.answer)
        found = owned.found
        owned.first_to_go = None
        found.batches[kept.id] = kept
        for file_id in kept.answers_ids:
            if file_id in found.files:
                found.files[file_id].batch_id = kept.id

    async def keep_ended(self, batch: StoredBatch) -> None:
        """Write a batch that has ended. It names its files with answers; empty ones are removed. Raises OSError.

        The batch is written first, so that it names no file that is not there.
        """
        found = self._owned(batch.tenant).found.files
        answer = batch.answer
        names = {name: getattr(answer, name) for name in ("output_file_id", "error_file_id")}
        empty = {name: one for name, one in names.items() if one not in found or not found[one].num_bytes}
        await self.keep(replace(batch, answer=answer.model_copy(update=dict.fromkeys(empty))))
        async with self.lock(batch.tenant):
            with suppress(OSError):  # The next start removes the files that are left.
                await self._remove(batch.tenant, [found[one] for one in empty.values() if one in found])

    def has(self, tenant: str, batch_id: str) -> bool:
        return batch_id in self._owned(tenant).found.batches

    async def read(self, tenant: str, batch_ids: list[str]) -> list[StoredBatch]:
        """Read these batches, without those that have gone meanwhile. Raises OSError."""
        return await asyncio.to_thread(_read, tenant, self._folder(tenant), batch_ids)

    def batches(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's batches, newest first."""
        found = self._owned(tenant).found.batches.values()
        return [one.id for one in sorted(found, key=lambda one: disk.age_of(one.created_s, one.id), reverse=True)]

    async def make_room(self, tenant: str) -> None:
        """Make room for another batch: at the limit, remove the batch that ended first. Raises TooMany, OSError.

        Its answers, which are kept for at least `KEPT_S`, are removed with it.
        """
        owned = self._owned(tenant)
        most = self._config.max_batches
        now_s = time.time()
        found = owned.found
        while len(found.batches) >= most:
            if owned.first_to_go is None:  # Cached for clients that ask again and again.
                ended = [(_goes_s(one), one.id) for one in found.batches.values() if one.ended_s is not None]
                owned.first_to_go = min(ended, default=(math.inf, ""))
            goes_s, batch_id = owned.first_to_go
            if goes_s > now_s:
                wait_s = _RETRY_S if goes_s == math.inf else max(1, int(goes_s - now_s))
                raise TooMany(
                    f"You have {len(found.batches)} batches, and may have {most}; none of them has answers older than "
                    f"{KEPT_S // 60} minutes, which could make room. Send it later, or put more calls into one batch.",
                    wait_s,
                )
            await self._remove_batch(tenant, found.batches[batch_id])

    async def sweep(self) -> None:
        """Remove what has expired. Raises OSError."""
        for tenant, owned in list(self._tenants.items()):
            async with owned.lock:
                found = owned.found
                now_s = time.time()
                for batch in [one for one in found.batches.values() if self._is_past(one, now_s)]:
                    await self._remove_batch(tenant, batch)
                in_use = _in_use(found)
                expired = [one for one in found.files.values() if self._is_expired(found, one, now_s)]
                await self._remove(tenant, [one for one in expired if one.id not in in_use])

    def _owned(self, tenant: str) -> _Owned:
        return self._tenants.setdefault(tenant, _Owned())

    def _folder(self, tenant: str) -> Path:
        return self.path / f"{disk.TENANT}{tenant}"

    def _add(self, tenant: str, file: KeptFile) -> None:
        owned = self._owned(tenant)
        owned.found.files[file.id] = file
        owned.num_files += file.purpose == "batch"
        self.num_bytes += file.num_bytes

    @contextmanager
    def _reserved(self, num_bytes: int) -> Iterator[None]:
        """Reserve room that no other upload takes while this one is written."""
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes

    async def _remove(self, tenant: str, files: list[KeptFile]) -> None:
        """Remove files, their index entries first: a file that is being removed is not found any more."""
        for file in files:
            owned = self._owned(tenant)
            del owned.found.files[file.id]
            owned.num_files -= file.purpose == "batch"
            self.num_bytes -= file.num_bytes
            owned.deleted[file.id] = disk.age_of(file.created_s, file.id)
            if len(owned.deleted) > _MOST_DELETED:
                del owned.deleted[next(iter(owned.deleted))]
        if files:
            await asyncio.to_thread(disk.remove, [one.place for one in files])

    async def _remove_batch(self, tenant: str, batch: KeptBatch) -> None:
        """Remove a batch, its answers first, so that a kill leaves no answers without a batch."""
        owned = self._owned(tenant)
        found = owned.found
        owned.first_to_go = None
        del found.batches[batch.id]
        await self._remove(tenant, [found.files[one] for one in batch.answers_ids if one in found.files])
        await asyncio.to_thread(disk.remove, [self._folder(tenant) / batch.id])

    def _is_gone(self, tenant: str, file: KeptFile, now_s: float) -> bool:
        found = self._owned(tenant).found
        return self._is_expired(found, file, now_s) and file.id not in _in_use(found)

    def _is_expired(self, found: FoundOnDisk, file: KeptFile, now_s: float) -> bool:
        expires_s = self._expires_s(found, file)
        return expires_s is not None and expires_s <= now_s

    def _expires_s(self, found: FoundOnDisk, file: KeptFile) -> int | None:
        """Return when a file expires, as far as that is known: answers live from the end of their batch on."""
        ttl_s = int(self._config.batch_ttl_s)
        if file.expires_s is not None:
            return file.expires_s
        if file.id in found.held:
            return None
        if file.batch_id is None or (batch := found.batches.get(file.batch_id)) is None:
            return file.created_s + ttl_s
        return None if batch.ended_s is None else batch.ended_s + (batch.output_ttl_s or ttl_s)

    def _is_past(self, batch: KeptBatch, now_s: float) -> bool:
        ttl_s = max(int(self._config.batch_ttl_s), batch.output_ttl_s or 0)
        return batch.ended_s is not None and batch.ended_s + ttl_s <= now_s


def _read(tenant: str, folder: Path, batch_ids: list[str]) -> list[StoredBatch]:
    found = list[StoredBatch]()
    for batch_id in batch_ids:
        try:
            batch = disk.read_batch(tenant, folder / batch_id)
        except FileNotFoundError:
            continue
        if batch is not None:
            found.append(batch)
    return found


def _in_use(found: FoundOnDisk) -> dict[str, str]:
    """Return the files of batches that have not ended, each with the id of such a batch."""
    return {file_id: one.id for one in found.batches.values() if one.ended_s is None for file_id in one.file_ids}


def _goes_s(batch: KeptBatch) -> int:
    """Return when a batch that has ended may make room for another one."""
    assert batch.ended_s is not None
    return batch.ended_s + (KEPT_S if batch.has_answers else 0)
