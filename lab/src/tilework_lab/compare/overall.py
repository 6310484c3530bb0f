"""Many cells in one table: means over the cells of each section and of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tilework_lab.compare.summary import CellSummary, Estimate, PolicySummary, estimate

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overall:
    """One policy on all cells with deadlines, and on all without.

    `attainment` and `of_bound` are means over cells of each seed, then over seeds, the latter over cells that have a
    bound; `by_section` the former by section.
    `worst` is the lowest attainment of a cell, `worst_cell` that cell. `slowdown` is its mean latency over that of the
    best policy of each cell without deadlines, on average; `num_best` in how many cells no other was better.
    """

    policy: str
    attainment: Estimate | None
    of_bound: Estimate | None
    worst: float | None
    worst_cell: str
    slowdown: float | None
    num_best: int
    plan_p50_ms: float | None
    plan_p99_ms: float | None
    by_section: Mapping[str, float]


def overall_of(cells: Sequence[CellSummary]) -> tuple[Overall, ...]:
    """Return one line per policy that failed nowhere, in the order of the first cell."""
    policies = [one.policy for one in cells[0].policies]
    return tuple(_overall(policy, cells) for policy in policies if not any(_of(cell, policy).error for cell in cells))


def _overall(policy: str, cells: Sequence[CellSummary]) -> Overall:
    due = [cell for cell in cells if cell.num_due]
    free = [cell for cell in cells if not cell.num_due]
    shares = [(_mean(cell, policy, "attainment"), cell.cell.name) for cell in due]
    worst, worst_cell = min(((share, name) for share, name in shares if share is not None), default=(None, ""))
    sections = dict.fromkeys(cell.cell.section for cell in due if cell.cell.section)
    return Overall(
        policy=policy,
        attainment=_over_cells(due, policy, "attainment"),
        of_bound=_over_cells([cell for cell in due if cell.bound is not None], policy, "of_bound"),
        worst=worst,
        worst_cell=worst_cell,
        slowdown=_averaged(free, lambda cell: _slowdown(cell, policy)),
        num_best=sum(policy in cell.best(cell.leading) for cell in cells),
        plan_p50_ms=_averaged(cells, lambda cell: _mean(cell, policy, "plan_p50_ms")),
        plan_p99_ms=_averaged(cells, lambda cell: _mean(cell, policy, "plan_p99_ms")),
        by_section={
            section: fmean(_mean(cell, policy, "attainment") or 0.0 for cell in due if cell.cell.section == section)
            for section in sections
        },
    )


def bound_overall(cells: Sequence[CellSummary]) -> Estimate | None:
    """Return the mean of the bounds of all cells with deadlines."""
    bounds = [cell.bound for cell in cells if cell.num_due]
    return _across([one for one in bounds if one is not None]) if bounds and all(bounds) else None


def _of(cell: CellSummary, policy: str) -> PolicySummary:
    return next(one for one in cell.policies if one.policy == policy)


def _mean(cell: CellSummary, policy: str, name: str) -> float | None:
    found = _of(cell, policy).estimates.get(name)
    return None if found is None else found.mean


def _over_cells(cells: Sequence[CellSummary], policy: str, name: str) -> Estimate | None:
    found = [_of(cell, policy).estimates.get(name) for cell in cells]
    return _across([one for one in found if one is not None]) if found and all(found) else None


def _across(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over cells of each seed; cells of one seed only (a file) count in every seed."""
    num_seeds = max(len(one.values) for one in estimates)
    return estimate(
        [fmean(one.values[min(seed, len(one.values) - 1)] for one in estimates) for seed in range(num_seeds)]
    )


def _slowdown(cell: CellSummary, policy: str) -> float | None:
    means = {one.policy: _mean(cell, one.policy, "mean_s") for one in cell.policies}
    own = means[policy]
    best = min((mean for mean in means.values() if mean is not None), default=None)
    return own / best if own is not None and best else None


def _averaged(cells: Sequence[CellSummary], of: Callable[[CellSummary], float | None]) -> float | None:
    found = [value for value in map(of, cells) if value is not None]
    return fmean(found) if found else None
