"""Event loops whose time a test moves, so that no test waits for the wall clock.

Sockets, threads and processes go on as ever; only timers (`asyncio.sleep`, `timeout`, `call_later`) and `loop.time()`
follow the test's clock. `ManualLoop` is for code that runs on the test's own loop: its time stands still otherwise, and
that of a `LeapingLoop` passes by itself, in no time.
`SkippingLoop` is for a server on a thread of its own: its time passes as ever, and can be moved ahead. Its tests use
limits of minutes, beside which what a slow machine takes does not count.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import waiting

T = TypeVar("T")


class ManualLoop(asyncio.SelectorEventLoop):
    """`time()` changes by `advance` alone."""

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        super().__init__(selector)
        self._now_s = 1_000.0

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let this much time pass; timers that are due run when the loop comes to them."""
        self._now_s += seconds

    async def until_idle(self) -> None:
        """Let all go on that waits neither for time nor for another thread or process."""
        await until_idle(self)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let everything go on, except for time, until the condition holds."""
        await waiting.until(condition, pause_s=0)


class _LeapingSelector(selectors.DefaultSelector):
    """Where others would wait for a timer, the time is moved to it."""

    loop: ManualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if timeout and not ready:
            self.loop.advance(timeout)
        return ready


class LeapingLoop(ManualLoop):
    """`time()` leaps to the next timer when all that is left to do waits for it. For what runs on this loop alone."""

    def __init__(self) -> None:
        selector = _LeapingSelector()
        super().__init__(selector)
        selector.loop = self


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


async def until_idle(loop: asyncio.SelectorEventLoop) -> None:
    """Until no callback is ready, no timer due and no socket readable, but for the task that waits here."""
    timers, selector = loop._scheduled, loop._selector  # type: ignore[attr-defined]
    while True:
        await asyncio.sleep(0)
        is_due = any(timer._when <= loop.time() and not timer._cancelled for timer in timers)
        if not (loop._ready or is_due or selector.select(0)):  # type: ignore[attr-defined]
            return


async def sleep(seconds: float) -> None:
    """Wait on the test's clock, which the loop must have."""
    assert isinstance(asyncio.get_running_loop(), ManualLoop)
    await asyncio.sleep(seconds)


def run(scenario: Callable[[ManualLoop], Awaitable[T]]) -> T:
    """Run a scenario on a loop of its own, which it gets as its argument."""

    async def main() -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ManualLoop)
        return await scenario(loop)

    with asyncio.Runner(loop_factory=ManualLoop) as runner:
        return runner.run(main())
