"""How long a start took, by part, and until when the first picture can be there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilework.core.time import s_from_ns
from tilework.runtime.models.start_parts import StartParts

_STAT = Path("/proc/self/stat")
_START_TIME = 19  # Of the fields behind the name, the time when the process began, in clock ticks since the boot.


def process_age_s(stat: Path = _STAT) -> float | None:
    """How long this process has been there; None without /proc."""
    try:
        fields = stat.read_text("ascii", errors="replace").rpartition(")")[2].split()
        begun_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """`imports_s`: until this process began to start others; None if it is not known. `picture_s`: what a picture with
    the defaults of the first model takes then; None if that is not known.
    """

    imports_s: float | None
    parts: StartParts
    picture_s: float | None

    def fields(self) -> Mapping[str, float]:
        """In seconds, by name; what is not known is left out."""
        values = {
            "imports_s": self.imports_s,
            "processes_s": s_from_ns(self.parts.processes_ns),
            "load_s": s_from_ns(self.parts.load_ns),
            "first_run_s": s_from_ns(self.parts.first_ns),
            "measure_s": s_from_ns(self.parts.measure_ns),
            "picture_s": self.picture_s,
        }
        return {name: round(value, 3) for name, value in values.items() if value is not None}

    def line(self) -> str:
        """In words, with the sum, which is how long the first picture takes from the command."""
        words = {
            "imports_s": "imports",
            "processes_s": "processes",
            "load_s": "models",
            "first_run_s": "first runs",
            "measure_s": "measuring",
            "picture_s": "a picture",
        }
        found = self.fields()
        parts = ", ".join(f"{words[name]} {value:.1f}" for name, value in found.items())
        return f"first picture after {sum(found.values()):.1f} s at the earliest: {parts}"
