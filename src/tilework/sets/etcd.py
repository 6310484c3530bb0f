"""A registry in etcd, over the JSON gateway of its API, version 3.

Source: etcd.io, "Why gRPC gateway", for etcd 3.4 and later. The package etcd3gw does the same, but blocks the event
loop and knows one address. Here each call goes to the address that answered last, and to the next one when that does
not.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import httpx

from tilework.sets.registry import Entries, Entry, Guard, RegistryLost

_CALL_S = 2.0  # While its members elect a leader, etcd answers no write for that long and more.
_ROUNDS = 2  # How often all addresses are tried.
_SILENCE_S = 10.0  # After this long without a change a watch begins again, since its connection may be dead.
_HAS_LEADER = {"Grpc-Metadata-hasleader": "true"}  # A member that has lost the others ends its watches.
_NOT_FOUND = 5


class EtcdRegistry:
    """A `Registry` in the etcd of these `urls`, members of one cluster, under the keys that begin with `prefix`."""

    def __init__(self, urls: Sequence[str], prefix: str = "tilework/") -> None:
        self._urls, self._prefix = tuple(urls), prefix
        self._first = 0  # The address that answered last.
        self._http = httpx.AsyncClient(timeout=_CALL_S, trust_env=False)

    async def grant(self, ttl_s: int) -> int:
        return int((await self._call("lease/grant", {"TTL": ttl_s}))["ID"])

    async def renew(self, lease: int) -> bool:
        answer = await self._call("lease/keepalive", {"ID": lease})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        await self._call("lease/revoke", {"ID": lease})

    async def create(self, key: str, value: bytes, lease: int) -> int | None:
        absent = {"key": self._key(key), "target": "CREATE", "result": "EQUAL", "create_revision": 0}
        answer = await self._write(absent, key, value, lease, {"request_range": {"key": self._key(key)}})
        if answer.get("succeeded"):
            return int(answer["header"]["revision"])
        # An earlier try may have written it, although its answer was lost.
        for one in _found(answer):
            if int(one.get("lease", 0)) == lease:
                return int(one["create_revision"])
        return None

    async def put(self, key: str, value: bytes, lease: int, guard: Guard) -> int | None:
        held = {
            "key": self._key(guard.key),
            "target": "CREATE",
            "result": "EQUAL",
            "create_revision": guard.created,
        }
        answer = await self._write(held, key, value, lease)
        return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    async def _write(
        self, condition: Mapping[str, object], key: str, value: bytes, lease: int, *otherwise: Mapping[str, object]
    ) -> dict[str, Any]:
        put = {"key": self._key(key), "value": _base64(value), "lease": lease}
        body = {"compare": [condition], "success": [{"request_put": put}], "failure": list(otherwise)}
        return await self._call("kv/txn", body)

    async def watch(self) -> AsyncGenerator[Entries, None]:
        while True:
            listed = await self._call("kv/range", self._range())
            entries = {self._name(one): _entry(one) for one in listed.get("kvs", ())}
            yield entries
            try:
                async for events in self._events(int(listed["header"]["revision"]) + 1):
                    for event in events:
                        self._apply(entries, event)
                    yield entries
            except httpx.TransportError:  # Its member is gone, or nothing has changed for long.
                self._first += 1

    async def _events(self, revision: int) -> AsyncGenerator[list[dict[str, Any]], None]:
        """What has changed from a revision on, until etcd ends the watch. Raises httpx.TransportError."""
        body = {"create_request": {**self._range(), "start_revision": revision}}
        timeout = httpx.Timeout(_CALL_S, read=_SILENCE_S)
        url = self._url(self._first, "watch")
        async with self._http.stream("POST", url, json=body, headers=_HAS_LEADER, timeout=timeout) as answer:
            async for line in answer.aiter_lines():
                result = _parsed(line).get("result", {})
                if result.get("canceled") or not result:
                    return
                if result.get("events"):
                    yield result["events"]

    def _apply(self, entries: dict[str, Entry], event: Mapping[str, Any]) -> None:
        if event.get("type") == "DELETE":
            entries.pop(self._name(event["kv"]), None)
        else:
            entries[self._name(event["kv"])] = _entry(event["kv"])

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """The answer of the first address that gives one; an empty one for a lease that is gone."""
        problem = ""
        for number in range(self._first, self._first + _ROUNDS * len(self._urls)):
            url = self._url(number, path)
            try:
                answer = await self._http.post(url, json=body)
            except httpx.TransportError as error:
                problem = f"{url}: {type(error).__name__} {error}"
                continue
            values = _parsed(answer.text)
            if answer.status_code == 200:
                self._first = number % len(self._urls)
                return values
            if values.get("code") == _NOT_FOUND:
                return {}
            problem = f"{url}: HTTP {answer.status_code} {values.get('error', answer.text[:200])}"
        raise RegistryLost(f"etcd does not answer: {problem}")

    def _url(self, number: int, path: str) -> str:
        return f"{self._urls[number % len(self._urls)]}/v3/{path}"

    def _key(self, name: str) -> str:
        return _base64((self._prefix + name).encode())

    def _name(self, kv: Mapping[str, Any]) -> str:
        return base64.b64decode(kv["key"]).decode().removeprefix(self._prefix)

    def _range(self) -> dict[str, object]:
        """All keys with the prefix: up to the text that follows all of them."""
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        return {"key": self._key(""), "range_end": _base64(end.encode())}


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _entry(kv: Mapping[str, Any]) -> Entry:
    return Entry(base64.b64decode(kv.get("value", "")), int(kv["create_revision"]), int(kv["mod_revision"]))


def _found(answer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What the reads of a transaction have found."""
    return [one for part in answer.get("responses", ()) for one in part.get("response_range", {}).get("kvs", ())]


def _parsed(text: str) -> dict[str, Any]:
    """The first JSON object of an answer; an empty one if it has none."""
    try:
        values = json.loads(text.partition("\n")[0])
    except ValueError:
        values = None
    return values if isinstance(values, dict) else {}
