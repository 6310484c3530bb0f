"""Offset of a node's clock from the engine's, measured by messages there and back."""

from __future__ import annotations

from collections import deque

_MAX_SAMPLES = 32
_DRIFT_PPM = 30
"""Largest drift of two clocks, in ns per ms: 15 for each (RFC 5905, section 7.2: PHI)."""


class ClockOffset:
    """The offset of a node's monotonic clock, from the sample with the smallest error.

    The node read its clock between the sending of a ping and its answer, so the true offset was within half of that
    time of the middle (as in NTP; Mills, RFC 5905, section 8). Since then the clocks have parted by at most 30 ppm. The
    latest 32 samples count.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int, int]] = deque(maxlen=_MAX_SAMPLES)  # Time there and back, offset, sent.
        self._latest_ns = 0

    def add(self, sent_ns: int, node_ns: int, received_ns: int) -> None:
        """Add a sample: the engine sent a ping and received its answer at these times, and the node's clock between."""
        self._samples.append((received_ns - sent_ns, node_ns - (sent_ns + received_ns) // 2, sent_ns))
        self._latest_ns = received_ns

    @property
    def offset_ns(self) -> int:
        """Time of the node's clock minus that of the engine's; 0 without a sample."""
        return min(self._samples, key=self._error_ns)[1] if self._samples else 0

    @property
    def error_ns(self) -> int | None:
        """Largest error of the offset when the latest sample came; None without a sample."""
        return min(map(self._error_ns, self._samples)) if self._samples else None

    def _error_ns(self, sample: tuple[int, int, int]) -> int:
        way_ns, _, sent_ns = sample
        return (way_ns + 1) // 2 + -(-(self._latest_ns - sent_ns) * _DRIFT_PPM // 1_000_000)

    def engine_ns(self, node_ns: int) -> int:
        """Return a time of the node on the clock of the engine."""
        return node_ns - self.offset_ns
