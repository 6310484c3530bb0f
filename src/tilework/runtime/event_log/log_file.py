"""The event log while it is written, line by line, until a write fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from tilework.control.log import entry_line
from tilework.control.log_state import LogState
from tilework.core.actions import Action
from tilework.core.events import Event
from tilework.runtime.event_log.segmented_file import SegmentedFile

_log = logging.getLogger(__name__)

HeaderOf = Callable[[int, LogState | None], str]
"""Function that returns the header of a segment, by its number; for a later segment, with the log's state so far."""


class LogFile:
    """Writes a log to a file, which may have segments; without a file nothing is done.

    The log ends at the first line that cannot be written, since a log with a gap cannot be replayed. `on_lost` is then
    called.
    """

    def __init__(self, file: TextIO | SegmentedFile | None, on_lost: Callable[[], None]) -> None:
        self._file = file
        self._on_lost = on_lost
        self._state = LogState() if isinstance(file, SegmentedFile) else None

    def begin(self, header_of: HeaderOf) -> None:
        """Write the header."""
        self._header_of = header_of
        self._write(lambda: header_of(1, None))

    def add(self, event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        """Write a `handle` call, in the next segment if this one is full."""
        if isinstance(self._file, SegmentedFile) and self._file.is_full:
            self._write(self._next_header)
        self._write(lambda: entry_line(event, actions, now_ns))
        if self._state is not None:
            self._state.add(event, actions)

    def _next_header(self) -> str:
        """Begin a segment; returns its header. Raises OSError."""
        assert isinstance(self._file, SegmentedFile)
        self._file.begin_segment()
        return self._header_of(self._file.segment, self._state)

    def _write(self, line: Callable[[], str]) -> None:
        """Write a line and flush it, so that readers see it at once."""
        if self._file is None:
            return
        try:
            self._file.write(line() + "\n")
            self._file.flush()
        except OSError as error:
            _log.warning("the event log ends here, until the server is started again: %s", error)
            with suppress(OSError):  # Closing would try to write the line once more, now or when the server ends.
                self._file.close()
            self._file = None
            self._on_lost()
