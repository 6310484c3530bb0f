"""A program that floods a server: `python -m suite.attacker URL KEY KIND SECONDS`. It prints what it has sent."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import aiohttp

Ask = Callable[[aiohttp.ClientSession, int], Awaitable[int]]
MOST_CONNECTIONS = 1500
CLIENTS = 8
PER_S = 1000  # Connections that are opened in a second.
_TINY = {"prompt": "x", "size": "512x512", "num_inference_steps": 4}
_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/images/generations", "body": _TINY}


def connections(url: str, first: bytes, seconds: float) -> int:
    """Connections that each begin with `first`, opened anew as the server closes them."""
    parts, held, opened, watched = urlsplit(url), dict[int, socket.socket](), 0, select.poll()
    begin_s = time.monotonic()
    while (now_s := time.monotonic() - begin_s) < seconds:
        while opened < now_s * PER_S and len(held) < MOST_CONNECTIONS:
            one = socket.socket()
            one.settimeout(1)
            opened += 1
            try:
                one.connect((parts.hostname, parts.port))
                one.sendall(first)
            except OSError:
                one.close()
                continue
            held[one.fileno()] = one
            watched.register(one, select.POLLIN)
        for number, _ in watched.poll(5):
            watched.unregister(number)
            held.pop(number).close()
    return opened


def _values() -> bytes:
    return b'{"prompt": "x", "user": [' + b"1," * (1 << 19) + b"1]}"


def _fields() -> bytes:
    return b'{"messages": [{"role": "user", "content": "x"}]' + b"".join(b',"f%d":1' % n for n in range(60_000)) + b"}"


def _text() -> bytes:
    return b'{"messages": [{"role": "user", "content": "x"}], "user": "' + b"A" * (16 << 20) + b'"}'


async def bodies(http: aiohttp.ClientSession, number: int) -> int:
    """The worst of some kinds, in turn."""
    path, body = _BODIES[number % len(_BODIES)]
    async with http.post(path, data=body, headers={"Content-Type": "application/json"}) as answer:
        await answer.read()
        return answer.status


async def batches(http: aiohttp.ClientSession, _number: int) -> int:
    """A file of one call, and a batch of it."""
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(_LINE).encode(), filename="a.jsonl")
    async with http.post("/v1/files", data=form) as answer:
        file = await answer.json()
    if answer.status != 200:
        return answer.status
    body = {"input_file_id": file["id"], "endpoint": "/v1/images/generations", "completion_window": "24h"}
    async with http.post("/v1/batches", json=body) as answer:
        await answer.read()
        return answer.status


async def promises(http: aiohttp.ClientSession, number: int) -> int:
    """Half of them cannot be met."""
    body = {**_TINY, "n": 10 if number % 4 else 1, "on_miss": "reject", "slo_ms": 3_600_000 if number % 2 else 300}
    async with http.post("/v1/images/generations", json=body, headers={"Prefer": "respond-async"}) as answer:
        await answer.read()
        return answer.status


async def requests(url: str, key: str, ask: Ask, seconds: float) -> Counter[int]:
    """As many as there can be from some clients that come again at once; how many were answered with each status."""
    statuses, end_s = Counter[int](), time.monotonic() + seconds
    headers = {"Authorization": f"Bearer {key}"}

    async def client(first: int) -> None:
        number = first
        while time.monotonic() < end_s:
            try:
                statuses[await ask(http, number)] += 1
            except aiohttp.ClientError:
                statuses[0] += 1
            number += 1

    async with aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout(60)) as http:
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return statuses


CONNECTIONS = {"silent": b"", "slow heads": b"GET /health HTTP/1.1\r\nHost: x\r\n"}
REQUESTS: dict[str, Ask] = {"bodies": bodies, "batches": batches, "promises": promises}
KINDS = (*CONNECTIONS, *REQUESTS)


if __name__ == "__main__":
    _BODIES = [
        ("/v1/images/generations", _values()),
        ("/v1/chat/completions", _fields()),
        ("/v1/chat/completions", _text()),
    ]
    URL, KEY, KIND, SECONDS = sys.argv[1:]
    if KIND in CONNECTIONS:
        print(f"{connections(URL, CONNECTIONS[KIND], float(SECONDS))} connections")
    else:
        found = asyncio.run(requests(URL, KEY, REQUESTS[KIND], float(SECONDS)))
        told = {status or "no answer": count for status, count in sorted(found.items())}
        print(", ".join(f"{count} times {status}" for status, count in told.items()))
