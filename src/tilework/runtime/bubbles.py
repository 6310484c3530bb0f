"""Measures bubbles: the time that devices idle while a request waits."""

from __future__ import annotations

from collections import deque

_MAX_CHANGES = 1024  # Kept changes, since the end of a work is reported late; older ones are dropped.


class Bubbles:
    """Measures the gaps between the works of a device. The part of a gap in which a request waits is a bubble.

    All times are of one clock. The end of a work may be reported after later changes of waiting.
    """

    def __init__(self) -> None:
        self._idle_since_ns: dict[int, int] = {}
        self._changes: deque[tuple[int, int]] = deque([(0, 0)], maxlen=_MAX_CHANGES)  # Time, wait before it.
        self._is_waiting = False

    def set_waiting(self, is_waiting: bool, now_ns: int) -> None:
        """Set whether a request waits from now on."""
        if is_waiting != self._is_waiting:
            self._changes.append((now_ns, self._waited_ns(now_ns)))
            self._is_waiting = is_waiting

    def idle_from(self, device_id: int, at_ns: int) -> None:
        """Record that a device is idle from this time: it came up, or lost its work."""
        self._idle_since_ns[device_id] = at_ns

    def ran(self, device_id: int, start_ns: int, end_ns: int) -> int:
        """Record a work of a device; returns the bubble before it."""
        idle_since_ns = self._idle_since_ns.get(device_id, start_ns)
        self._idle_since_ns[device_id] = end_ns
        return max(0, self._waited_ns(start_ns) - self._waited_ns(idle_since_ns))

    def _waited_ns(self, at_ns: int) -> int:
        """Return the total time until `at_ns` in which a request waited."""
        is_waiting = self._is_waiting
        for since_ns, waited_ns in reversed(self._changes):
            if since_ns <= at_ns:
                return waited_ns + (at_ns - since_ns if is_waiting else 0)
            is_waiting = not is_waiting
        return self._changes[0][1]
