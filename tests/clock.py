"""Event loops whose time a test moves, so that no test waits for the wall clock.

Sockets, threads and processes go on as ever; only timers (`asyncio.sleep`, `timeout`, `call_later`) and `loop.time()`
follow the test's clock. `ManualLoop` is for code that runs on the test's own loop: its time stands still otherwise.
`SkippingLoop` is for a server on a thread of its own: its time passes as ever, and can be moved ahead. Its tests use
limits of minutes, beside which what a slow machine takes does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import waiting

T = TypeVar("T")


class ManualLoop(asyncio.SelectorEventLoop):
    """`time()` changes by `advance` alone."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 1_000.0

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let this much time pass; timers that are due run when the loop comes to them."""
        self._now_s += seconds

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let everything go on, except for time, until the condition holds."""
        await waiting.until(condition, pause_s=0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """`time()` is the clock's time and what was skipped."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self._skipped_s

    def skip(self, seconds: float) -> None:
        """Move the time ahead, on the loop's own thread."""
        self._skipped_s += seconds


def run(scenario: Callable[[ManualLoop], Awaitable[T]]) -> T:
    """Run a scenario on a loop of its own, which it gets as its argument."""

    async def main() -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ManualLoop)
        return await scenario(loop)

    with asyncio.Runner(loop_factory=ManualLoop) as runner:
        return runner.run(main())
