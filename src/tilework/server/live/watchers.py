"""The clients that watch a server: one frame for all that may see the same, twice a second.

A watcher gets the next frame when it has taken the one before. A slower watcher gets fewer frames, each with what
happened meanwhile, and nothing piles up for it; the HTTP server cuts off a client that hardly reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tilework.runtime.engine import Engine
from tilework.server.http.sse import event
from tilework.server.live.feed import Feed
from tilework.server.live.frames import Frame, Viewer, frame

PERIOD_S = 0.5
MOST_WATCHERS = 32
EVENT = "tilework.live"


class TooManyWatch(Exception):
    """The server has as many watching clients as it takes."""


@dataclass(slots=True, eq=False)
class _Shared:
    """The latest frame for one kind of viewer, and its events with and without devices."""

    frame: Frame
    events: dict[bool, bytes] = field(default_factory=dict)

    def event(self, with_devices: bool) -> bytes:
        made = self.events.get(with_devices)
        if made is None:
            devices = self.frame.devices if with_devices else None
            made = self.events[with_devices] = event(EVENT, {**self.frame.fields, "devices": devices})
        return made


@dataclass(slots=True, eq=False)
class Watchers:
    """The clients that watch; `num_watching` counts them."""

    engine: Engine
    feed: Feed
    num_watching: int = 0
    _shared: dict[Viewer, _Shared] = field(default_factory=dict)
    _shared_at: int = 0  # The period of the shared frames.
    _closed: asyncio.Event = field(default_factory=asyncio.Event)

    def state(self, viewer: Viewer) -> dict[str, object]:
        """Return the present state, with what was kept of the past."""
        return _complete(frame(self.engine, self.feed, viewer, 0))

    def close(self) -> None:
        """End all streams: the server stops."""
        self._closed.set()

    def enter(self) -> None:
        """Count one more watcher, until it leaves. Raises TooManyWatch."""
        if self.num_watching >= MOST_WATCHERS:
            raise TooManyWatch
        self.num_watching += 1

    def leave(self) -> None:
        self.num_watching -= 1

    async def events(self, viewer: Viewer, may_see: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield the state with the past, then changes, until the server stops or the viewer may not see them any more.

        `devices` are null if they have not changed.
        """
        latest = frame(self.engine, self.feed, viewer, 0)
        yield event(EVENT, _complete(latest))
        while not await self._closed_before(self._next_s()) and may_see():
            shared = self._share(viewer, latest.end)
            has_changed = shared.frame.devices != latest.devices
            latest = shared.frame
            yield shared.event(has_changed)

    def _share(self, viewer: Viewer, begin: int) -> _Shared:
        """Return a frame that begins there: that of this period if another watcher has it already."""
        period = self._period()
        if period != self._shared_at:
            self._shared.clear()
            self._shared_at = period
        shared = self._shared.get(viewer)
        if shared is None or shared.frame.begin != begin:
            shared = self._shared[viewer] = _Shared(frame(self.engine, self.feed, viewer, begin))
        return shared

    def _period(self) -> int:
        return int(asyncio.get_running_loop().time() / PERIOD_S)

    def _next_s(self) -> float:
        """Return the seconds until the next period begins: all watchers wake up together."""
        return PERIOD_S * (self._period() + 1) - asyncio.get_running_loop().time()

    async def _closed_before(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), max(0.001, seconds))
        return self._closed.is_set()


def _complete(made: Frame) -> dict[str, object]:
    return {**made.fields, "devices": made.devices}
