"""Time is integer nanoseconds inside, seconds at the edges (files, HTTP, command line)."""

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NEVER_NS = 1 << 62
"""Later than any time. Sums with real times stay integers of one machine word."""


def ns_from_s(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def s_from_ns(nanoseconds: int) -> float:
    return nanoseconds / NS_PER_S
