"""The calls that this server knows: the open ones, and for a while those that have ended, without their pictures."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from tilework.server.answers import Decisions, RequestStatus
from tilework.server.call import Call
from tilework.server.idempotency import Key, reused

_OVERHEAD_BYTES = 1024  # What a record takes beside its texts, roughly.


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A call that has ended. Status and decisions are kept as JSON: small, and of known size.

    `fresh_until_ns` is when its pictures expire, and its key with them; the record itself outlives them, to say so.
    `unread` holds the images of a detached call that nobody has fetched yet.
    """

    uid: str
    tenant: str
    key: Key | None
    arrived_s: float
    fresh_until_ns: int
    status_json: bytes = field(repr=False)
    decisions_json: bytes = field(repr=False)
    unread: set[int] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return len(self.status_json) + len(self.decisions_json) + _OVERHEAD_BYTES

    def status(self) -> RequestStatus:
        return RequestStatus.model_validate_json(self.status_json)

    def decisions(self) -> Decisions:
        return Decisions.model_validate_json(self.decisions_json)


class Ledger:
    """A call is open until `end` replaces it by its record; records go, oldest first, beyond any of the three bounds.

    `ttl_ns` is for how long pictures are kept; a record stays for twice as long. What belongs to another tenant is
    not found.
    """

    def __init__(self, *, max_records: int, max_bytes: int, ttl_ns: int) -> None:
        self.ttl_ns = ttl_ns
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._open: dict[str, Call] = {}
        self._ended: OrderedDict[str, Record] = OrderedDict()
        self._keys: dict[tuple[str, str], tuple[Key, str]] = {}
        self._num_bytes = 0
        self._num_open: Counter[str] = Counter()
        self._unread: set[str] = set()
        self._settled = asyncio.Event()
        self._settled.set()

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    def num_open(self, tenant: str) -> int:
        """Images of a tenant that have not ended."""
        return self._num_open[tenant]

    def open_calls(self, tenant: str) -> list[Call]:
        return [call for call in self._open.values() if call.tenant == tenant]

    def begin(self, call: Call) -> None:
        self._open[call.uid] = call
        self._num_open[call.tenant] += len(call.tickets)
        if call.key is not None:
            self._keys[call.key.tenant, call.key.text] = call.key, call.uid
        self._update()

    def end(self, record: Record, now_ns: int, *, frees_key: bool) -> None:
        """Put a record in the place of an open call; a key that led to no picture is free again."""
        self.sweep(now_ns)
        call = self._open.pop(record.uid)
        self._num_open[call.tenant] -= len(call.tickets)
        if not self._num_open[call.tenant]:
            del self._num_open[call.tenant]
        self._ended[record.uid] = record
        self._num_bytes += record.num_bytes
        if record.unread:
            self._unread.add(record.uid)
        if frees_key:
            self._free_key(record)
        while len(self._ended) > self._max_records or self._num_bytes > self._max_bytes:
            self._drop_oldest()
        self._update()

    def find(self, uid: str, tenant: str, now_ns: int) -> Call | Record | None:
        self.sweep(now_ns)
        found = self._open.get(uid) or self._ended.get(uid)
        return found if found is not None and found.tenant == tenant else None

    def find_key(self, key: Key, now_ns: int) -> Call | Record | None:
        """The call that a key led to, if it is open, or done and its pictures have not expired.

        Raises:
            ApiError: 422 if the key was used for another body.
        """
        first, uid = self._keys.get((key.tenant, key.text), (None, ""))
        found = None if first is None else self.find(uid, key.tenant, now_ns)
        if first is None or found is None or (isinstance(found, Record) and found.fresh_until_ns <= now_ns):
            return None
        if first.fingerprint != key.fingerprint:
            raise reused(key)
        return found

    def latest(self, tenant: str, limit: int, now_ns: int) -> list[Call | Record]:
        """A tenant's calls, newest first."""
        self.sweep(now_ns)
        known: tuple[Call | Record, ...] = (*self._open.values(), *self._ended.values())
        own = (entry for entry in known if entry.tenant == tenant)
        return heapq.nlargest(limit, own, key=lambda entry: (entry.arrived_s, entry.uid))

    def read(self, record: Record, index: int) -> None:
        """Somebody has fetched this picture."""
        record.unread.discard(index)
        if not record.unread:
            self._unread.discard(record.uid)
            self._update()

    def read_all(self, uid: str) -> None:
        """Somebody has got all pictures of this call."""
        if (record := self._ended.get(uid)) is not None:
            record.unread.clear()
            self._unread.discard(uid)
            self._update()

    async def settled(self) -> None:
        """Wait until no call is open and every picture that waits for its reader has been fetched."""
        await self._settled.wait()

    def sweep(self, now_ns: int) -> None:
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if oldest.fresh_until_ns + self.ttl_ns > now_ns:
                return
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, record = self._ended.popitem(last=False)
        self._num_bytes -= record.num_bytes
        self._unread.discard(record.uid)
        self._free_key(record)
        self._update()

    def _free_key(self, record: Record) -> None:
        if record.key is not None:
            place = record.key.tenant, record.key.text
            if self._keys.get(place, (None, ""))[1] == record.uid:
                del self._keys[place]

    def _update(self) -> None:
        if self._open or self._unread:
            self._settled.clear()
        else:
            self._settled.set()
