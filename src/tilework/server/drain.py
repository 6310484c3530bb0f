"""What a server waits for before it stops: open calls, and pictures that were not fetched yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from tilework.server.calls.finish import stored_name
from tilework.server.calls.registry import CallRegistry
from tilework.server.text import counted
from tilework.server.webhooks.sender import WebhookSender
from tilework.store.results import ResultStore, StoreUnreachable

SWEEP_S = 1.0  # How often the store is asked: it does not report that a picture expired or was evicted.


async def drained(
    call_registry: CallRegistry, store: ResultStore, webhooks: WebhookSender, now_ns: Callable[[], int]
) -> None:
    """Return when no call is open, every picture of an asynchronous call was fetched or is gone, and webhooks of calls
    that have ended were tried."""
    while True:
        for record, index, frame in call_registry.unfetched():
            with suppress(StoreUnreachable):
                if not await store.holds(stored_name(record.tenant, record.uid, index, frame), now_ns()):
                    call_registry.mark_fetched(record, index, frame)
        with suppress(TimeoutError):
            async with asyncio.timeout(SWEEP_S):
                await call_registry.wait_until_idle()
                return await webhooks.all_tried()


def waits_for(call_registry: CallRegistry, left_s: float) -> str:
    """What a stop waits for now, and how long at most."""
    calls, pictures = call_registry.num_open_calls, len(call_registry.unfetched())
    return (
        f"{counted(calls, 'call')} open, {counted(pictures, 'picture')} not fetched, at most {max(0.0, left_s):.0f} s"
    )
