"""The charts of `tilework compare`: sweeps of parameters, and promises beside best effort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilework.report.panels import BarPanel, Curve, CurvePanel, Pair, PairPanel, Panel, draw_pairs, draw_panels
from tilework.report.tables import counted_devices
from tilework.server.text import counted
from tilework_lab.compare.figures import Figures
from tilework_lab.compare.promises import PromiseCell, PromiseCounts, promise_overall, total
from tilework_lab.compare.records import Record
from tilework_lab.compare.summary import LENGTHS, CellSummary, Sweep, sweeps_of

MOST_SWEEPS = 7  # Two more panels make nine.
_LEAST_SIZES = 2  # Fewer show nothing that a sweep does not.
_PER_MINUTE = 60
_FAST_PER_S = 4.0  # Rates up to this are shown per minute.


def plot(path: Path, cells: Sequence[CellSummary]) -> None:
    """Write a PNG: what each sweep shows, then sizes on one cell with deadlines, and latencies on one cell.

    Raises:
        OSError: the file cannot be written.
    """
    sweeps = sweeps_of(cells)[:MOST_SWEEPS]
    panels: list[Panel] = [_of_sweep(sweep, sweeps) for sweep in sweeps]
    due = next((cell for cell in cells if cell.num_due and len(_sizes(cell)) >= _LEAST_SIZES), None)
    free = _busiest([cell for cell in cells if not cell.num_due], sweeps)
    if due is not None:
        panels.append(_by_size(due, is_alone=len(cells) == 1))
    if free is not None or not sweeps:
        panels.append(_latencies(free or cells[0], is_alone=len(cells) == 1))
    policies = [one.policy for one in cells[0].policies]
    seeds = max(len(runs) for cell in cells for runs in cell.records.values())
    policies_text = "1 policy" if len(policies) == 1 else f"{len(policies)} policies"
    what = cells[0].cell.name if len(cells) == 1 else f"{len(cells)} workloads"
    title = f"{policies_text} on {what}, {seeds} seed{'s' if seeds > 1 else ''}: simulated"
    draw_panels(path, panels, policies, title=title)


def _busiest(free: Sequence[CellSummary], sweeps: Sequence[Sweep]) -> CellSummary | None:
    """Return the last cell of a sweep among these, or the first of all."""
    swept = [cell for sweep in sweeps for cell in sweep.cells if cell in free]
    return swept[-1] if swept else next(iter(free), None)


def _of_sweep(sweep: Sweep, others: Sequence[Sweep]) -> CurvePanel:
    first = sweep.cells[0]
    figure = sweep.cells[0].leading
    xs, unit = _axis(sweep)
    has_deadlines = figure == "attainment"
    bounds = [cell.bound for cell in sweep.cells]
    known = [bound.mean for bound in bounds if bound is not None]
    curves = {one.policy: _curve(sweep, xs, one.policy, figure) for one in first.policies}
    return CurvePanel(
        title=_title(sweep, others),
        x_label=unit,
        y_label="on time" if has_deadlines else "mean latency, s",
        is_share=has_deadlines,
        curves={policy: curve for policy, curve in curves.items() if curve is not None},
        bound=Curve(xs=xs, ys=tuple(known)) if len(known) == len(xs) else None,
    )


def _axis(sweep: Sweep) -> tuple[tuple[float, ...], str]:
    if sweep.parameter != "rate_per_s":
        return sweep.xs, "SLO scale (all deadlines times this)"
    if max(sweep.xs) > _FAST_PER_S:
        return sweep.xs, "requests per second"
    return tuple(round(_PER_MINUTE * x, 6) for x in sweep.xs), "requests per minute"


def _curve(sweep: Sweep, xs: tuple[float, ...], policy: str, figure: str) -> Curve | None:
    found = [
        next((one.estimates.get(figure) for one in cell.policies if one.policy == policy), None) for cell in sweep.cells
    ]
    known = [one for one in found if one is not None]
    if len(known) < len(xs):
        return None
    halves = tuple(one.half or 0.0 for one in known)
    return Curve(xs=xs, ys=tuple(one.mean for one in known), halves=halves)


def _title(sweep: Sweep, others: Sequence[Sweep]) -> str:
    """Return the workload of a sweep, and the parameters in which it differs from other sweeps of that workload."""
    cell = sweep.cells[0].cell
    parts = [f"{cell.source} on {counted_devices(cell.num_devices)}"]
    for name, value in sorted(
        cell.parameters.items(), key=lambda item: not isinstance(item[1], str)
    ):  # Such as the mix first.
        if name != sweep.parameter and _has_meaning(name, sweep, others):
            parts.append(_parameter_text(name, value))
    return ", ".join(parts)


def _has_meaning(name: str, sweep: Sweep, others: Sequence[Sweep]) -> bool:
    """Return whether a parameter distinguishes this sweep from others of its workload."""
    source = sweep.cells[0].cell.source
    alike = [other.cells[0].cell.parameters[name] for other in others if other.cells[0].cell.source == source]
    return name not in LENGTHS and any(value != alike[0] for value in alike)


def _parameter_text(name: str, value: Any) -> str:
    if name == "rate_per_s":
        return f"{_PER_MINUTE * value:g} per minute"
    if name == "scale":
        return f"SLO scale {value:g}"
    return str(value) if isinstance(value, str) else f"{name} {value}"


def _sizes(cell: CellSummary) -> list[str]:
    """Return the cells that have deadlines, smallest first."""
    sizes: dict[str, None] = {}
    for record in _some(cell.records):
        sizes |= dict.fromkeys(size for size, of in _run(record).by_size.items() if of.num_due)
    return list(sizes)


def _by_size(cell: CellSummary, *, is_alone: bool) -> BarPanel:
    sizes = _sizes(cell)
    shares = {
        policy: tuple(_share([_run(record) for record in records], size) for size in sizes)
        for policy, records in cell.records.items()
    }
    title = "on time by size" if is_alone else f"on time by size: {cell.cell.name}"
    return BarPanel(title=title, y_label="on time", groups=tuple(sizes), bars=shares, is_share=True)


def _share(runs: Sequence[Figures], size: str) -> float:
    """Return the counts of all seeds together."""
    found = [run.by_size[size] for run in runs if size in run.by_size]
    return sum(one.num_on_time for one in found) / max(1, sum(one.num_due for one in found))


def _latencies(cell: CellSummary, *, is_alone: bool) -> CurvePanel:
    """Return the share of requests done within a time, all seeds together."""
    curves = {}
    for policy, records in cell.records.items():
        times_s = sorted(at_s for record in records for at_s in _run(record).quantiles_s)
        shares = tuple((index + 1) / len(times_s) for index in range(len(times_s)))
        curves[policy] = Curve(xs=tuple(times_s), ys=shares)
    return CurvePanel(
        title="latency" if is_alone else f"latency: {cell.cell.name}",
        x_label="seconds from the arrival",
        y_label="done within",
        is_share=True,
        is_distribution=True,
        curves=curves,
    )


def _some(records: Mapping[str, Sequence[Record]]) -> Sequence[Record]:
    return next(iter(records.values()))


def _run(record: Record) -> Figures:
    assert isinstance(record.result, Figures)
    return record.result


PARTS = {
    "asks, on time": "#0072B2",
    "does not ask, on time": "#56B4E9",
    "promise broken": "#C00000",
    "refused, on time as best effort": "#E69F00",
    "refused, late as best effort": "#F6DDA8",
    "late": "#D5D7DA",
}
_NUM_ON_TIME = 2


def plot_promises(path: Path, cells: Sequence[PromiseCell], asking: float) -> None:
    """Write a PNG with a pair of bars per policy and cell, and one per policy of all cells.

    Raises:
        OSError: the file cannot be written.
    """
    lines = promise_overall(cells)
    panels = []
    if len(cells) > 1:
        overall = tuple(pair_of(one.policy, one.counts) for one in lines)
        panels.append(PairPanel(title=f"all {len(cells)} cells", pairs=overall))
    panels += [
        PairPanel(
            title=cell.cell.name,
            pairs=tuple(pair_of(policy, total(counts)) for policy, counts in cell.policies.items()),
        )
        for cell in cells
    ]
    seeds = counted(max(cell.num_seeds for cell in cells), "seed")
    draw_pairs(
        path,
        panels,
        PARTS,
        num_good=_NUM_ON_TIME,
        title=f"What promises cost: {100 * asking:g}% of the requests with a deadline ask, {seeds}, simulated",
        foot="Upper bar of a pair: all requests as best effort. Lower bar: with promises. Numbers: on time, in %.",
    )


def pair_of(label: str, counts: PromiseCounts) -> Pair:
    """Return the parts of both runs, in the order of PARTS, as shares of the requests with a deadline."""
    whole = max(1, counts.num_due)
    refused_fitting = counts.fitting - counts.fitting_accepted
    before = counts.before - counts.others_before, counts.others_before, 0, 0, 0, counts.num_due - counts.before
    after = (
        counts.kept,
        counts.others_after,
        counts.broken,
        refused_fitting,
        counts.refused - refused_fitting,
        counts.others - counts.others_after,
    )
    return Pair(label=label, before=tuple(one / whole for one in before), after=tuple(one / whole for one in after))
