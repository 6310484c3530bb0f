"""The wait of a server before it stops: for open calls, and for images that were not fetched yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from tilework.server.calls.finish import stored_name
from tilework.server.calls.registry import CallRegistry
from tilework.server.text import counted
from tilework.server.webhooks.sender import WebhookSender
from tilework.store.results import ResultStore, StoreUnreachable

SWEEP_S = 1.0  # The store is asked this often: it does not report that an image expired or was evicted.


async def drained(
    call_registry: CallRegistry, store: ResultStore, webhooks: WebhookSender, now_ns: Callable[[], int]
) -> None:
    """Return when no call is open, every image of an asynchronous call was fetched or is gone, webhooks of calls that
    have ended were tried, and no result would be lost with the server.
    """
    while True:
        for record, index, frame in call_registry.unfetched():
            with suppress(StoreUnreachable):
                if not await store.holds(stored_name(record.tenant, record.uid, index, frame), now_ns()):
                    call_registry.mark_fetched(record, index, frame)
        with suppress(TimeoutError):
            async with asyncio.timeout(SWEEP_S):
                await call_registry.wait_until_idle()
                await webhooks.all_tried()
                return await store.written()


def waits_for(call_registry: CallRegistry, store: ResultStore, left_s: float) -> str:
    """Describe what a stop waits for now, and how long at most."""
    calls = call_registry.num_open_calls
    pictures = len(call_registry.unfetched())
    backlog = store.backlog()
    unwritten = "" if backlog.outlives_server else f"{counted(backlog.num_results, 'result')} not in their store, "
    return (
        f"{counted(calls, 'call')} open, {counted(pictures, 'image')} not fetched, {unwritten}at most "
        f"{max(0.0, left_s):.0f} s"
    )


def is_waited_for(call_registry: CallRegistry, store: ResultStore) -> bool:
    """Return whether a stop would wait for calls or results."""
    backlog = store.backlog()
    return call_registry.is_busy or (backlog.num_results > 0 and not backlog.outlives_server)
