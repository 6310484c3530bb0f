"""Virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class TimeLimitExceeded(RuntimeError):
    """Calls are still due after the time limit of a run."""


class Clock:
    """A heap of calls ordered by time, then by the order in which they were scheduled.

    While the controller is paused (`pause_until`), its calls wait; those of devices (`is_device_event`) do not. What
    has waited is made in order of the times at which it was due.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.resume_ns = 0
        # Time of a call, time at which it was due, its number, True if it is of a device.
        self._heap: list[tuple[int, int, int, bool, Callable[[], None]]] = []
        self._sequence = 0

    def at(self, at_ns: int, call: Callable[[], None], *, is_device_event: bool = False) -> None:
        """Schedule a call."""
        self._sequence += 1
        heappush(self._heap, (at_ns, at_ns, self._sequence, is_device_event, call))

    @property
    def is_paused(self) -> bool:
        """True if the controller is paused."""
        return self.now_ns < self.resume_ns

    def pause_until(self, resume_ns: int, then: Callable[[], None]) -> None:
        """Pause the controller; `then` is the first call when it resumes."""
        self.resume_ns = resume_ns
        heappush(self._heap, (resume_ns, -1, -1, True, then))

    def run(self, limit_ns: int | None = None) -> None:
        """Make all calls, until none is left. Raises TimeLimitExceeded if one is due after `limit_ns`."""
        heap = self._heap
        while heap:
            at_ns, due_ns, sequence, is_device_event, call = heappop(heap)
            self.now_ns = max(self.now_ns, at_ns)
            if limit_ns is not None and self.now_ns > limit_ns:
                raise TimeLimitExceeded(f"calls are still due at {self.now_ns} ns, after the limit of {limit_ns} ns")
            if self.now_ns < self.resume_ns and not is_device_event:
                heappush(heap, (self.resume_ns, due_ns, sequence, is_device_event, call))
            else:
                call()
