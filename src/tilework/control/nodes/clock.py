"""How far the clock of another node is ahead of that of the engine, from messages there and back."""

from __future__ import annotations

from collections import deque

_MAX_SAMPLES = 32


class ClockOffset:
    """The offset of a node's monotonic clock, from the sample with the shortest way there and back.

    The node read its clock between the sending of a ping and its answer, so the true offset lies within half of that
    way of the middle (as in NTP; Mills, RFC 5905, section 8). The latest 32 samples count, since clocks drift.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=_MAX_SAMPLES)  # Way there and back, offset.

    def add(self, sent_ns: int, node_ns: int, received_ns: int) -> None:
        """Add a sample: the engine sent a ping and received its answer at these times, and the node's clock between."""
        self._samples.append((received_ns - sent_ns, node_ns - (sent_ns + received_ns) // 2))

    @property
    def offset_ns(self) -> int:
        """What the node's clock shows more than that of the engine; 0 without a sample."""
        return min(self._samples, default=(0, 0))[1]

    @property
    def error_ns(self) -> int | None:
        """The true offset differs by at most this; None without a sample."""
        return (min(self._samples)[0] + 1) // 2 if self._samples else None

    def engine_ns(self, node_ns: int) -> int:
        """A time of the node on the clock of the engine."""
        return node_ns - self.offset_ns
