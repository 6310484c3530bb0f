"""What the start of an engine consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.core.wire.reports import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StartParts:
    """How long the parts took, one after another.

    `processes_ns`: until workers ran, with their libraries and devices; `load_ns`: until they had read the models.
    `first_ns`: until each model had run at its first size, which compiles and records what is to be compiled and
    recorded; `measure_ns`: what was measured after that.
    """

    processes_ns: int = 0
    load_ns: int = 0
    first_ns: int = 0
    measure_ns: int = 0

    @staticmethod
    def of(loaded: Sequence[LoadedModel], started_ns: int, measured_ns: int, first_ns: int) -> StartParts:
        """Of workers that were there after `started_ns`, and were measured for `measured_ns`."""
        load_ns = min(started_ns, sum(one.load_ns for one in loaded))
        return StartParts(
            processes_ns=started_ns - load_ns,
            load_ns=load_ns,
            first_ns=first_ns,
            measure_ns=measured_ns - first_ns,
        )
