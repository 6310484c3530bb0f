"""How lines of the log look: those of the server, its agents and its workers, which write to its stderr."""

from __future__ import annotations

import logging
import sys
import time


def formatter() -> logging.Formatter:
    """Lines with their time in UTC, level and module."""
    made = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    made.converter = time.gmtime
    return made


def log_to_stderr() -> None:
    """Log warnings of this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
