"""What outlives the server of calls: with a durable directory their journal, without one nothing."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from tilework.core.checkpoint import Checkpoint
from tilework.core.time import ns_from_s
from tilework.server.calls.idempotency import Key
from tilework.server.calls.parsing.file_parts import Undecodable
from tilework.server.calls.parsing.image_call import ImageCall
from tilework.server.calls.records import Record
from tilework.store.given_pictures import GivenPictures
from tilework.store.journal import Added, Ended, Journal, JournalUnusable, NotWritten, OpenCall

logger = logging.getLogger("tilework.server")

TIDY_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCall:
    """All that has to be known of an open call to go on with it; times and identity as in `Call`."""

    uid: str
    key: Key | None
    ask: ImageCall
    arrival_ns: int
    arrived_s: float
    identity: str = ""  # Of calls that an earlier version has kept: their images begin anew.

    @property
    def image_uids(self) -> tuple[str, ...]:
        return tuple(f"{self.uid}-{index}" for index in range(len(self.ask.specs)))

    @property
    def deadline_ns(self) -> int | None:
        """On the engine's clock, as `arrival_ns`."""
        return None if self.ask.slo_s is None else self.arrival_ns + ns_from_s(self.ask.slo_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAgain:
    """A call that an earlier start has left open, with a checkpoint of each image. `lost` says what it lacks, if so."""

    call: KeptCall
    checkpoints: tuple[Checkpoint, ...]
    lost: str = ""


_CALL = TypeAdapter(KeptCall)
_RECORD = TypeAdapter(Record)


class CallJournal:
    """Records every call that begins or ends, on the event loop. This one keeps nothing."""

    is_durable = False
    pictures: GivenPictures | None = None

    def begin(self, call: KeptCall, checkpoints: Sequence[Checkpoint]) -> None:
        """Keep a call, with a checkpoint of where each image begins.

        Raises:
            NotWritten: it cannot be kept.
        """

    async def sync(self) -> None:
        """Wait until all that was recorded outlives the machine: before a client learns of it.

        Raises:
            NotWritten: it may not.
        """

    def end(self, record: Record, *, has_key: bool) -> None:
        """A call has ended; nothing of it is to be done again."""

    def change(self, record: Record) -> None:
        """The record of a call that has ended is another now."""

    def forget(self, uid: str) -> None:
        """An open call is no more, and there is no record of it."""

    def free_key(self, uid: str) -> None:
        """The key of a call that has ended leads to it no more."""

    def drop(self, uids: Sequence[str]) -> None:
        """These records are no more."""

    def add(self, *added: Added) -> None:
        """Models or LoRAs are served from now on that the server was not started with."""

    def remove(self, model: str, lora: str = "") -> None:
        """A LoRA is no more, or without one a model with all its LoRAs."""

    def added(self) -> Sequence[Added]:
        """What was added before this start, in this order."""
        return ()


class DurableJournal(CallJournal):
    """Keeps calls in the journal of a durable directory. An end that cannot be written is only logged: a client that
    waits for pictures gets them."""

    is_durable = True

    def __init__(self, journal: Journal, pictures: GivenPictures) -> None:
        self.pictures: GivenPictures = pictures
        self._journal = journal
        self._unwritten: set[str] = set()  # Calls that are no more, but still open in the journal.
        self._closed: set[str] = set()  # Calls that are no more, nor in the journal, which may not be on the disk.

    def serve(self, models: Collection[str]) -> None:
        """What begins from now on is of these models.

        Raises:
            JournalUnusable: there are open calls of another one.
        """
        strays = [call for call in self._journal.open_calls() if call.model not in models]
        if strays:
            other = strays[0].model
            raise JournalUnusable(
                f"the durable directory holds {len(strays)} open calls for the model {other}, and this server has"
                f" {', '.join(models)}; serve {other}, or give another directory"
            )

    def begin(self, call: KeptCall, checkpoints: Sequence[Checkpoint]) -> None:
        document = _CALL.dump_json(replace(call, ask=call.ask.without_pixels()))
        by_uid = dict(zip(call.image_uids, checkpoints, strict=True))
        kept = OpenCall(uid=call.uid, model=call.ask.model, document=document, checkpoints=by_uid)
        self._journal.begin(kept)
        self._hold(call)

    async def sync(self) -> None:
        closed = frozenset(self._closed)
        await self._journal.sync()
        self.pictures.release(closed)
        self._closed -= closed

    def end(self, record: Record, *, has_key: bool) -> None:
        try:
            self._journal.end(Ended(uid=record.uid, has_key=has_key, document=_RECORD.dump_json(record)))
            self._closed |= {record.uid, *self._unwritten}
            self._unwritten.clear()
        except NotWritten as error:
            self._unwritten.add(record.uid)
            logger.error("call %s has ended, but a start before the next end would repeat it: %s", record.uid, error)

    def change(self, record: Record) -> None:
        try:
            self._journal.change(record.uid, _RECORD.dump_json(record))
        except NotWritten as error:
            logger.warning("after the next start the webhook of call %s would be told again: %s", record.uid, error)

    def forget(self, uid: str) -> None:
        try:
            self._journal.forget(uid)
            self._closed.add(uid)
        except NotWritten as error:
            logger.error("call %s is no more, but the next start would repeat it: %s", uid, error)

    def free_key(self, uid: str) -> None:
        try:
            self._journal.free_key(uid)
        except NotWritten as error:
            logger.warning("after the next start the key of call %s would lead to it again: %s", uid, error)

    def drop(self, uids: Sequence[str]) -> None:
        try:
            self._journal.drop(uids)
        except NotWritten as error:
            logger.warning("the next start would still know calls that have expired: %s", error)

    def add(self, *added: Added) -> None:
        try:
            self._journal.add(*added)
        except NotWritten as error:
            what = ", ".join(one.lora or one.model for one in added)
            logger.error("after the next start these would not be served: %s (%s)", what, error)

    def remove(self, model: str, lora: str = "") -> None:
        try:
            self._journal.remove(model, lora)
        except NotWritten as error:
            logger.error("after the next start %s would be served again: %s", lora or model, error)

    def added(self) -> Sequence[Added]:
        return self._journal.added()

    def open_calls(self) -> list[OpenAgain]:
        """In the order of their arrival; pictures of no other call are removed. Raises JournalUnusable."""
        found = [self._open_again(one) for one in self._journal.open_calls()]
        self.pictures.keep_held()
        return found

    def _open_again(self, kept: OpenCall) -> OpenAgain:
        call = _read(_CALL, kept.document)
        checkpoints = tuple(kept.checkpoints[uid] for uid in call.image_uids)
        self._hold(call)
        try:
            return OpenAgain(call=replace(call, ask=call.ask.with_pixels(self.pictures)), checkpoints=checkpoints)
        except (OSError, Undecodable) as error:
            logger.error("call %s fails: a picture in the durable directory cannot be read: %s", call.uid, error)
            return OpenAgain(
                call=call, checkpoints=checkpoints, lost="a picture that it was given cannot be read again"
            )

    def _hold(self, call: KeptCall) -> None:
        self.pictures.hold(call.uid, [one.file for one in call.ask.files])

    def records(self) -> list[tuple[Record, bool]]:
        """In the order of their ends, each with whether its key leads to it. Raises JournalUnusable."""
        return [(_read(_RECORD, ended.document), ended.has_key) for ended in self._journal.records()]

    async def keep_tidy(self) -> None:
        """Bring what was written to its place now and then, on a thread, since it waits for the disk."""
        while True:
            await asyncio.sleep(TIDY_S)
            try:
                await asyncio.to_thread(self._journal.tidy)
            except sqlite3.Error as error:
                logger.warning("the journal's write-ahead log grows: %s", error)


def _read(kind: TypeAdapter[T], document: bytes) -> T:
    try:
        return kind.validate_json(document)
    except ValidationError as error:
        raise JournalUnusable(
            f"the durable directory was written by another version of tilework ({error.errors()[0]['loc']}); let that"
            " one finish its calls, or give another directory"
        ) from error
