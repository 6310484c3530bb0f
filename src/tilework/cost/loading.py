"""Time that states take to move: bytes over the speed of a link.

Rejected for links between nodes: probes between all pairs at the start. They measure an idle network, and the first
fetch says it as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tilework.core.cost_row import CostRow
from tilework.core.graph.progress import Cursor
from tilework.core.request import Request
from tilework.core.time import NS_PER_S

_MOST = 4.0  # Largest factor by which a measurement counts as longer or shorter than expected.
_KEPT = 0.9


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two devices: it moves `num_bytes` in `seconds` + num_bytes / `bytes_per_s`."""

    bytes_per_s: float
    seconds: float = 0.0

    def move_ns(self, num_bytes: int) -> int:
        return round((self.seconds + num_bytes / self.bytes_per_s) * NS_PER_S)


@dataclass(slots=True)
class MeasuredLink:
    """Predicted time of moves between two nodes: a line through the measured ones, with a part for each move and one
    for each byte. Both parts are at least 0; while all moves had one size, the time is in proportion to it.

    A weighted least squares fit: each move counts `_KEPT` times as much as the one after it, and no time counts as more
    than `_MOST` times what was expected.
    """

    _weight: float = 0.0
    _mean_bytes: float = 0.0
    _mean_ns: float = 0.0
    _spread: float = 0.0  # Of bytes: the sum of squares.
    _together: float = 0.0  # Of bytes and times.

    def observe(self, num_bytes: int, run_ns: int) -> None:
        """Learn from a move that took this time."""
        if num_bytes <= 0 or run_ns <= 0:
            return
        time_ns = float(run_ns if not self._weight else min(run_ns, _MOST * max(1, self.move_ns(num_bytes))))
        self._weight = self._weight * _KEPT + 1.0
        share = 1.0 / self._weight
        off_bytes = num_bytes - self._mean_bytes
        self._mean_bytes += share * off_bytes
        self._spread = self._spread * _KEPT + off_bytes * (num_bytes - self._mean_bytes)
        self._together = self._together * _KEPT + off_bytes * (time_ns - self._mean_ns) * (1.0 - share)
        self._mean_ns += share * (time_ns - self._mean_ns)

    def move_ns(self, num_bytes: int) -> int:
        """Return how long a move takes; at least one was measured."""
        most = self._mean_ns / self._mean_bytes
        per_byte = most if not self._spread else min(most, max(0.0, self._together / self._spread))
        return round(self._mean_ns + per_byte * (num_bytes - self._mean_bytes))


class MoveTimes:
    """Predicted time to move the state of a request to a device that has nothing of it.

    It follows from the link of the table, or else from a measured one. It is `default_ns` where there is neither, or no
    `state_bytes` of the stages that have written the state.
    """

    def __init__(self, rows: Iterable[CostRow], links: Mapping[str, Link], default_ns: int) -> None:
        self._links = links
        self._default_ns = default_ns
        self._sizes: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for row in rows:
            if row.state_bytes is not None and row.batch == 1:
                self._sizes.setdefault((row.pipeline, row.stage), []).append((row.shape.pixels, row.state_bytes))

    def ns(
        self, request: Request, progress: Cursor, nodes: tuple[int, int], measured: MeasuredLink | None = None
    ) -> int:
        """Return how long moving takes, of the states that the next stages of a request at this position need."""
        kind = "device" if nodes[0] == nodes[1] else "node"
        size = self._state_bytes(request, progress)
        link = self._links.get(kind) or measured
        return self._default_ns if link is None or size is None else link.move_ns(size)

    def _state_bytes(self, request: Request, progress: Cursor) -> int | None:
        itinerary = progress.itinerary
        num_done = progress.num_done
        stages = [itinerary.stages[index] for index in itinerary.needed_from[num_done]]
        if progress.stage is not None and progress.position > (itinerary.ends[num_done - 1] if num_done else 0):
            stages.append(progress.stage)
        known = [self._sizes.get((stage.pipeline, stage.name)) for stage in stages]
        sizes = [_nearest(request.shape.pixels, points) for points in known if points]
        return sum(sizes) if sizes else None


def _nearest(pixels: int, points: Iterable[tuple[int, int]]) -> int:
    """Return the size at the nearest number of pixels."""
    return min(points, key=lambda point: abs(point[0] - pixels))[1]
