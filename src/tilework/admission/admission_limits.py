"""Bounds on the queue: light classes reach them earlier, and no tenant may fill the queue for the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from tilework.admission.contract import Backlog
from tilework.core.actions import Reject
from tilework.core.request import RefusalCode, Request, Shape
from tilework.core.time import s_from_ns

_SHARES_FROM = 0.5  # Part of the queue in use from which on tenants are limited to their shares.
_MOST_OF_ONE = 0.9  # The share of a tenant that is alone; the rest is kept for tenants that come later.


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Bounds on the jobs that wait or run; an accepted request is never refused later.

    At most `max_jobs` requests are accepted at a time, and the devices that are up may need at most `max_backlog_ns`
    for the works that they have and for the waiting jobs. A class may use its `Request.room` of both bounds. Once half
    of that is in use, a tenant may not have more than its fair share of it: by weight among the tenants that have
    requests in the system, and nine tenths if it is alone.

    A promised request does not wait in the queue but has a place among the reservations. So neither its class nor the
    time of the queue counts. The number of promised requests is bounded, and so is the share of their tenant, since
    other requests cannot use promised time. If there are other tenants, a tenant may hold a quarter of all that may be
    promised (`Request.promise_share`): of `max_jobs`, and of the time of the devices that are up during
    `max_backlog_ns`. This holds even while the others have no requests, since a promise is never taken back. A tenant
    that shares with none may hold all.

    Without a device, the time of the backlog is unknown, and only the numbers are bounded.
    """

    max_jobs: int
    max_backlog_ns: int

    def refusal(self, request: Request, backlog: Backlog) -> Reject | None:
        """Return the refusal of a request; None if there is room for it."""
        if (refused := self._promise_refusal(request, backlog)) is not None:
            return refused
        room = 1.0 if request.is_promise else request.room
        if self._is_half_empty(room, backlog):
            return None
        for bound in self._bounds(request, backlog, room):
            if (refused := bound.refusal(request)) is not None:
                return refused
        return None

    def _promise_refusal(self, request: Request, backlog: Backlog) -> Reject | None:
        """Return the refusal of a request whose tenant holds its share of promises; it may come again without one."""
        if not request.is_promise or request.promise_share == 1:
            return None
        own = backlog.promised_to(request.tenant)
        num_devices = len(backlog.devices)
        own_ns = own.device_ns // max(1, num_devices)
        most, most_ns = ceil(request.promise_share * self.max_jobs), int(request.promise_share * self.max_backlog_ns)
        if own.num_jobs >= most:
            retry_ns = own_ns * (own.num_jobs - most + 1) // own.num_jobs
            held, share = f"{own.num_jobs} promised requests", f"{most} requests"
        elif num_devices and own_ns >= most_ns:
            retry_ns = own_ns - most_ns + 1
            held, share = f"{s_from_ns(own_ns):.0f} s of promised requests", f"{s_from_ns(most_ns):.0f} s"
        else:
            return None
        reason = f"you have {held}; your share is {share}; ask without on_miss reject, or when some of them have ended"
        return Reject(request.uid, reason, None, RefusalCode.TENANT, retry_ns if num_devices else None)

    def _is_half_empty(self, room: float, backlog: Backlog) -> bool:
        """Return whether the queue is so empty that no bound refuses anything, as nearly always."""
        held = backlog.held()
        num_devices = len(backlog.devices)
        if held.num_jobs >= _SHARES_FROM * ceil(room * self.max_jobs):
            return False
        if not num_devices:
            return True
        wait_ns = (held.device_ns + backlog.taken_ns()) // num_devices
        return wait_ns < _SHARES_FROM * int(room * self.max_backlog_ns)

    def standing_refusal(self, backlog: Backlog, now_ns: int) -> Reject | None:
        """Return the refusal of every request that asks for no promise; None if one of some tenant and class has room.

        Promises are left out since they have a place of their own, and shares since they concern single tenants.
        """
        any_other = Request(uid="", pipeline="", shape=Shape(1, 1), steps=1, arrival_ns=now_ns, tenant="")
        refused = self.refusal(any_other, backlog)
        return refused if refused is not None and refused.code is RefusalCode.QUEUE else None

    def _bounds(self, request: Request, backlog: Backlog, room: float) -> Iterator[_Bound]:
        held = backlog.held()
        own = backlog.held(request.tenant)
        num_devices = len(backlog.devices)
        share = request.tenant_weight / (request.tenant_weight + backlog.rivals_weight(request.tenant))
        wait_ns = (held.device_ns + backlog.taken_ns()) // num_devices if num_devices else None
        yield _Bound(
            used=held.num_jobs,
            own=own.num_jobs,
            limit=ceil(room * self.max_jobs),
            share=share,
            each_ns=None if wait_ns is None else wait_ns / max(1, held.num_jobs),
        )
        if wait_ns is not None:
            limit_ns = int(room * self.max_backlog_ns)
            yield _Bound(
                used=wait_ns, own=own.device_ns // num_devices, limit=limit_ns, share=share, each_ns=1.0, in_time=True
            )


class _Bound(NamedTuple):
    """A bound, and how much of it all tenants and this tenant use: a number of requests, or a time if `in_time`.

    `each_ns` is how long the devices take for one unit.
    """

    used: int
    own: int
    limit: int
    share: float
    each_ns: float | None
    in_time: bool = False

    def refusal(self, request: Request) -> Reject | None:
        is_exempt = self.in_time and request.is_promise
        if self.used >= self.limit and not is_exempt:
            retry_ns = self._retry_ns(self.used - self.limit, 1.0)
            return Reject(request.uid, self._full(request), None, RefusalCode.QUEUE, retry_ns)
        most_own = ceil(min(self.share, _MOST_OF_ONE) * self.limit)
        if self.used >= _SHARES_FROM * self.limit and self.own >= most_own:
            retry_ns = self._retry_ns(self.own - most_own, self.share)
            return Reject(request.uid, self._over_share(most_own), None, RefusalCode.TENANT, retry_ns)
        return None

    def _retry_ns(self, excess: int, speed: float) -> int | None:
        """Return how long it takes until there is room for one more, if `speed` of the devices serves the excess."""
        return None if self.each_ns is None else int((excess + 1) * self.each_ns / speed)

    def _full(self, request: Request) -> str:
        is_whole = request.is_promise or request.room == 1
        used, limit = self._shown(self.used), self._shown(self.limit)
        what = f"waiting and running requests take {used}" if self.in_time else f"{used} are waiting or running"
        return f"{what}; the limit{'' if is_whole else f' for class {request.priority}'} is {limit}"

    def _over_share(self, most_own: int) -> str:
        own, share = self._shown(self.own), self._shown(most_own)
        return f"you have {own} waiting or running; your share is {share}"

    def _shown(self, amount: int) -> str:
        return f"{s_from_ns(amount):.0f} s" if self.in_time else f"{amount} requests"
