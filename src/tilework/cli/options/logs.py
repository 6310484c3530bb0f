"""The options of what `tilework serve` and `tilework agent` log, and the log that follows from them."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tilework.worker.log_lines import LogHandler

_log = logging.getLogger(__name__)


class LogLevel(StrEnum):
    """The least level of what the server logs; `info` has a line for every call, `debug` also tracebacks of sizes that
    could not run when they were measured.
    """

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevelName = Annotated[
    LogLevel,
    typer.Option(
        "--log-level",
        envvar="TILEWORK_LOG_LEVEL",
        case_sensitive=False,
        help="Least level to log; info has a line per call, debug also tracebacks of sizes that cannot run.",
    ),
]
LogFile = Annotated[
    Path | None,
    typer.Option(
        "--log-file",
        envvar="TILEWORK_LOG_FILE",
        help="Append the log to this file, and open it anew after SIGHUP. Default: stderr.",
    ),
]


class ServerLog:
    """The log of this process, from now on. Libraries log their warnings to it, too; they have no other level."""

    def __init__(self, level: str, file: Path | None = None) -> None:
        """Open the log. Raises OSError if the file cannot be written."""
        self._file = file
        self.handler = LogHandler(sys.stderr if file is None else file.open("a", encoding="utf-8"))
        logging.basicConfig(level=logging.WARNING, handlers=[self.handler])
        self.set_level(level)

    def set_level(self, level: str) -> None:
        logging.getLogger("tilework").setLevel(level.upper())

    def reopen(self) -> None:
        """Go on in the file that has the name by now, a new one if there is none; where it was if that is not possible,
        and say so there.
        """
        if self._file is None:
            return
        try:
            before = self.handler.setStream(self._file.open("a", encoding="utf-8"))
        except OSError as error:
            _log.error("the log goes on in the file that was open: log_file = %s: %s", self._file, error.strerror)
        else:
            if before is not None:
                before.close()
