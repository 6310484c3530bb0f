"""Parts of the start of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.core.wire.reports import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StartParts:
    """Durations of the parts, one after another.

    `processes_ns`: until workers ran, with their libraries and devices; `load_ns`: until they had read the models.
    `first_ns`: until each model had run at its first size, including what is compiled and recorded then; `measure_ns`:
    the measurements after that.
    """

    processes_ns: int = 0
    load_ns: int = 0
    first_ns: int = 0
    measure_ns: int = 0

    @staticmethod
    def of(loaded: Sequence[LoadedModel], started_ns: int, measured_ns: int, first_ns: int) -> StartParts:
        """Return the parts of a start whose workers were there after `started_ns`, and measured for `measured_ns`."""
        load_ns = min(started_ns, sum(one.load_ns for one in loaded))
        return StartParts(
            processes_ns=started_ns - load_ns,
            load_ns=load_ns,
            first_ns=first_ns,
            measure_ns=measured_ns - first_ns,
        )
