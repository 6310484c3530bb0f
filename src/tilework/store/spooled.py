"""Results on other machines, and on this machine's disk while those do not take them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from tilework.core.time import s_from_ns
from tilework.store.disk import Disk
from tilework.store.durable import DurableDirectory
from tilework.store.files import FileStore, Kept
from tilework.store.memory import InMemory
from tilework.store.private_folder import PrivateFolder
from tilework.store.results import Backlog, Result, Stored, StoreUnreachable, TooLarge, Unwritten
from tilework.store.shared import SharedStore

_log = logging.getLogger(__name__)
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_USUAL_BYTES = 2 << 20
"""Size that a result is expected to have while none waits."""
_NO_LIMIT = 1 << 62  # Waiting results are never evicted: beyond the bound nothing is added.


@dataclass(slots=True)
class _Outage:
    """The time from a result that the store did not take until the store has all results that wait.

    At `taken_ns` the store took the latest one; before the first, it is when the outage began. `is_reached`: the latest
    try succeeded.
    """

    reason: str
    taken_ns: int
    num_written: int = 0
    is_reached: bool = False


class SpooledStore:
    """A `ResultStore`: a shared store, and the *spool*, files of this machine that wait for it.

    A result that the store does not take is put into the spool. So is each one that follows, without asking the store,
    which may let each wait for its timeout. One task writes them to the store, the oldest first, and tries again after
    pauses of half a second to ten. A waiting result is found in the spool and deleted there, and expires there as it
    would in the store.

    The spool holds the results of the durable directory; without one, it is a folder that is removed with the process.
    It has at most `spool_bytes`, and evicts nothing.

    Rejected: to write waiting results as new ones come. The next one may come in minutes, or never.
    """

    def __init__(
        self,
        shared: SharedStore,
        durable: DurableDirectory | None,
        *,
        spool_bytes: int,
        ttl_ns: int,
        now_ns: Callable[[], int],
    ) -> None:
        """Open the spool. Raises OSError if there is no place for it."""
        self._shared = shared
        self._most_bytes = spool_bytes
        self._now_ns = now_ns
        self._may_be_away = durable is not None and durable.was_served
        self._folder = None if durable is not None else PrivateFolder()
        if durable is not None:
            self._disk = durable.disk
            self._spool = durable.results(max_bytes=_NO_LIMIT, ttl_ns=ttl_ns)
        else:
            assert self._folder is not None
            self._disk = Disk(self._folder.path)
            place = self._folder.path / "results"
            self._spool = FileStore(place, max_bytes=_NO_LIMIT, ttl_ns=ttl_ns, on_failed=self._disk.failed)
        self._outage: _Outage | None = None
        self._num_coming = self._bytes_coming = 0
        self._to_remove: dict[str, None] = {}
        self._under_way: dict[str, InMemory] = {}  # Results on their way to the store or to the spool.
        self._is_lost, self._is_back = asyncio.Event(), asyncio.Event()
        self._is_back.set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_bytes(self) -> int:
        return self._shared.num_bytes + self._spool.num_bytes

    def __len__(self) -> int:
        return len(self._shared) + len(self._spool)

    async def open(self) -> None:
        """Begin. The store may be away if an earlier start has reached it: a standby must not wait for it."""
        if len(self._spool):
            self._begin_outage(f"{len(self._spool)} were left by an earlier start")
        else:
            try:
                await self._shared.check()
            except StoreUnreachable as error:
                if not self._may_be_away:
                    raise
                self._begin_outage(str(error))
        self._tasks.append(asyncio.create_task(self._write_on()))
        if self._folder is not None:
            self._tasks.append(asyncio.create_task(self._disk.watch()))

    async def put(self, uid: str, content: bytes, media_type: str, now_ns: int) -> Stored | TooLarge | Unwritten:
        self._under_way[uid] = InMemory(content, media_type)
        try:
            return await self._put(uid, content, media_type, now_ns)
        finally:
            self._under_way.pop(uid, None)

    async def _put(self, uid: str, content: bytes, media_type: str, now_ns: int) -> Stored | TooLarge | Unwritten:
        if self._outage is None:
            answer = await self._shared.put(uid, content, media_type, now_ns)
            if not isinstance(answer, Unwritten):
                return answer
            self._begin_outage(answer.reason)
        if len(content) > self._shared.max_bytes:
            return TooLarge(num_bytes=len(content), max_bytes=self._shared.max_bytes)
        return await self._wait(uid, content, media_type, now_ns)

    async def get(self, uid: str, now_ns: int) -> Result | None:
        if (coming := self._under_way.get(uid)) is not None:
            return coming
        found = await self._spool.get(uid, now_ns)
        if found is not None or uid in self._to_remove:
            return found
        return await self._shared.get(uid, now_ns)

    async def holds(self, uid: str, now_ns: int) -> bool:
        if uid in self._under_way or await self._spool.holds(uid, now_ns):
            return True
        return uid not in self._to_remove and await self._shared.holds(uid, now_ns)

    async def delete(self, uid: str) -> None:
        if await self._spool.holds(uid, self._now_ns()):
            self._to_remove[uid] = None  # The store may have it, too, and its answer was lost.
            await self._spool.delete(uid)
        elif uid not in self._to_remove:
            await self._shared.delete(uid)

    def refusal(self, num_results: int) -> str | None:
        if self._outage is None:
            return None
        expected = self._spool.num_bytes // len(self._spool) if len(self._spool) else _USUAL_BYTES
        room = self._most_bytes - self._spool.num_bytes - self._bytes_coming
        if not self._disk.problem and num_results * expected <= room:
            return None
        num_bytes = self._spool.num_bytes
        problem = self._disk.problem
        full = f"{num_bytes} of {self._most_bytes} bytes for waiting results on this server's disk are in use"
        why = f"this server's disk cannot be written ({problem})" if problem else full
        seconds = s_from_ns(self._now_ns() - self._outage.taken_ns)
        return f"their store has taken none for {seconds:.0f} seconds ({self._outage.reason}), and {why}"

    def backlog(self) -> Backlog:
        return Backlog(
            num_results=len(self._spool),
            num_bytes=self._spool.num_bytes,
            unwritten_ns=0 if self._outage is None else self._now_ns() - self._outage.taken_ns,
            outlives_server=self._folder is None,
        )

    async def written(self) -> None:
        if self._folder is not None:
            await self._is_back.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._shared.close()
        if self._folder is not None:
            if len(self._spool):
                message = "%d results are lost: their store is away, and without --durable they end with the server"
                _log.error(message, len(self._spool))
            self._folder.close()

    def _begin_outage(self, reason: str) -> None:
        if self._outage is None:
            _log.error("results wait on the disk until their store takes them: %s", reason)
            self._outage = _Outage(reason, self._now_ns())
            self._is_back.clear()
            self._is_lost.set()

    def _end_outage(self, outage: _Outage) -> None:
        _log.warning("the store of results takes them again: %d had waited and are written", outage.num_written)
        self._outage = None
        self._is_lost.clear()
        self._is_back.set()

    async def _wait(self, uid: str, content: bytes, media_type: str, now_ns: int) -> Stored | TooLarge | Unwritten:
        """Put a result into the spool."""
        places = "to their store, nor to its disk meanwhile"
        self._spool.sweep(now_ns)
        if self._spool.num_bytes + self._bytes_coming + len(content) > self._most_bytes:
            reason = "" if self._outage is None else self._outage.reason
            return Unwritten(reason=f"{reason}; {self._most_bytes} bytes of results wait (spool_bytes)", places=places)
        self._num_coming += 1
        self._bytes_coming += len(content)
        try:
            answer = await self._spool.put(uid, content, media_type, now_ns)
        finally:
            self._num_coming -= 1
            self._bytes_coming -= len(content)
        return Unwritten(reason=answer.reason, places=places) if isinstance(answer, Unwritten) else answer

    async def _write_on(self) -> None:
        """Write waiting results, whenever there are any."""
        pause_s = _PAUSE_S
        while True:
            await self._is_lost.wait()
            assert self._outage is not None
            try:
                await self._write_next(self._outage)
            except StoreUnreachable as error:
                self._outage.reason = str(error)
                self._outage.is_reached = False
            except Exception:
                _log.exception("results that wait for their store cannot be written; they are tried again")
            else:
                pause_s = _PAUSE_S
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _write_next(self, outage: _Outage) -> None:
        """Write the oldest result, remove one, or end the outage if all is done. Raises StoreUnreachable, OSError."""
        if (kept := self._spool.oldest(self._now_ns())) is not None:
            if not await self._write(kept):
                return
            outage.num_written += 1
        elif self._num_coming:
            await asyncio.sleep(_PAUSE_S)
            return
        elif self._to_remove:
            uid = next(iter(self._to_remove))
            await self._shared.delete(uid)
            del self._to_remove[uid]
        elif not outage.is_reached:
            await self._shared.reach()
        else:
            self._end_outage(outage)
        outage.taken_ns = self._now_ns()
        outage.is_reached = True

    async def _write(self, kept: Kept) -> bool:
        """Write a result to the store, and return whether the store has taken it. The result may be deleted meanwhile.

        Raises StoreUnreachable, OSError.
        """
        answer = None
        if (result := await self._spool.get(kept.uid, self._now_ns())) is not None:
            with closing(result):
                content = await result.read()
            answer = await self._shared.put(kept.uid, content, result.media_type, self._now_ns(), kept.expires_ns)
            if isinstance(answer, Unwritten):
                raise StoreUnreachable(answer.reason)
            if isinstance(answer, TooLarge):  # An earlier start had another limit.
                _log.error("%s of %d bytes is dropped: at most %d are kept", kept.uid, len(content), answer.max_bytes)
        self._spool.drop(kept)
        return isinstance(answer, Stored)
