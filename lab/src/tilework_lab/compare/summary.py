"""Summaries of runs: means over seeds with intervals, differences between policies, and sweeps of a parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from tilework.sim.plan.interval import t_quantile
from tilework.sim.workloads.cells import Cell
from tilework_lab.compare.figures import Figures
from tilework_lab.compare.records import BoundFigures, Record, digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over seeds; `half` is half of the 95% interval of it, None if there is one seed.

    The interval is Student's t, which assumes independent seeds and normal values. With 3 seeds it is wide, as it
    should be: 2.5 standard deviations of a value.
    """

    mean: float
    half: float | None
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One column: its name, how it is read from a run and its bound, and whether more or less is better.

    `better` is 1 if more is better, -1 if less is, 0 if neither. `read` returns None where a run does not have the
    figure.
    """

    name: str
    better: int
    read: Callable[[Record, BoundFigures | None], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySummary:
    """One policy on a cell: `estimates` by the names of FIGURES; None where a run lacks the figure.

    `lead` is the difference to `rival`, the best of the others, in the cell's leading figure, seed by seed; it is
    None for a policy that is alone. `error`: why a run failed, if one did; there are no estimates then.
    """

    policy: str
    estimates: Mapping[str, Estimate | None]
    lead: Estimate | None = None
    rival: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One cell. `leading` names the figure by which policies are compared: attainment, or without deadlines mean_s.

    `bound` is the share of requests with a deadline that could be on time at most.
    """

    cell: Cell
    num_requests: int
    num_due: int
    bound: Estimate | None
    policies: tuple[PolicySummary, ...]
    records: Mapping[str, Sequence[Record]] = field(repr=False)

    @property
    def leading(self) -> str:
        return "attainment" if self.num_due else "mean_s"

    def best(self, name: str) -> list[str]:
        """Return the policies with the best mean of a figure, to three digits."""
        better = _BY_NAME[name].better
        means = {one.policy: estimate.mean * better for one in self.policies if (estimate := one.estimates.get(name))}
        top = max(means.values(), default=0.0)
        return [policy for policy, mean in means.items() if better and mean >= top - abs(top) * 5e-4]


def _run(record: Record) -> Figures:
    assert isinstance(record.result, Figures)
    return record.result


def _timed(record: Record, name: str) -> float | None:
    return None if record.timing is None else float(getattr(record.timing, name))


def _of_bound(record: Record, bound: BoundFigures | None) -> float | None:
    return _run(record).num_on_time / bound.most_on_time if bound is not None and bound.most_on_time else None


FIGURES = (
    Figure(name="attainment", better=1, read=lambda record, _: _run(record).attainment),
    Figure(name="of_bound", better=1, read=_of_bound),
    Figure(name="mean_s", better=-1, read=lambda record, _: _run(record).mean_s),
    Figure(name="p95_s", better=-1, read=lambda record, _: _run(record).p95_s),
    Figure(name="p99_s", better=-1, read=lambda record, _: _run(record).p99_s),
    Figure(name="device_s_each", better=-1, read=lambda record, _: _run(record).device_s_each),
    Figure(name="num_preempted", better=-1, read=lambda record, _: float(_run(record).num_preempted)),
    Figure(name="fairness", better=1, read=lambda record, _: _run(record).fairness),
    Figure(name="plan_p50_ms", better=-1, read=lambda record, _: _timed(record, "plan_p50_ms")),
    Figure(name="plan_p99_ms", better=-1, read=lambda record, _: _timed(record, "plan_p99_ms")),
    Figure(name="num_events", better=0, read=lambda record, _: float(_run(record).num_events)),
)
_BY_NAME = {figure.name: figure for figure in FIGURES}


def estimate(values: Sequence[float]) -> Estimate:
    """Return the estimate of values that are drawn independently; there is at least one."""
    mean = math.inf if math.inf in values else fmean(values)
    half = None
    if len(values) > 1 and math.isfinite(mean):
        half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean=mean, half=half, values=tuple(values))


def summary_of(
    cell: Cell,
    records: Mapping[str, Sequence[Record]],
    bounds: Sequence[BoundFigures | None],
    errors: Mapping[str, str],
) -> CellSummary:
    """Return the summary of a cell. `records` are those of each policy, seed by seed, as many as there are `bounds`.

    Policies in `errors` have no estimates; at least one policy is not in it.
    """
    drawn = {
        policy: {figure.name: _estimated(figure, runs, bounds) for figure in FIGURES}
        for policy, runs in records.items()
        if policy not in errors
    }
    some = _run(next(runs[0] for policy, runs in records.items() if policy in drawn))
    shares = [bound.most_on_time / bound.num_due for bound in bounds if bound is not None and bound.num_due]
    leading = _BY_NAME["attainment" if some.num_due else "mean_s"]
    policies = []
    for policy in records:
        rival, lead = _lead(policy, leading, drawn)
        policies.append(
            PolicySummary(
                policy=policy,
                estimates=drawn.get(policy, {}),
                lead=lead,
                rival=rival,
                error=errors.get(policy, ""),
            )
        )
    return CellSummary(
        cell=cell,
        num_requests=some.num_requests,
        num_due=some.num_due,
        bound=estimate(shares) if shares else None,
        policies=tuple(policies),
        records={policy: records[policy] for policy in drawn},
    )


def _estimated(figure: Figure, runs: Sequence[Record], bounds: Sequence[BoundFigures | None]) -> Estimate | None:
    values = [figure.read(record, bound) for record, bound in zip(runs, bounds, strict=True)]
    known = [value for value in values if value is not None]
    return estimate(known) if known and len(known) == len(values) else None


def _lead(
    policy: str, leading: Figure, drawn: Mapping[str, Mapping[str, Estimate | None]]
) -> tuple[str, Estimate | None]:
    """Return the best of the other policies, and the difference to it, seed by seed."""
    found = {name: one for name, figures in drawn.items() if (one := figures[leading.name]) is not None}
    own, others = found.get(policy), [name for name in found if name != policy]
    if own is None or not others:
        return "", None
    rival = max(others, key=lambda name: leading.better * found[name].mean)
    pairs = zip(own.values, found[rival].values, strict=True)
    return rival, estimate([0.0 if mine == other else mine - other for mine, other in pairs])


Find = Callable[[Cell, int, str | None], Record | None]


def summaries_of(
    seeds: Mapping[Cell, Sequence[int]],
    policies: Sequence[str],
    found: Find,
    errors: Mapping[tuple[str, str | None], str],
) -> list[CellSummary]:
    """Return one summary per cell, in order, without cells in which every policy failed.

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
    """Return every sweep through two values or more; without those of two where there are longer ones.

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
    """Return a digest of all that the cells of one sweep have in common.

    Without deadlines their scale has no meaning.
    """
    cell = one.cell
    ignored = {parameter} | LENGTHS | (set() if one.num_due else {"scale"})
    rest: dict[str, Any] = {name: value for name, value in cell.parameters.items() if name not in ignored}
    return digest([cell.source, cell.table, cell.num_devices, cell.devices_per_node, bool(one.num_due), rest])
