"""Costs of promises: the same requests as best effort, and with some of them asked as promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, TypeVar

from tilework.sim.workloads.cells import Cell
from tilework_lab.compare.figures import EtaFigures, PromiseFigures
from tilework_lab.compare.records import Record

BEST_EFFORT = 0.0
"""The share that asks in the first of two runs."""
Find = Callable[[Cell, int, str, float], Record | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseCounts:
    """Requests with a deadline in two runs of one policy.

    `before` of the `num_due` are on time if all are best effort, `after` if `asked` of them ask for a promise. Of those
    that ask, `accepted` get one; of `fitting`, which are on time as best effort, `fitting_accepted` do. `kept` promises
    are kept, the others broken. Of the `others`, which do not ask, `others_before` and `others_after` are on time.
    `eta_before` and `eta_after` say how true predicted finishes are.
    """

    num_due: int = 0
    before: int = 0
    after: int = 0
    asked: int = 0
    accepted: int = 0
    fitting: int = 0
    fitting_accepted: int = 0
    kept: int = 0
    others: int = 0
    others_before: int = 0
    others_after: int = 0
    eta_before: EtaFigures = field(default_factory=EtaFigures)
    eta_after: EtaFigures = field(default_factory=EtaFigures)

    @property
    def broken(self) -> int:
        return self.accepted - self.kept

    @property
    def refused(self) -> int:
        return self.asked - self.accepted

    @property
    def ratio(self) -> float | None:
        """Ratio of on time with promises to on time as best effort; None if nothing is on time as best effort."""
        return self.after / self.before if self.before else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseCell:
    """One cell. `policies` has the counts of each seed by policy, `errors` why a policy has none."""

    cell: Cell
    num_requests: int
    policies: Mapping[str, Sequence[PromiseCounts]]
    errors: Mapping[str, str]

    @property
    def num_seeds(self) -> int:
        return max(map(len, self.policies.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseOverall:
    """One policy on all cells. `worst` is its lowest ratio in a cell with one seed, `worst_in` names these."""

    policy: str
    counts: PromiseCounts
    worst: float | None
    worst_in: str


T = TypeVar("T", PromiseCounts, EtaFigures)


def counts_of(before: PromiseFigures, after: PromiseFigures) -> PromiseCounts:
    """Return the counts of two runs of the same requests, in the first of which none asks."""
    assert not before.asked
    assert before.num_due == after.num_due
    asked, accepted = set(after.asked), set(after.accepted)
    was, on_time = set(before.on_time), set(after.on_time)
    return PromiseCounts(
        num_due=after.num_due,
        before=len(was),
        after=len(on_time),
        asked=len(asked),
        accepted=len(accepted),
        fitting=len(asked & was),
        fitting_accepted=len(accepted & was),
        kept=len(accepted & on_time),
        others=after.num_due - len(asked),
        others_before=len(was - asked),
        others_after=len(on_time - asked),
        eta_before=before.eta,
        eta_after=after.eta,
    )


def total(counts: Iterable[PromiseCounts]) -> PromiseCounts:
    """Return the sum of counts."""
    return reduce(_plus, counts, PromiseCounts())


def _plus(first: T, second: T) -> T:
    """Add two counts of one kind, part by part."""

    def plus(one: Any, other: Any) -> Any:
        return _plus(one, other) if isinstance(one, EtaFigures) else one + other

    sums = {part.name: plus(getattr(first, part.name), getattr(second, part.name)) for part in fields(first)}
    return replace(first, **sums)


def promise_cells(
    seeds: Mapping[Cell, Sequence[int]],
    policies: Sequence[str],
    share: float,
    found: Find,
    errors: Mapping[tuple[str, str | None], str],
) -> list[PromiseCell]:
    """Return one summary per cell, in order, without cells in which every policy failed.

    Args:
        found: the result of a cell, seed, policy and share that asks, if there is one.
        errors: by cell name and policy, one for each policy that lacks a result.
    """
    made = []
    for cell, its_seeds in seeds.items():
        counts = dict[str, list[PromiseCounts]]()
        num_requests = 0
        for policy in policies:
            pairs = [[found(cell, seed, policy, of) for of in (BEST_EFFORT, share)] for seed in its_seeds]
            if (cell.name, policy) not in errors:
                figures = [tuple(map(_figures, pair)) for pair in pairs]
                counts[policy] = [counts_of(*pair) for pair in figures]
                num_requests = figures[0][0].num_requests
        if counts:
            failed = {policy: errors[cell.name, policy] for policy in policies if policy not in counts}
            made.append(PromiseCell(cell=cell, num_requests=num_requests, policies=counts, errors=failed))
    return made


def _figures(record: Record | None) -> PromiseFigures:
    assert record is not None
    assert isinstance(record.result, PromiseFigures)
    return record.result


def promise_overall(cells: Sequence[PromiseCell]) -> list[PromiseOverall]:
    """Return one line per policy that failed nowhere, in the order of the first cell."""
    return [_overall(policy, cells) for policy in cells[0].policies if all(policy in cell.policies for cell in cells)]


def _overall(policy: str, cells: Sequence[PromiseCell]) -> PromiseOverall:
    ratios = [
        (counts.ratio, f"{cell.cell.name}, seed {seed}")
        for cell in cells
        for seed, counts in enumerate(cell.policies[policy])
    ]
    worst, worst_in = min(((ratio, name) for ratio, name in ratios if ratio is not None), default=(None, ""))
    counts = total(one for cell in cells for one in cell.policies[policy])
    return PromiseOverall(policy=policy, counts=counts, worst=worst, worst_in=worst_in)
