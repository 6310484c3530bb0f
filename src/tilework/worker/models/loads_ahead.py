"""Loads that may begin before their turn, while works that come before them run."""

from __future__ import annotations

from collections import deque
from threading import Lock

from tilework.core.wire.commands import (
    CloseGroup,
    Command,
    EnterNode,
    Execute,
    Forget,
    ImportState,
    LoadWeights,
    NoteSaved,
)

_CHANGES_NOTHING = (Execute, ImportState, Forget, NoteSaved, EnterNode, CloseGroup, LoadWeights)


class LoadsAhead:
    """Loads that were received and have not had their turn, up to the first command in the queue that changes weights.

    So the device has room for them already: a command before a load makes room for it. The receiving thread calls
    `receive` in the order of the queue; the executing thread calls the rest.
    """

    def __init__(self) -> None:
        self._loads: deque[LoadWeights] = deque()
        self._num_changes = 0  # In the queue.
        self._lock = Lock()

    def receive(self, command: Command) -> None:
        with self._lock:
            if not isinstance(command, _CHANGES_NOTHING):
                self._num_changes += 1
            elif isinstance(command, LoadWeights) and not self._num_changes:
                self._loads.append(command)

    def executed(self, command: Command) -> None:
        """Note that a command has had its turn."""
        with self._lock:
            if not isinstance(command, _CHANGES_NOTHING):
                self._num_changes -= 1
            elif self._loads and self._loads[0] is command:
                self._loads.popleft()

    def take(self) -> list[LoadWeights]:
        """Return the loads that may begin, each once."""
        with self._lock:
            taken = list(self._loads)
            self._loads.clear()
        return taken
