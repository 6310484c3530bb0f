"""The part of calls that outlives the server: their journal in a durable directory; without one, nothing."""

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
from tilework.server.calls.records import CallRecord
from tilework.store.given_pictures import GivenPictures
from tilework.store.journal import Added, Ended, Journal, JournalUnusable, NotWritten, OpenCall

logger = logging.getLogger("tilework.server")

TIDY_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCall:
    """The data of an open call that are needed to go on with it; times and identity as in `Call`."""

    uid: str
    key: Key | None
    ask: ImageCall
    arrival_ns: int
    arrived_s: float
    identity: str = ""  # Empty if an earlier version has kept the call: its images begin anew.

    @property
    def image_uids(self) -> tuple[str, ...]:
        return tuple(f"{self.uid}-{index}" for index in range(len(self.ask.specs)))

    @property
    def deadline_ns(self) -> int | None:
        """Deadline on the engine's clock, as `arrival_ns`."""
        return None if self.ask.slo_s is None else self.arrival_ns + ns_from_s(self.ask.slo_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAgain:
    """A call that an earlier start left open, with a checkpoint of each image. `lost` says what is missing, if so."""

    call: KeptCall
    checkpoints: tuple[Checkpoint, ...]
    lost: str = ""


_CALL = TypeAdapter(KeptCall)
_RECORD = TypeAdapter(CallRecord)


class CallJournal:
    """Records every call that begins or ends, on the event loop. This base class keeps nothing."""

    is_durable = False
    pictures: GivenPictures | None = None

    def begin(self, call: KeptCall, checkpoints: Sequence[Checkpoint]) -> None:
        """Keep a call, with a checkpoint of where each image begins.

        Raises:
            NotWritten: it cannot be kept.
        """

    async def sync(self) -> None:
        """Wait until all that was recorded outlives the machine; to be called before a client learns of it.

        Raises:
            NotWritten: it may not.
        """

    def end(self, record: CallRecord, *, has_key: bool) -> None:
        """Record that a call has ended: no part of it is to be done again."""

    def change(self, record: CallRecord) -> None:
        """Replace the record of a call that has ended."""

    def forget(self, uid: str) -> None:
        """Forget an open call, without a record."""

    def free_key(self, uid: str) -> None:
        """Free the idempotency key of a call that has ended: it does not lead to the call any more."""

    def drop(self, uids: Sequence[str]) -> None:
        """Forget these records."""

    def add(self, *added: Added) -> None:
        """Record models or LoRAs that are served from now on, and that the server was not started with."""

    def remove(self, model: str, lora: str = "") -> None:
        """Forget a LoRA; without `lora`, a model with all its LoRAs."""

    def added(self) -> Sequence[Added]:
        """Return the models and LoRAs that were added before this start, in order."""
        return ()


class DurableJournal(CallJournal):
    """Keeps calls in the journal of a durable directory. An end that cannot be written is only logged: a client that
    waits gets its images.
    """

    is_durable = True

    def __init__(self, journal: Journal, pictures: GivenPictures) -> None:
        self.pictures: GivenPictures = pictures
        self._journal = journal
        self._unwritten: set[str] = set()  # Calls that have ended, but are still open in the journal.
        self._closed: set[str] = set()  # Calls that are not open in the journal any more, which may not be on the disk.

    def serve(self, models: Collection[str]) -> None:
        """Check that the open calls are for these models.

        Raises:
            JournalUnusable: there are open calls for another model.
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

    def end(self, record: CallRecord, *, has_key: bool) -> None:
        try:
            self._journal.end(Ended(uid=record.uid, has_key=has_key, document=_RECORD.dump_json(record)))
            self._closed |= {record.uid, *self._unwritten}
            self._unwritten.clear()
        except NotWritten as error:
            self._unwritten.add(record.uid)
            logger.error("call %s has ended, but a start before the next end would repeat it: %s", record.uid, error)

    def change(self, record: CallRecord) -> None:
        try:
            self._journal.change(record.uid, _RECORD.dump_json(record))
        except NotWritten as error:
            logger.warning("the next start would send the webhook of call %s again: %s", record.uid, error)

    def forget(self, uid: str) -> None:
        try:
            self._journal.forget(uid)
            self._closed.add(uid)
        except NotWritten as error:
            logger.error("call %s is forgotten, but the next start would repeat it: %s", uid, error)

    def free_key(self, uid: str) -> None:
        try:
            self._journal.free_key(uid)
        except NotWritten as error:
            logger.warning("the next start would use the key of call %s for it again: %s", uid, error)

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
            logger.error("the next start would not serve these: %s (%s)", what, error)

    def remove(self, model: str, lora: str = "") -> None:
        try:
            self._journal.remove(model, lora)
        except NotWritten as error:
            logger.error("the next start would serve %s again: %s", lora or model, error)

    def added(self) -> Sequence[Added]:
        return self._journal.added()

    def open_calls(self) -> list[OpenAgain]:
        """Return open calls in order of arrival; remove pictures of no open call. Raises JournalUnusable."""
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
            logger.error("call %s fails: an image in the durable directory cannot be read: %s", call.uid, error)
            return OpenAgain(call=call, checkpoints=checkpoints, lost="one of its input images cannot be read again")

    def _hold(self, call: KeptCall) -> None:
        self.pictures.hold(call.uid, [one.file for one in call.ask.files])

    def records(self) -> list[tuple[CallRecord, bool]]:
        """Return records in the order of their ends, each with whether its key leads to it. Raises JournalUnusable."""
        return [(_read(_RECORD, ended.document), ended.has_key) for ended in self._journal.records()]

    async def keep_tidy(self) -> None:
        """Move the write-ahead log into the journal every `TIDY_S`, on a thread, since that waits for the disk."""
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
