"""Classes of requests and what they weigh against each other.

A weight says how much a request counts where not everybody can be served in time: one that waits without a deadline
(or past it) ages that many times as fast. A request that can be on time needs no weight for it.
"""

from __future__ import annotations

DEFAULT_CLASS = "standard"
DEFAULT_CLASSES = {"interactive": 4.0, "standard": 1.0, "batch": 0.25}
LEAST_WEIGHT, LARGEST_WEIGHT = 1e-3, 1e3
