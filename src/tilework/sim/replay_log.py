"""The log from which a simulated controller is rebuilt after a crash."""

from __future__ import annotations

from tilework.control.controller import Controller
from tilework.core.actions import Action
from tilework.core.events import Event


class ReplayDiverged(AssertionError):
    """A controller that was rebuilt from its log gives other answers than the first one."""


class ReplayLog:
    """Events with their times and the controller's answers, in memory."""

    def __init__(self) -> None:
        self._entries: list[tuple[Event, int, tuple[Action, ...]]] = []

    def record(self, event: Event, now_ns: int, actions: tuple[Action, ...]) -> None:
        self._entries.append((event, now_ns, actions))

    def clear(self) -> None:
        self._entries.clear()

    def replay(self, controller: Controller) -> None:
        """Let a new controller handle all events. Raises ReplayDiverged if it answers one differently."""
        for index, (event, at_ns, actions) in enumerate(self._entries):
            if controller.handle(event, at_ns) != actions:
                raise ReplayDiverged(f"event {index} of the log, {event!r}, is answered differently when replayed")
