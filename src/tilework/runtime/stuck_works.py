"""When to look for works that make no progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tilework.core.time import NS_PER_S


class StuckWorkMonitor:
    """Calls `look` every `tick_ns` on the running loop, from when it is made until `stop`."""

    def __init__(self, look: Callable[[], None], tick_ns: int) -> None:
        self._look = look
        self._tick_s = tick_ns / NS_PER_S
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        self._next.cancel()

    def _tick(self) -> None:
        self._next = self._loop.call_later(self._tick_s, self._tick)
        self._look()
