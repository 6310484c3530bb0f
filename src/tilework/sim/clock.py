"""Virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Endless(RuntimeError):
    """Something goes on and on."""


class Clock:
    """What is to be done when, ordered by time and then by when it was asked for.

    While a caller `sleeps_until` a time, what is due for it waits; what happens of itself (`is_nature`) does not.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.back_ns = 0
        self._heap: list[tuple[int, int, bool, Callable[[], None]]] = []
        self._sequence = 0

    def at(self, at_ns: int, call: Callable[[], None], *, is_nature: bool = False) -> None:
        self._sequence += 1
        heappush(self._heap, (at_ns, self._sequence, is_nature, call))

    @property
    def is_asleep(self) -> bool:
        return self.now_ns < self.back_ns

    def sleep_until(self, back_ns: int, then: Callable[[], None]) -> None:
        """Let the caller sleep, and do this before anything else when it is back."""
        self.back_ns = back_ns
        heappush(self._heap, (back_ns, -1, True, then))

    def run(self, limit_ns: int | None = None) -> None:
        """Do everything, until nothing is left. Raises Endless if that takes longer than to a limit."""
        heap = self._heap
        while heap:
            at_ns, sequence, is_nature, call = heappop(heap)
            self.now_ns = max(self.now_ns, at_ns)
            if limit_ns is not None and self.now_ns > limit_ns:
                raise Endless(f"at {self.now_ns} ns something is still to be done")
            if self.now_ns < self.back_ns and not is_nature:
                heappush(heap, (self.back_ns, sequence, is_nature, call))
            else:
                call()
