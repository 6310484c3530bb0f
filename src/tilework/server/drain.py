"""What a server waits for before it stops: open calls, and pictures that somebody may still come for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from tilework.server.calls.finish import stored_name
from tilework.server.calls.registry import CallRegistry
from tilework.store.results import ResultStore

SWEEP_S = 1.0  # A store lets pictures expire, or make room for newer ones, without a word: it is asked so often.


async def settled(call_registry: CallRegistry, store: ResultStore, now_ns: Callable[[], int]) -> None:
    """Wait until no call is open, and every picture of an asynchronous call was fetched or can be no more."""
    while True:
        for record, index in call_registry.unread():
            if not await store.holds(stored_name(record.tenant, f"{record.uid}-{index}"), now_ns()):
                call_registry.settle(record, index)
        with suppress(TimeoutError):
            async with asyncio.timeout(SWEEP_S):
                return await call_registry.settled()
