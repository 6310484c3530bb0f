"""Priority classes of requests, and their weights.

A weight says how much a request counts where not all can be served in time: a request that waits without a deadline, or
past it, ages that many times as fast. A request that can be on time needs no weight.

When the queue fills, the light classes are refused first: each is accepted only up to its `room`.
"""

from __future__ import annotations

DEFAULT_CLASS = "standard"
DEFAULT_CLASSES = {"interactive": 4.0, "standard": 1.0, "batch": 0.25}
LEAST_WEIGHT, LARGEST_WEIGHT = 1e-3, 1e3


def room(weight: float, heaviest: float) -> float:
    """Return how full the queue may be, as a share of its bounds, for a request of this class to be accepted.

    This is the fourth root of the class's weight over the heaviest class's: a sixteenth of the weight gives half of the
    room. The ratio itself would leave light classes almost no room, even when no other class sends requests.
    """
    return float((weight / heaviest) ** 0.25)
