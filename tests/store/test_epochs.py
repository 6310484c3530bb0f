"""What a server takes over from one that it had to fence, and what that one can still do."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from store.silent import SILENT, Clock, Lost, another_machine, lost
from tilework.store.durable import DurableDirectory
from tilework.store.epochs import JOURNAL
from tilework.store.files import OpenFile
from tilework.store.journal import Ended, Journal, NotWritten, OpenCall
from tilework.store.results import Stored, Unwritten
from waiting import PATIENCE_S, until

LIMITS = {"max_bytes": 1 << 20, "ttl_ns": 10**12}


def opened(uid: str) -> OpenCall:
    return OpenCall(uid=uid, model="m", document=b"x" * 2000)


def uids(directory: DurableDirectory) -> list[str]:
    return [call.uid for call in directory.journal.open_calls()]


def take(path: Path) -> DurableDirectory:
    """As a standby on another machine."""
    with another_machine(Clock()):
        return DurableDirectory(path, lambda: None, times=SILENT, on_lost=lost)


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[DurableDirectory]:
    directory = DurableDirectory(tmp_path, times=SILENT, on_lost=lost)
    yield directory
    directory.close()


def test_a_writer_that_is_stopped_within_a_transaction_delays_nothing(hung: DurableDirectory) -> None:
    """It holds the write lock of its journal; what it had not committed is not taken over."""
    hung.journal.begin(opened("a"))
    hung.journal.begin(opened("b"))
    hung.journal.end(Ended(uid="b", has_key=False, document=b""))
    connection = hung.journal._connection
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO call (uid, model, document) VALUES ('c', 'm', '')")
    with closing(take(hung.path)) as taken:
        assert taken.data == hung.path / "epoch-2"
        assert uids(taken) == ["a"]
        assert [record.uid for record in taken.journal.records()] == ["b"]
        taken.journal.begin(opened("d"))
        connection.execute("COMMIT")
        assert uids(hung) == ["a", "c"], "it writes to a file that is no longer read"
        assert uids(taken) == ["a", "d"]
        modes = {path.name: path.stat().st_mode & 0o077 for path in (taken.data, *taken.data.iterdir())}
        assert set(modes.values()) == {0}


def test_what_was_synced_before_a_fence_is_taken_over_and_after_it_no_client_is_told(hung: DurableDirectory) -> None:
    async def told(uid: str) -> None:
        hung.journal.begin(opened(uid))
        await hung.journal.sync()

    asyncio.run(told("before"))
    with closing(take(hung.path)) as taken:
        with pytest.raises(Lost):
            asyncio.run(told("after"))
        assert uids(taken) == ["before"]


def test_its_paths_lead_to_no_file_that_the_next_one_has(hung: DurableDirectory) -> None:
    async def put_and_get() -> None:
        results = hung.results(**LIMITS)
        pictures = hung.given_pictures()
        assert isinstance(await results.put("old", b"a picture", "image/png", 0), Stored)
        (name,) = await pictures.write([b"given"])
        pictures.hold("call", [name])
        with closing(take(hung.path)) as taken:
            after = taken.results(**LIMITS)
            assert isinstance(await results.put("x", b"late", "image/png", 0), Unwritten)
            await results.delete("old")
            pictures.release(["call"])
            await asyncio.get_running_loop().shutdown_default_executor()
            found = await after.get("old", 0)
            assert isinstance(found, OpenFile)
            with closing(found):
                assert found.num_bytes == len(b"a picture")
            assert taken.given_pictures().read(name) == b"given"

    with patch.object(asyncio, "to_thread", _at_once):
        asyncio.run(put_and_get())


async def _at_once(work: Callable[..., Any], *given: Any) -> Any:
    return work(*given)


def test_a_log_that_begins_anew_while_it_is_copied_is_copied_again(hung: DurableDirectory) -> None:
    """The owner goes on meanwhile: pages move to the file after that was copied, and others take their place."""
    for number in range(50):
        hung.journal.begin(opened(f"before-{number}"))
    copy, turns = shutil.copyfile, list[str]()

    def go_on(old: Path, new: Path, **how: Any) -> Path:
        copied = copy(old, new, **how)
        turns.append(old.name)
        if turns == [JOURNAL]:
            hung.journal.tidy()
            hung.journal.begin(opened("meanwhile"))
        return copied

    with patch.object(shutil, "copyfile", go_on), closing(take(hung.path)) as taken:
        assert uids(taken) == [*(f"before-{number}" for number in range(50)), "meanwhile"]
    assert turns.count(JOURNAL) == 2


@pytest.mark.parametrize("amid", ["copy", "move"])
def test_a_standby_that_ends_amid_a_take_over_leaves_it_to_the_next_start(hung: DurableDirectory, amid: str) -> None:
    hung.journal.begin(opened("a"))
    hung.results(**LIMITS)
    where = {"copy": "shutil.copyfile", "move": "tilework.store.epochs._older"}[amid]
    with patch(where, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        take(hung.path)
    with closing(DurableDirectory(hung.path, times=SILENT)) as after:
        assert after.data.name == "epoch-2"
        assert uids(after) == ["a"]
        assert [one.name for one in after.data.iterdir() if one.is_dir()] == ["results"]


def test_the_next_start_removes_what_a_fenced_owner_has(hung: DurableDirectory) -> None:
    hung.journal.begin(opened("a"))
    take(hung.path).close()
    assert uids(hung) == ["a"], "until then it may be in use"
    assert (hung.path / JOURNAL).exists()
    (hung.path / "batches").mkdir()
    (hung.path / "events-1.jsonl").touch()
    with closing(DurableDirectory(hung.path, times=SILENT)) as after:
        assert uids(after) == ["a"]
        names = {path.name for path in hung.path.iterdir()}
        assert names == {"lock", "lock.standbys", "epoch-2", "events-1.jsonl"}
    with closing(take_again(hung.path)) as third:
        assert (third.data.name, uids(third)) == ("epoch-3", ["a"])


def take_again(path: Path) -> DurableDirectory:
    """From an owner that hangs like the first."""
    directory = DurableDirectory(path, times=SILENT, on_lost=lost)
    try:
        return take(path)
    finally:
        directory.close()


# What is on the disk.


def test_calls_that_wait_at_the_same_time_share_an_fsync_and_none_returns_before_its_own(tmp_path: Path) -> None:
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    steps = list[str]()

    def fdatasync(_descriptor: int) -> None:
        begun.release()
        assert go_on.acquire(timeout=PATIENCE_S)
        steps.append("on the disk")

    async def begin(journal: Journal, uid: str) -> None:
        journal.begin(opened(uid))
        await journal.sync()
        steps.append(uid)

    async def scenario() -> None:
        with closing(Journal(tmp_path / "j", confirm=lambda: steps.append("confirmed"))) as journal:
            first = asyncio.create_task(begin(journal, "first"))
            await until(lambda: begun.acquire(blocking=False))
            others = [asyncio.create_task(begin(journal, uid)) for uid in ("second", "third")]
            await until(lambda: len(journal.open_calls()) == 3)
            go_on.release()
            await first
            await until(lambda: begun.acquire(blocking=False))
            go_on.release()
            await asyncio.gather(*others)
            await journal.sync()  # There is nothing more.

    with patch.object(os, "fdatasync", fdatasync):
        asyncio.run(scenario())
    assert steps == ["on the disk", "confirmed", "first", "on the disk", "confirmed", "second", "third"]


def test_what_could_not_be_brought_to_the_disk_is_said(tmp_path: Path) -> None:
    failed = list[Exception]()

    async def scenario() -> None:
        with closing(Journal(tmp_path / "j", failed.append)) as journal:
            journal.begin(opened("a"))
            broken = patch.object(os, "fdatasync", side_effect=OSError(5, "Input/output error"))
            with broken, pytest.raises(NotWritten, match=r"j: Input/output error"):
                await journal.sync()
            await journal.sync()

    asyncio.run(scenario())
    assert [type(error) for error in failed] == [OSError]


def test_a_journal_that_cannot_be_copied_is_refused(hung: DurableDirectory) -> None:
    broken = sqlite3.DatabaseError("database disk image is malformed")
    with patch("tilework.store.epochs._copy", side_effect=broken), pytest.raises(Exception, match="cannot be copied"):
        take(hung.path)
