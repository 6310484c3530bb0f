"""Watches whether a client is still there while something else is awaited."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive


async def unless_gone(receive: Receive, future: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Wait for a future, which is never cancelled; return False if the time is up first. The body must have been read.

    Raises:
        ClientDisconnect: the client went away first.
    """
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({gone, future}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    if future.done():
        return True
    if gone.done():
        gone.result()
        raise ClientDisconnect
    return False


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
