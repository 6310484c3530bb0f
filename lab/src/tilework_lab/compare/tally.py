"""From results to summaries: those of each cell, policy by policy and seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilework.sim.workloads.cells import Cell
from tilework_lab.compare.records import BoundFigures, Record
from tilework_lab.compare.summary import CellSummary, summary_of

Find = Callable[[Cell, int, str | None], Record | None]


def summaries_of(
    seeds: Mapping[Cell, Sequence[int]],
    policies: Sequence[str],
    found: Find,
    errors: Mapping[tuple[str, str | None], str],
) -> list[CellSummary]:
    """One per cell, in their order; a cell in which every policy failed is left out.

    Args:
        found: the result of a cell, seed and policy (None: the bound), if there is one.
        errors: by cell name and policy, one for each policy that lacks a result.
    """
    return [one for cell in seeds if (one := _summary(cell, seeds[cell], policies, found, errors)) is not None]


def _summary(
    cell: Cell,
    seeds: Sequence[int],
    policies: Sequence[str],
    found: Find,
    errors: Mapping[tuple[str, str | None], str],
) -> CellSummary | None:
    records = {
        policy: [record for seed in seeds if (record := found(cell, seed, policy)) is not None] for policy in policies
    }
    failed = {policy: errors[cell.name, policy] for policy, runs in records.items() if len(runs) < len(seeds)}
    if len(failed) == len(policies):
        return None
    return summary_of(cell, records, [_bound(found(cell, seed, None)) for seed in seeds], failed)


def _bound(record: Record | None) -> BoundFigures | None:
    return record.result if record is not None and isinstance(record.result, BoundFigures) else None
