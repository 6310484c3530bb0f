"""Sweeps: cells that differ in one parameter only. Each is a line of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilework_lab.compare.digests import digest
from tilework_lab.compare.summary import CellSummary

SWEPT = ("scale", "rate_per_s")
_A_PAIR = 2
# Parameters that change the length of a workload, not its character.
LENGTHS = {"num_requests", "minutes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Cells in ascending order of `parameter`, all else equal."""

    parameter: str
    cells: tuple[CellSummary, ...]

    @property
    def xs(self) -> tuple[float, ...]:
        return tuple(float(one.cell.parameters[self.parameter]) for one in self.cells)


def sweeps_of(cells: Sequence[CellSummary]) -> list[Sweep]:
    """Every sweep through two values or more; without those of two where there are longer ones.

    Those of deadlines first, else in the order of their first cells.
    """
    found: list[Sweep] = []
    for parameter in SWEPT:
        alike: dict[str, dict[float, CellSummary]] = {}
        for one in cells:
            if parameter in one.cell.parameters and one.cell.is_drawn:
                value = float(one.cell.parameters[parameter])
                alike.setdefault(_others(one, parameter), {}).setdefault(value, one)
        found += [
            Sweep(parameter=parameter, cells=tuple(members[value] for value in sorted(members)))
            for members in alike.values()
            if len(members) > 1
        ]
    long = [sweep for sweep in found if len(sweep.cells) > _A_PAIR]
    return long or found


def _others(one: CellSummary, parameter: str) -> str:
    """A digest of all that the cells of one sweep have in common. Without deadlines their scale has no meaning."""
    cell, ignored = one.cell, {parameter} | LENGTHS | (set() if one.num_due else {"scale"})
    rest: dict[str, Any] = {name: value for name, value in cell.parameters.items() if name not in ignored}
    return digest([cell.source, cell.table, cell.num_devices, cell.devices_per_node, bool(one.num_due), rest])
