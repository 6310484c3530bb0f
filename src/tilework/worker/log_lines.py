"""Format of the log: lines of the server, its agents and its workers, which write to its stderr."""

from __future__ import annotations

import logging
import re
import sys
import time
from dataclasses import dataclass
from typing import TextIO

_MOST_ALIKE = 20
_WINDOW_S = 10.0
_MOST_KINDS = 500
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_Kind = tuple[str, int, str, type[BaseException] | None]


def log_to_stderr(level: int = logging.NOTSET) -> None:
    """Log warnings of this process, and all of this package from `level` on, if one is given."""
    logging.basicConfig(level=logging.WARNING, handlers=[LogHandler(sys.stderr)])
    logging.getLogger("tilework").setLevel(level)


@dataclass(slots=True)
class _Window:
    """Lines of one kind since `begin_s`, and the last one of those that were not written."""

    begin_s: float
    num_lines: int = 0
    left_out: logging.LogRecord | None = None


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes lines with their time in UTC, level and module; at most 20 warnings and errors of a kind in 10 seconds.

    Lines of a kind come from one place and may differ in numbers. One further line counts those that were left out; it
    is written with the next record of any kind after the 10 seconds, or when the handler is closed.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        made = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        made.converter = time.gmtime
        self.setFormatter(made)
        self._windows: dict[_Kind, _Window] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless there are too many of its kind."""
        self._end_windows(record.created - _WINDOW_S)
        if record.levelno < logging.WARNING or self._is_written(record):
            super().emit(record)

    def close(self) -> None:
        self.acquire()
        try:
            self._end_windows(float("inf"))
        finally:
            self.release()
        super().close()

    def _is_written(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[0] if record.exc_info else None
        kind = record.name, record.levelno, _NUMBERS.sub("#", str(record.msg)[:200]), error
        if kind not in self._windows and len(self._windows) >= _MOST_KINDS:
            self._end_windows(float("inf"))
        window = self._windows.setdefault(kind, _Window(record.created))
        window.num_lines += 1
        if window.num_lines <= _MOST_ALIKE:
            return True
        window.left_out = record
        return False

    def _end_windows(self, until_s: float) -> None:
        """End the windows that began before `until_s`, the oldest first, and write what they have left out."""
        while self._windows:
            kind, window = next(iter(self._windows.items()))
            if window.begin_s > until_s:
                return
            del self._windows[kind]
            if window.left_out is not None:
                super().emit(_summary(window.left_out, window.num_lines - _MOST_ALIKE))


def _summary(last: logging.LogRecord, number: int) -> logging.LogRecord:
    line = last.getMessage().partition("\n")[0]
    text = f"{line} (and {number} times more within {_WINDOW_S:g} s)"
    return logging.LogRecord(last.name, last.levelno, last.pathname, last.lineno, text, None, None)
