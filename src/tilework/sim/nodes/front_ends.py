"""Front ends: processes before the server at which clients wait for their requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tilework.core.time import NS_PER_S
from tilework.sim.clock import Clock
from tilework.sim.faults import FaultInjector

_NUM = 3


class FrontEnds:
    """Takes requests by turns. One that dies loses its clients, and the next process has its place at once.

    `on_lost` is called with each request whose client waited there. Half of the clients do not wait; they ask later.
    """

    def __init__(self, clock: Clock, injector: FaultInjector, on_lost: Callable[[str], None]) -> None:
        self._clock = clock
        self._injector = injector
        self._on_lost = on_lost
        self._is_on = "frontend" in injector.faults
        self._waiting: list[list[str]] = [[] for _ in range(_NUM)]
        self._num_requests = 0

    def take(self, uid: str) -> None:
        """Take a request that has come in. The front end that took it may die later."""
        if not self._is_on:
            return
        place = self._num_requests % _NUM
        self._num_requests += 1
        if self._injector.fraction("frontend") < 0.5:
            self._waiting[place].append(uid)
        if self._injector.injects("frontend"):
            at_ns = self._clock.now_ns + round(self._injector.magnitude("frontend") * NS_PER_S)
            self._clock.at(at_ns, partial(self._die, place), is_device_event=True)

    def _die(self, place: int) -> None:
        uids = self._waiting[place]
        self._waiting[place] = []
        for uid in uids:
            self._on_lost(uid)
