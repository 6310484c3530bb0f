"""The file of the event log, written line by line until a write fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_log = logging.getLogger(__name__)


class LogFile:
    """Writes lines to a file; without a file it discards them.

    The log ends at the first line that cannot be written, since a log with a gap cannot be replayed. `on_lost` is then
    called.
    """

    def __init__(self, file: TextIO | None, on_lost: Callable[[], None]) -> None:
        self._file = file
        self._on_lost = on_lost

    def write(self, line: str) -> None:
        """Write a line and flush it, so that readers see it at once."""
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            _log.warning("the event log ends here: %s", error)
            with suppress(OSError):  # Closing would try to write the line once more, now or when the server ends.
                self._file.close()
            self._file = None
            self._on_lost()
