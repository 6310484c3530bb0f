"""A registry in etcd, over the JSON gateway of its API, version 3.

Source: etcd.io, "Why gRPC gateway", for etcd 3.4 and later. The package etcd3gw does the same, but blocks the event
loop and knows one address. Here each call goes to the address that answered last, and also to the next one if that is
slow or is no etcd.

An era ends when answers come from another cluster, or when the newest revision is older than one that was seen before.
An etcd that was wiped and started by the same command has the same cluster id: then only the revision shows it.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence

import httpx

from tilework.sets.etcd_answers import (
    EtcdAnswer,
    Event,
    Granted,
    Header,
    KeyValue,
    Kind,
    LeaseGone,
    Listed,
    Renewed,
    Watched,
    Written,
    read,
)
from tilework.sets.registry import Entries, Entry, Guard, RegistryLost

_log = logging.getLogger(__name__)
_CALL_S = 5.0  # While its members elect a leader, etcd answers no write for 2 s and more.
_NEXT_S = 1.5  # After this long without an answer the next address is asked, too.
_ROUNDS = 2  # Each address is asked this often.
_SILENCE_S = 2.0  # After this long without a change, all is listed again: the registry may be lost.
_PAUSE_S = 0.5  # Before a watch that has ended begins again.
_HAS_LEADER = {"Grpc-Metadata-hasleader": "true"}  # A member that has lost the others ends its watches.


class EtcdRegistry:
    """A `Registry` in the etcd of these `urls`, members of one cluster, under the keys that begin with `prefix`."""

    def __init__(self, urls: Sequence[str], prefix: str = "tilework/") -> None:
        self._urls = tuple(urls)
        self._prefix = prefix
        self._first = 0  # The address that answered last.
        self._http = httpx.AsyncClient(timeout=_CALL_S, trust_env=False)
        self._cluster: int | None = None
        self._revision = 0  # The newest of this era.
        self._listed: Entries = {}
        self._wrong: set[str] = set()  # Addresses that were logged as no etcd.
        self.era = 0

    async def grant(self, ttl_s: int) -> int:
        return (await self._call("lease/grant", {"TTL": ttl_s}, Granted)).ID

    async def renew(self, lease: int) -> bool:
        return (await self._call("lease/keepalive", {"ID": lease}, Renewed)).TTL > 0

    async def revoke(self, lease: int) -> None:
        try:
            await self._call("lease/revoke", {"ID": lease}, EtcdAnswer)
        except LeaseGone:
            return

    async def create(self, key: str, value: bytes, lease: int) -> int | None:
        absent = {"key": self._key(key), "target": "CREATE", "result": "EQUAL", "create_revision": 0}
        try:
            answer = await self._write(absent, key, value, lease, {"request_range": {"key": self._key(key)}})
        except LeaseGone:
            return None
        if answer.succeeded:
            return answer.header.revision
        # An earlier try may have written the key, although its answer was lost.
        return next((one.create_revision for one in answer.found if one.lease == lease), None)

    async def put(self, key: str, value: bytes, lease: int, guard: Guard) -> int | None:
        held = {
            "key": self._key(guard.key),
            "target": "CREATE",
            "result": "EQUAL",
            "create_revision": guard.created,
        }
        try:
            answer = await self._write(held, key, value, lease)
        except LeaseGone:
            return None
        return answer.header.revision if answer.succeeded else None

    async def _write(
        self, condition: Mapping[str, object], key: str, value: bytes, lease: int, *otherwise: Mapping[str, object]
    ) -> Written:
        put = {"key": self._key(key), "value": _base64(value), "lease": lease}
        body = {"compare": [condition], "success": [{"request_put": put}], "failure": list(otherwise)}
        return await self._call("kv/txn", body, Written)

    async def watch(self) -> AsyncGenerator[Entries, None]:
        await self._check_members()
        while True:
            listed = await self._call("kv/range", self._range(), Listed)
            entries = {self._name(one): _entry(one) for one in listed.kvs}
            self._compare(entries)
            yield entries
            try:
                async for events in self._events(listed.header.revision + 1):
                    for event in events:
                        self._apply(entries, event)
                    yield entries
            except httpx.ReadTimeout:
                continue
            except (httpx.HTTPError, RegistryLost):  # Another address may do better.
                await asyncio.sleep(_PAUSE_S)

    async def _events(self, revision: int) -> AsyncGenerator[list[Event], None]:
        """Yield the changes from a revision on.

        Raises:
            httpx.HTTPError: the member is gone; ReadTimeout if nothing has changed for long.
            RegistryLost: etcd has ended the watch, or the address answers and is no etcd.
        """
        body = {"create_request": {**self._range(), "start_revision": revision}}
        timeout = httpx.Timeout(_CALL_S, read=_SILENCE_S)
        url = self._url(self._first, "watch")
        async with self._http.stream("POST", url, json=body, headers=_HAS_LEADER, timeout=timeout) as answer:
            async for line in answer.aiter_lines():
                result = read(Watched, answer, line)
                if result.canceled:
                    break
                if result.events:
                    yield result.events
        raise RegistryLost(f"{url}: the watch was ended")

    def _apply(self, entries: dict[str, Entry], event: Event) -> None:
        if event.type == "DELETE":
            entries.pop(self._name(event.kv), None)
        else:
            entries[self._name(event.kv)] = _entry(event.kv)

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, path: str, body: Mapping[str, object], kind: type[Kind]) -> Kind:
        """Return the first valid answer. Raises RegistryLost, LeaseGone."""
        problem = f"{self._url(self._first, path)}: nothing for {_CALL_S:g} s"
        numbers = list(range(self._first, self._first + _ROUNDS * len(self._urls)))
        asked: dict[asyncio.Task[Kind], int] = {}
        end_s = asyncio.get_running_loop().time() + _CALL_S
        try:
            while (numbers or asked) and (left_s := end_s - asyncio.get_running_loop().time()) > 0:
                if numbers:
                    number = numbers.pop(0)
                    asked[asyncio.ensure_future(self._ask(number, path, body, kind))] = number
                timeout_s = min(_NEXT_S, left_s) if numbers else left_s
                done, _ = await asyncio.wait(asked, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    number = asked.pop(one)
                    try:
                        answer = one.result()
                    except RegistryLost as error:
                        problem = str(error)
                    else:
                        self._first = number % len(self._urls)
                        return answer
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise RegistryLost(f"etcd does not answer: {problem}")

    async def _ask(self, number: int, path: str, body: Mapping[str, object], kind: type[Kind]) -> Kind:
        """Return the answer of one address. Raises RegistryLost, LeaseGone."""
        before = self._revision
        era = self.era
        answer = await self._answer(self._url(number, path), body, kind)
        # Only reads and writes of keys go through the log of all members: others may lag behind.
        if issubclass(kind, Listed | Written) or answer.header.cluster_id != self._cluster:
            self._note(answer.header, before, era)
        return answer

    async def _answer(self, url: str, body: Mapping[str, object], kind: type[Kind]) -> Kind:
        try:
            answer = await self._http.post(url, json=body)
        except httpx.HTTPError as error:
            raise RegistryLost(f"{url}: {type(error).__name__} {error}") from None
        try:
            found = read(kind, answer, answer.text.partition("\n")[0])
        except RegistryLost as error:
            if url not in self._wrong:
                _log.warning("an address of the registry is skipped: %s", error)
            self._wrong.add(url)
            raise
        self._wrong.discard(url)
        return found

    def _note(self, header: Header, before: int, era: int) -> None:
        """Note an answer to a call of `era`, when `before` was the newest revision; begin an era if it shows one."""
        if self._cluster not in (None, header.cluster_id) or (era == self.era and header.revision < before):
            self._begin_era()
        elif era != self.era:
            return
        self._cluster = header.cluster_id
        self._revision = max(self._revision, header.revision)

    def _compare(self, entries: Entries) -> None:
        """Begin a new era if an entry is older than it was when last listed, however much was written since."""
        before = self._listed
        if any(key in before and one.changed < before[key].changed for key, one in entries.items()):
            self._begin_era()
        self._listed = dict(entries)

    def _begin_era(self) -> None:
        _log.warning("the registry has lost its data, or is another one: this server writes all entries again")
        self.era += 1
        self._revision = 0
        self._listed = {}

    async def _check_members(self) -> None:
        """Raise RegistryLost if the addresses that answer belong to several clusters: each would have a leader."""
        if len(self._urls) == 1:
            return
        asked = [
            asyncio.ensure_future(self._answer(self._url(one, "maintenance/status"), {}, EtcdAnswer))
            for one in range(len(self._urls))
        ]
        await asyncio.wait(asked, timeout=_NEXT_S)
        for one in asked:
            one.cancel()
        clusters: dict[int, str] = {}
        for url, answer in zip(self._urls, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, EtcdAnswer):
                clusters.setdefault(answer.header.cluster_id, url)
        if len(clusters) > 1:
            raise RegistryLost(f"{' and '.join(clusters.values())} are members of different etcds; give those of one")

    def _url(self, number: int, path: str) -> str:
        return f"{self._urls[number % len(self._urls)]}/v3/{path}"

    def _key(self, name: str) -> str:
        return _base64((self._prefix + name).encode())

    def _name(self, kv: KeyValue) -> str:
        return kv.key.removeprefix(self._prefix)

    def _range(self) -> dict[str, object]:
        """Return the range of all keys with the prefix: it ends at the first text after all of them."""
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        return {"key": self._key(""), "range_end": _base64(end.encode())}


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _entry(kv: KeyValue) -> Entry:
    return Entry(kv.value, kv.create_revision, kv.mod_revision, kv.lease)
