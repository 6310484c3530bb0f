"""The calls that this server knows: open ones, and for a while those that have ended, without their images."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from tilework.server.calls.arrivals import Arrivals
from tilework.server.calls.call import Call
from tilework.server.calls.idempotency import Key, reused
from tilework.server.calls.journal import CallJournal
from tilework.server.calls.records import CallRecord
from tilework.store.shares import Shares


class CallRegistry:
    """The calls of a server, open or ended. A call is open until `end` replaces it by its record.

    Records are bounded in number, bytes and age. Beyond the number or the bytes, the tenant that has the most of them
    loses its oldest record. Images are kept for `ttl_ns`, records for at most `record_ttl_ns`. A call of another tenant
    is not found. Every begin and end is written to `journal` first.
    """

    def __init__(self, *, max_records: int, max_bytes: int, ttl_ns: int, journal: CallJournal | None = None) -> None:
        self.journal = CallJournal() if journal is None else journal
        self.ttl_ns = ttl_ns
        self.record_ttl_ns = 2 * ttl_ns
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._open: dict[str, Call] = {}
        self._ended: OrderedDict[str, CallRecord] = OrderedDict()
        self._arrivals: defaultdict[str, Arrivals] = defaultdict(Arrivals)
        self._keys: dict[tuple[str, str], tuple[Key, str]] = {}
        self._shares = Shares()
        self._num_bytes = 0
        self._num_open: Counter[str] = Counter()
        self._num_input_bytes = 0
        self._num_open_files = 0
        self._unfetched: set[str] = set()
        self.is_left = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    @property
    def num_input_bytes(self) -> int:
        """Memory that the given pictures of open calls take, in bytes."""
        return self._num_input_bytes

    @property
    def num_open_files(self) -> int:
        """Number of files that open calls will have if all are done."""
        return self._num_open_files

    @property
    def num_open_calls(self) -> int:
        return len(self._open)

    @property
    def is_busy(self) -> bool:
        """True if a call is open, or an image that a client has to fetch is still here."""
        return not self._idle.is_set()

    def num_open(self, tenant: str) -> int:
        """Return the number of a tenant's images that have not ended."""
        return self._num_open[tenant]

    def open_calls(self, tenant: str) -> list[Call]:
        return [call for call in self._open.values() if call.tenant == tenant]

    def begin(self, call: Call) -> None:
        """Add an open call.

        Raises:
            NotWritten: the journal cannot keep it.
        """
        self.journal.begin(call.kept(), [ticket.checkpoint for ticket in call.tickets])
        self._arrivals[call.tenant].add(call.uid)
        self._enter(call)

    def restore(self, calls: Sequence[Call], records: Sequence[tuple[CallRecord, bool]]) -> None:
        """Take over open calls and records that the journal has kept, each record with whether its key holds."""
        entries: list[Call | CallRecord] = [*calls, *(record for record, _ in records)]
        for entry in sorted(entries, key=lambda entry: entry.arrived_s):
            self._arrivals[entry.tenant].add(entry.uid)
        for record, has_key in records:
            self._remember(record)
            if has_key:
                self._take_key(record)
        for call in calls:
            self._enter(call)

    def _enter(self, call: Call) -> None:
        self._open[call.uid] = call
        self._num_open[call.tenant] += len(call.tickets)
        self._num_input_bytes += call.ask.num_input_bytes
        self._num_open_files += call.ask.num_files
        self._take_key(call)
        self._update()

    def _take_key(self, entry: Call | CallRecord) -> None:
        if entry.key is not None:
            self._keys[entry.key.tenant, entry.key.text] = entry.key, entry.uid

    def end(self, record: CallRecord, now_ns: int, *, frees_key: bool) -> None:
        """Replace an open call by its record; a key that led to no image is free again."""
        self.sweep(now_ns)
        self.journal.end(record, has_key=not frees_key)
        self._close(record.uid)
        self._remember(record)
        if record.unfetched:
            self._unfetched.add(record.uid)
        if frees_key:
            self._free_key(record)
        dropped = []
        while len(self._ended) > self._max_records or self._num_bytes > self._max_bytes:
            is_many = len(self._ended) > self._max_records
            uid = self._shares.oldest_of_most_entries() if is_many else self._shares.oldest_of_most_bytes()
            dropped.append(self._drop(uid))
        self._dropped(dropped)

    def _remember(self, record: CallRecord) -> None:
        self._ended[record.uid] = record
        self._shares.add(record.tenant, record.uid, record.num_bytes)
        self._num_bytes += record.num_bytes

    def leave(self) -> None:
        """Leave calls that are cut off from now on open, for the next start of the server."""
        self.is_left = self.journal.is_durable

    def forget(self, call: Call) -> None:
        """Forget an open call without a record; its key is free again."""
        self.journal.forget(call.uid)
        self._close(call.uid)
        self._arrivals[call.tenant].remove(call.uid)
        self._free_key(call)
        self._update()

    def find(self, uid: str, tenant: str | None, now_ns: int) -> Call | CallRecord | None:
        """Return the call of this tenant, or of any (None)."""
        self.sweep(now_ns)
        found = self._open.get(uid) or self._ended.get(uid)
        return found if found is not None and tenant in (None, found.tenant) else None

    def find_key(self, key: Key, now_ns: int) -> Call | CallRecord | None:
        """Return the call that a key led to, if it is open, or done and its images have not expired.

        Raises:
            KeyReused: the key was used for another body.
        """
        first, uid = self._keys.get((key.tenant, key.text), (None, ""))
        found = None if first is None else self.find(uid, key.tenant, now_ns)
        if first is None or found is None or (isinstance(found, CallRecord) and found.fresh_until_ns <= now_ns):
            return None
        if first.fingerprint != key.fingerprint:
            raise reused(key)
        return found

    def latest(
        self,
        tenant: str,
        limit: int,
        now_ns: int,
        after: str | None = None,
        *,
        newest_first: bool = True,
        only_videos: bool = False,
    ) -> list[Call | CallRecord]:
        """Return at most `limit` of a tenant's calls in this order; those that follow `after`, a known call, if given.

        With `only_videos` it walks over all other calls between them.
        """
        self.sweep(now_ns)
        walk = self._arrivals[tenant].walk(after, newest_first=newest_first)
        entries = (self._open.get(uid) or self._ended[uid] for uid in walk)
        return list(islice((one for one in entries if one.ask.is_video or not only_videos), limit))

    def unfetched(self) -> list[tuple[CallRecord, int, int]]:
        """Return the images that a client may still fetch, each as its record and its index and frame there."""
        records = (self._ended[uid] for uid in self._unfetched)
        return [(record, index, frame) for record in records for index, frame in record.unfetched]

    def untold(self) -> list[CallRecord]:
        """Return the calls whose webhooks have not been told yet."""
        return [record for record in self._ended.values() if record.webhook is not None]

    def is_known(self, uid: str) -> bool:
        """Return whether there is a record of the call, which has ended."""
        return uid in self._ended

    def mark_told(self, uid: str) -> None:
        """Note that the webhook of this call was told."""
        if (record := self._ended.get(uid)) is not None:
            self._ended[uid] = told = replace(record, webhook=None)
            self.journal.change(told)

    def mark_fetched(self, record: CallRecord, index: int, frame: int = 0) -> None:
        """Note that this image was fetched, or is gone: a stop need not wait for it."""
        record.unfetched.discard((index, frame))
        if not record.unfetched:
            self._unfetched.discard(record.uid)
            self._update()

    def mark_all_fetched(self, uid: str) -> None:
        """Note that a client has all images of this call."""
        if (record := self._ended.get(uid)) is not None:
            record.unfetched.clear()
            self._unfetched.discard(uid)
            self._update()

    def release(self, record: CallRecord) -> None:
        """Note that the images of this call are deleted; its key is free again."""
        self.mark_all_fetched(record.uid)
        self.journal.free_key(record.uid)
        self._free_key(record)

    async def wait_until_idle(self) -> None:
        """Wait until no call is open and every image that a client has to fetch was fetched or is gone."""
        await self._idle.wait()

    def sweep(self, now_ns: int) -> None:
        dropped = []
        while self._ended and next(iter(self._ended.values())).fresh_until_ns + self.ttl_ns <= now_ns:
            dropped.append(self._drop(next(iter(self._ended))))
        self._dropped(dropped)

    def _close(self, uid: str) -> None:
        call = self._open.pop(uid)
        self._num_open[call.tenant] -= len(call.tickets)
        self._num_input_bytes -= call.ask.num_input_bytes
        self._num_open_files -= call.ask.num_files
        if not self._num_open[call.tenant]:
            del self._num_open[call.tenant]

    def remove(self, record: CallRecord) -> None:
        """Forget a call that has ended."""
        self._dropped([self._drop(record.uid)])

    def _drop(self, uid: str) -> str:
        record = self._ended.pop(uid)
        self._arrivals[record.tenant].remove(record.uid)
        self._shares.remove(record.tenant, record.uid)
        self._num_bytes -= record.num_bytes
        self._unfetched.discard(record.uid)
        self._free_key(record)
        return record.uid

    def _dropped(self, uids: Sequence[str]) -> None:
        if uids:
            self.journal.drop(uids)
        self._update()

    def _free_key(self, entry: Call | CallRecord) -> None:
        if entry.key is not None:
            place = entry.key.tenant, entry.key.text
            if self._keys.get(place, (None, ""))[1] == entry.uid:
                del self._keys[place]

    def _update(self) -> None:
        if self._open or self._unfetched:
            self._idle.clear()
        else:
            self._idle.set()
