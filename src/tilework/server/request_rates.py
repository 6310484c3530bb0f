"""How many calls for pictures each key may make in a minute."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.core.time import NS_PER_S
from tilework.server.tenants import Tenant

_MINUTE_NS = 60 * NS_PER_S


@dataclass(slots=True)
class _Bucket:
    """How many calls a key has left, as of a time; they come back evenly."""

    left: float
    as_of_ns: int


@dataclass(slots=True)
class RequestRates:
    """Token buckets by key (RFC 2697's committed rate): a key may make a minute's calls at once after a minute's rest.

    There are as many as keys of tenants that have a limit, since other keys get no further than the door. Without keys
    all calls share one.
    """

    _buckets: dict[tuple[str, bytes], _Bucket] = field(default_factory=dict)

    def take(self, tenant: Tenant, key: bytes, now_ns: int) -> int:
        """Count a call, and return 0; or, if there is none left, return after how many ns there will be one."""
        per_minute = tenant.requests_per_minute
        if per_minute is None:
            return 0
        bucket = self._buckets.setdefault((tenant.name, key), _Bucket(per_minute, now_ns))
        bucket.left = min(per_minute, bucket.left + (now_ns - bucket.as_of_ns) * per_minute / _MINUTE_NS)
        bucket.as_of_ns = now_ns
        if bucket.left >= 1:
            bucket.left -= 1
            return 0
        return int((1 - bucket.left) * _MINUTE_NS / per_minute) + 1
