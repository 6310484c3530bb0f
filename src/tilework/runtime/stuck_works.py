"""The timer of the check for works that make no progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tilework.core.time import NS_PER_S


class StuckWorkMonitor:
    """Calls `check` every `tick_ns` on the running event loop, from its construction until `stop`."""

    def __init__(self, check: Callable[[], None], tick_ns: int) -> None:
        self._check = check
        self._tick_s = tick_ns / NS_PER_S
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        self._next.cancel()

    def _tick(self) -> None:
        self._next = self._loop.call_later(self._tick_s, self._tick)
        self._check()
