"""Classes of requests and what they weigh against each other.

A weight says how much a request counts where not all can be served in time: one that waits without a deadline
(or past it) ages that many times as fast. A request that can be on time needs no weight for it.

When the queue fills, the light classes are refused first: each may come in only up to its `room`.
"""

from __future__ import annotations

DEFAULT_CLASS = "standard"
DEFAULT_CLASSES = {"interactive": 4.0, "standard": 1.0, "batch": 0.25}
LEAST_WEIGHT, LARGEST_WEIGHT = 1e-3, 1e3


def room(weight: float, heaviest: float) -> float:
    """How full the queue may be when a request of this class still comes in, as a share of its bounds.

    The fourth root of its weight against the heaviest class's: one that weighs a sixteenth has half of the room. The
    weights themselves would leave light classes next to nothing, though they may be all that is sent.
    """
    return float((weight / heaviest) ** 0.25)
