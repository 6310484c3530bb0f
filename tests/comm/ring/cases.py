"""What is explored of the protocol as it is: nothing of this may have a violation.

Where an owner lives on, its fence does not hold: its bytes may arrive after the place was given to others. Then
messages may be lost, but none is delivered that was not sent.
"""

from __future__ import annotations

from typing import Any

QUICK: dict[str, dict[str, Any]] = {
    "two messages that wrap": {"sizes": ((1, 2),), "slots": 2, "units": 4, "limit": 2},
    "a producer that ends": {"sizes": ((1, 2),), "slots": 2, "units": 4, "crashes": 1},
    "two producers": {"sizes": ((1,), (2,)), "slots": 2, "units": 4},
    "late bytes": {"sizes": ((2,), (2,)), "slots": 2, "units": 2, "abandons": 1},
    "another owner id": {"sizes": ((1, 1),), "slots": 2, "units": 4, "limit": 2, "rejoins": 0},
    "an owner that lives on": {"sizes": ((2,), (2,)), "slots": 2, "units": 2, "abandons": 1, "is_fenced": False},
}
LONG: dict[str, dict[str, Any]] = {
    "two messages each": {"sizes": ((1, 2), (2, 1)), "slots": 2, "units": 4},
    "one ends": {"sizes": ((1, 1), (1,)), "slots": 2, "units": 2, "crashes": 1},
    "abandoned, and late": {"sizes": ((2,), (2, 2)), "slots": 2, "units": 4, "abandons": 1},
    "the consumer begins anew": {"sizes": ((1, 2), (1,)), "slots": 2, "units": 4, "restarts": 1, "limit": 2},
    "one ends while there is no consumer": {
        "sizes": ((1,), (1,)),
        "slots": 2,
        "units": 2,
        "crashes": 1,
        "restarts": 1,
    },
    "another owner id from the next consumer": {
        "sizes": ((1, 1), (1,)),
        "slots": 2,
        "units": 4,
        "limit": 2,
        "restarts": 1,
        "rejoins": 0,
    },
    "a peer abandons": {"sizes": ((2,), (1,)), "slots": 2, "units": 2, "has_peer": True},
    "an owner that lives on beside two messages": {
        "sizes": ((2,), (2, 2)),
        "slots": 2,
        "units": 4,
        "abandons": 1,
        "is_fenced": False,
    },
}
