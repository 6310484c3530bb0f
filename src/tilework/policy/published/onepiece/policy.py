"""OnePiece: its dispatch, and the request monitor, which refuses at once what is more than the services can do.

Theory of operation. K workers that take T each for a request can begin K / T requests per second, and the slowest
service sets the rate of all. The monitor books the time of what was accepted: for each service `_until_ns`, when its
workers would have done all of it, had they nothing else. A request is refused if the workers of a service have their
hands full by that (`depth` requests each), and would be for longer than `burst_ns`.

Source: OnePiece §5, "Request Monitor and Fast Reject". It has one K, one T and one rate, and does not say over which
time the rate is taken. Ours: time is booked, since requests differ in it. K requests may come at once to K idle
workers; and a stage that takes a tenth of a second does not refuse the second of two requests that come together, which
is what `burst_ns` is for. Each of several proxies gets its share of the workers: if each admitted K / T, the set would
get several times that. `headroom` below 1 is ours, too: at K / T itself queues grow without end where times or arrivals
are random."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from tilework.core.actions import Reject
from tilework.core.policy import CostModel
from tilework.core.request import RefusalCode, Request
from tilework.core.time import NS_PER_S, s_from_ns
from tilework.policy.published.onepiece.dispatch import OnePieceDispatch
from tilework.policy.published.onepiece.services import Service


@dataclass(frozen=True, slots=True)
class Claim:
    """The share of a request in a service of `num_workers`; `longest_ns` is the longest that any keeps its own."""

    device_ns: int
    num_workers: int
    longest_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """The limit to the rate of requests.

    Attributes:
        headroom: the share of the workers' time that may be asked for.
        depth: how many requests each worker may have, the running one included, before others are refused.
        burst_ns: how long a request may wait for workers whose hands are full.
        num_proxies: how many front ends share the services; a request is at one of them, by its uid.
    """

    headroom: float = 0.95
    depth: float = 1.0
    burst_ns: int = NS_PER_S
    num_proxies: int = 1


@dataclass(slots=True)
class RequestMonitor:
    """Refuses what is more than the services can do."""

    limit: RateLimit
    _until_ns: dict[tuple[int, Service], float] = field(default_factory=dict, init=False)

    def refusal(self, request: Request, claims: Mapping[Service, Claim], now_ns: int) -> Reject | None:
        """Return the refusal of a request; None if each service has room for it."""
        waits = {
            service: self._until_ns.get((self._proxy(request), service), now_ns) - now_ns - self._most_ns(claim)
            for service, claim in claims.items()
        }
        slowest = max(waits, key=waits.__getitem__, default=None)
        if slowest is None or waits[slowest] <= 0:
            return None
        num = claims[slowest].num_workers
        reason = f"more is asked of {slowest} than its {num} devices can do; there is room in "
        retry_ns = int(waits[slowest]) + 1
        return Reject(request.uid, f"{reason}{s_from_ns(retry_ns):.1f} s", None, RefusalCode.QUEUE, retry_ns)

    def accept(self, request: Request, claims: Mapping[Service, Claim], now_ns: int) -> None:
        """Book the time of a request that was accepted."""
        for service, claim in claims.items():
            key = self._proxy(request), service
            self._until_ns[key] = max(self._until_ns.get(key, now_ns), now_ns) + self._booked_ns(claim)

    def forget_unserved(self, served: Collection[Service]) -> None:
        """Drop what was booked on services that no pipeline has any more."""
        self._until_ns = {key: until_ns for key, until_ns in self._until_ns.items() if key[1] in served}

    def _booked_ns(self, claim: Claim) -> float:
        return claim.device_ns * self.limit.num_proxies / (claim.num_workers * self.limit.headroom)

    def _most_ns(self, claim: Claim) -> float:
        """Return how much may be booked before a request: with it, `depth` requests for each worker, or a burst."""
        return max(
            self.limit.burst_ns, self.limit.depth * claim.longest_ns / self.limit.headroom - self._booked_ns(claim)
        )

    def _proxy(self, request: Request) -> int:
        return crc32(request.uid.encode()) % self.limit.num_proxies


@dataclass(slots=True, kw_only=True)
class OnePiece(OnePieceDispatch):
    """`OnePieceDispatch`, which accepts requests no faster than its slowest stage can begin them.

    A refusal names when there will be room; the paper's client goes to another set. Requests of a pipeline that was not
    seen yet are accepted: it has no instances, and gets one.

    Source: OnePiece §5; departures at the top of this file.

    Attributes:
        limit: how fast requests may come.
    """

    limit: RateLimit = field(default_factory=RateLimit)
    _monitor: RequestMonitor = field(init=False)

    def __post_init__(self) -> None:
        OnePieceDispatch.__post_init__(self)  # Dataclasses with slots know no super().
        self._monitor = RequestMonitor(self.limit)

    def refusal(self, request: Request, costs: CostModel, now_ns: int) -> Reject | None:
        if not self._traffic.services.knows(request.pipeline):
            return None
        refusal = self._monitor.refusal(request, self._claims(request, costs), now_ns)
        if refusal is not None:
            self._manager.refused(request, costs)
        return refusal

    def forget(self, pipeline: str, costs: CostModel) -> None:
        OnePieceDispatch.forget(self, pipeline, costs)
        self._monitor.forget_unserved(self._traffic.services.all())

    def _accepted(self, requests: Sequence[Request], costs: CostModel, now_ns: int) -> None:
        for request in requests:
            self._monitor.accept(request, self._claims(request, costs), now_ns)

    def _claims(self, request: Request, costs: CostModel) -> dict[Service, Claim]:
        """Return what a request takes of each service that has instances."""
        return {
            service: Claim(run.device_ns, num, self._traffic.longest_ns(service, costs))
            for service, run in self._traffic.parts(request, costs).items()
            if (num := self._manager.num_workers(service))
        }
