"""Waiting for a state of what is measured, on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from suite.case import CaseFailed

_POLL_S = 0.0005


async def until(condition: Callable[[], bool], patience_s: float = 120.0) -> None:
    """Return when the condition holds. Raises CaseFailed when it has not for that long."""
    end_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end_s:
            raise CaseFailed(f"nothing has happened for {patience_s:g} s")
        await asyncio.sleep(_POLL_S)
