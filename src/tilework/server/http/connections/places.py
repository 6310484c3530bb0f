"""The places for connections: which connections have one, and which gives its place to a newcomer.

A server that only counts connections is locked up by one client that opens as many and sends nothing. So a connection
that is not in a request can lose its place. Unknown ones lose it first: the oldest one that has not had an answer which
only a key opens (without keys: any answer but a probe's). nginx closes idle connections for new ones in the same way
(`worker_connections`); it knows no shares.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

_SHARE_OF_STRANGERS = 2  # A half of the places is kept for connections that have shown a key, or are in a request.
_SHARE_OF_ADDRESS = 4
_REST_S = 1.0  # A connection that was used a moment ago will be used again.
_PREFIX = 64  # One subscriber has a network of this prefix of IPv6.


class Connection(Protocol):
    """A connection that holds a place. `holder` is its client: see `holder_of`."""

    @property
    def holder(self) -> str: ...

    def give_way(self) -> None:
        """Close, since another connection gets the place. `leave` may be called at once, or later."""


class ConnectionPlaces:
    """Places for `most` connections. `now_s` is a clock.

    A connection is a stranger until `rest` says that it has shown a key. Strangers that wait for the head of a request
    have at most half of the places, and those of one holder a quarter.
    """

    def __init__(self, most: int, now_s: Callable[[], float]) -> None:
        self.most = most
        self._now_s = now_s
        self._most_strangers = max(1, most // _SHARE_OF_STRANGERS)
        self.most_of_one = max(1, most // _SHARE_OF_ADDRESS)
        self._held: set[Connection] = set()
        # In the order in which they began to wait.
        self._leaving: dict[Connection, None] = {}
        self._strangers: dict[Connection, None] = {}
        self._by_holder: dict[str, dict[Connection, None]] = {}
        self._resting: dict[Connection, float] = {}
        self.num_given_way = 0

    def __len__(self) -> int:
        return len(self._held)

    def enter(self, newcomer: Connection) -> bool:
        """Give a new connection a place, for which another one may lose its own; return False if there is none."""
        own = self._by_holder.get(newcomer.holder, {})
        if len(own) >= self.most_of_one:
            self._let_go(next(iter(own)))
        elif len(self._strangers) >= self._most_strangers:
            self._let_go(next(iter(self._strangers)))
        if len(self._held) >= self.most and not self._make_room():
            return False
        self._held.add(newcomer)
        self._await_head(newcomer)
        return True

    def use(self, one: Connection) -> None:
        """Note that a connection is in a request: it keeps its place."""
        self._forget(one)

    def rest(self, one: Connection, *, is_known: bool) -> None:
        """Note that a connection waits for its next request; `is_known`: it has shown a key."""
        self._forget(one)
        if one not in self._held:
            return
        if is_known:
            self._resting[one] = self._now_s()
        else:
            self._await_head(one)

    def linger(self, one: Connection) -> None:
        """Note that a connection has its answer and is about to close: it is the first to lose its place."""
        self._forget(one)
        if one in self._held:
            self._leaving[one] = None

    def leave(self, one: Connection) -> None:
        """Note that a connection is closed. It need not have had a place."""
        self._forget(one)
        self._held.discard(one)

    def _await_head(self, one: Connection) -> None:
        self._strangers[one] = None
        self._by_holder.setdefault(one.holder, {})[one] = None

    def _make_room(self) -> bool:
        for waiting in (self._leaving, self._strangers):
            if waiting:
                self._let_go(next(iter(waiting)))
                return True
        longest = next(iter(self._resting), None)
        if longest is None or self._now_s() - self._resting[longest] < _REST_S:
            return False
        self._let_go(longest)
        return True

    def _let_go(self, one: Connection) -> None:
        self.leave(one)
        self.num_given_way += 1
        one.give_way()

    def _forget(self, one: Connection) -> None:
        for waiting in (self._leaving, self._strangers, self._resting):
            waiting.pop(one, None)
        own = self._by_holder.get(one.holder)
        if own is not None:
            own.pop(one, None)
            if not own:
                del self._by_holder[one.holder]


@lru_cache(maxsize=4096)
def holder_of(address: str) -> str:
    """Return the holder of an address's connections: the address, or the network of 64 bits of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _PREFIX), strict=False))
