"""How long devices idled while a request was waiting for one."""

from __future__ import annotations

from collections import deque

_MOST_FLIPS = 1024  # Between the beginning of a work and the report of its end; older ones are forgotten.


class Bubbles:
    """Is told when works ran and when requests began or ceased to wait, and measures the gaps between works.

    Only the part of a gap in which a request waited is a bubble. Times are of one clock, in nanoseconds; the end of a
    work may be told long after what happened meanwhile.
    """

    def __init__(self) -> None:
        self._idle_since_ns: dict[int, int] = {}
        self._flips: deque[tuple[int, int]] = deque([(0, 0)], maxlen=_MOST_FLIPS)  # Time, and what was waited until it.
        self._is_waited = False

    def see(self, is_waited: bool, now_ns: int) -> None:
        """Whether a request waits from now on."""
        if is_waited != self._is_waited:
            self._flips.append((now_ns, self._waited_ns(now_ns)))
            self._is_waited = is_waited

    def idle_from(self, device_id: int, at_ns: int) -> None:
        """A device has nothing to do at this time: it came up, or lost its work."""
        self._idle_since_ns[device_id] = at_ns

    def ran(self, device_id: int, start_ns: int, end_ns: int) -> int:
        """The device ran a work; returns the bubble before it."""
        idle_since_ns = self._idle_since_ns.get(device_id, start_ns)
        self._idle_since_ns[device_id] = end_ns
        return max(0, self._waited_ns(start_ns) - self._waited_ns(idle_since_ns))

    def _waited_ns(self, at_ns: int) -> int:
        """For how long in all requests had waited by then."""
        is_waited = self._is_waited
        for since_ns, waited_ns in reversed(self._flips):
            if since_ns <= at_ns:
                return waited_ns + (at_ns - since_ns if is_waited else 0)
            is_waited = not is_waited
        return self._flips[0][1]
