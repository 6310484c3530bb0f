"""The tables of `tilework compare`, also with `--promises`: one per cell and one of all cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from tilework.cli.console import out
from tilework.report.tables import counted_devices
from tilework.server.text import counted
from tilework_lab.compare.overall import Overall, bound_overall, overall_of
from tilework_lab.compare.promises import PromiseCell, PromiseCounts, PromiseOverall, promise_overall, total
from tilework_lab.compare.runs import Conditions
from tilework_lab.compare.summary import CellSummary, Estimate, PolicySummary

_NOTHING = "-"
_WIDE = 150


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def seconds(value: float) -> str:
    return "inf" if value == math.inf else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _count(value: float) -> str:
    return f"{value:.0f}"


def _milliseconds(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


_Format = Callable[[float], str]
# Headings of the figures, how a value is written, and whether its interval is.
_COLUMNS: dict[str, tuple[str, _Format, bool]] = {
    "attainment": ("on time\n%", percent, True),
    "of_bound": ("of bound\n%", percent, True),
    "mean_s": ("mean\ns", seconds, True),
    "p95_s": ("p95\ns", seconds, False),
    "p99_s": ("p99\ns", seconds, False),
    "device_s_each": ("device s\nper good", seconds, False),
    "num_preempted": ("preempted", _count, False),
    "fairness": ("fair", lambda value: f"{value:.3f}", False),
    "plan_p50_ms": ("plan ms\np50", _milliseconds, False),
    "plan_p99_ms": ("plan ms\np99", _milliseconds, False),
    "num_events": ("events", _count, False),
}
_LEAD = "vs best\nother"
_OUTCOME = ("attainment", "of_bound", "lead", "mean_s", "p95_s", "p99_s")
_OVERALL = (
    "on time\n%",
    "of bound\n%",
    "worst cell\n%",
    "mean s\nover best",
    "best in\ncells",
    "plan ms\np50",
    "plan ms\np99",
)
_EFFORT = ("device_s_each", "num_preempted", "fairness", "plan_p50_ms", "plan_p99_ms", "num_events")


def print_tables(cells: Sequence[CellSummary], num_processes: int, conditions: Conditions) -> None:
    """Print one table per cell, or two where the terminal is narrow; then, if there are several cells, one of all."""
    for cell in cells:
        parts = [_OUTCOME + _EFFORT] if out.width >= _WIDE else [_OUTCOME, _EFFORT]
        out.print(_title(cell), style="italic", markup=False, highlight=False, soft_wrap=True)
        for columns in parts:
            out.print(_cell_table(cell, columns))
    if len(cells) > 1:
        _print_overall(cells)
    if cells:
        _print_notes(cells, num_processes, conditions)


def _title(cell: CellSummary) -> str:
    one = cell.cell
    seeds = max(len(runs) for runs in cell.records.values())
    text = f"{one.name}: {cell.num_requests} requests on {counted_devices(one.num_devices)}, {_seeds(seeds)}, simulated"
    return text if cell.bound is None else f"{text}; at most {percent(cell.bound.mean)}% on time"


def _seeds(number: int) -> str:
    return "1 seed" if number == 1 else f"{number} seeds"


def _cell_table(cell: CellSummary, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in columns:
        table.add_column(_LEAD if name == "lead" else _COLUMNS[name][0], justify="right")
    best = {name: set(cell.best(name)) for name in columns if name != "lead"}
    for one in cell.policies:
        if one.error:
            table.add_row(one.policy, Text("failed", style="red"))
            continue
        cells = [_lead(cell, one) if name == "lead" else _cell(one, name, best[name]) for name in columns]
        table.add_row(one.policy, *cells)
    return table


def _lead(cell: CellSummary, one: PolicySummary) -> str:
    if one.lead is None or not math.isfinite(one.lead.mean):
        return _NOTHING
    scale = 100 if cell.leading == "attainment" else 1
    digits = 1 if cell.leading == "attainment" else 2
    text = f"{scale * one.lead.mean:+.{digits}f}"
    return text if one.lead.half is None else f"{text} ±{scale * one.lead.half:.{digits}f}"


def _cell(one: PolicySummary, name: str, best: set[str]) -> Text:
    found = one.estimates.get(name)
    (_, written, has_interval) = _COLUMNS[name]
    if found is None:
        return Text(_NOTHING)
    text = written(found.mean)
    if has_interval and found.half is not None:
        text += f" ±{written(found.half)}"
    return Text(text, style="bold" if one.policy in best else "")


def _print_overall(cells: Sequence[CellSummary]) -> None:
    lines = overall_of(cells)
    due = [cell for cell in cells if cell.num_due]
    if not lines:
        return
    bound = bound_overall(cells)
    title = f"all {len(cells)} cells, simulated"
    title += "" if bound is None else f"; at most {percent(bound.mean)}% on time"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for heading in _OVERALL:
        table.add_column(heading, justify="right")
    tops = _tops(lines)
    for one in lines:
        table.add_row(one.policy, *_overall_cells(one, tops))
    out.print(table)
    sections = list(lines[0].by_section)
    if len(sections) > 1:
        out.print(_sections_table(lines, sections, due))


def _tops(lines: Sequence[Overall]) -> dict[str, float | None]:
    """Return the best value of each column."""
    return {
        "attainment": max((one.attainment.mean for one in lines if one.attainment), default=None),
        "of_bound": max((one.of_bound.mean for one in lines if one.of_bound), default=None),
        "worst": max((one.worst for one in lines if one.worst is not None), default=None),
        "slowdown": min((one.slowdown for one in lines if one.slowdown is not None), default=None),
        "num_best": max(one.num_best for one in lines),
        "plan_p50_ms": min((one.plan_p50_ms for one in lines if one.plan_p50_ms is not None), default=None),
        "plan_p99_ms": min((one.plan_p99_ms for one in lines if one.plan_p99_ms is not None), default=None),
    }


def _overall_cells(one: Overall, tops: dict[str, float | None]) -> list[Text]:
    values: list[tuple[str, float | Estimate | None, _Format]] = [
        ("attainment", one.attainment, percent),
        ("of_bound", one.of_bound, percent),
        ("worst", one.worst, percent),
        ("slowdown", one.slowdown, seconds),
        ("num_best", one.num_best, _count),
        ("plan_p50_ms", one.plan_p50_ms, _milliseconds),
        ("plan_p99_ms", one.plan_p99_ms, _milliseconds),
    ]
    return [_overall_cell(value, written, tops[name]) for name, value, written in values]


def _overall_cell(value: float | Estimate | None, written: _Format, top: float | None) -> Text:
    if value is None:
        return Text(_NOTHING)
    half = value.half if isinstance(value, Estimate) else None
    mean = value.mean if isinstance(value, Estimate) else value
    text = written(mean) + ("" if half is None else f" ±{written(half)}")
    return Text(text, style="bold" if mean == top else "")


def _sections_table(lines: Sequence[Overall], sections: Sequence[str], due: Sequence[CellSummary]) -> Table:
    table = Table(title="on time %, by section", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for section in sections:
        number = sum(cell.cell.section == section for cell in due)
        table.add_column(f"{section} ({number})", justify="right")
    for one in lines:
        tops = {section: max(other.by_section[section] for other in lines) for section in sections}
        table.add_row(
            one.policy,
            *(
                Text(percent(share), style="bold" if share == tops[section] else "")
                for section, share in one.by_section.items()
            ),
        )
    return table


def _print_notes(cells: Sequence[CellSummary], num_processes: int, conditions: Conditions) -> None:
    notes = ["± half of a 95% interval over seeds (Student's t); bold: the best of a column."]
    if any(one.lead is not None for cell in cells for one in cell.policies):
        notes.append(
            "vs best other: the difference to the best of the other policies, seed by seed, in points of on time %; "
            "without deadlines in seconds of the mean."
        )
    notes.append(
        f"plan ms: measured on this machine, by the wall clock, under load of {num_processes} "
        f"process{'es' if num_processes > 1 else ''}. All other times are simulated."
    )
    if true := {summary.cell.true_table for summary in cells} - {None}:
        notes.append(f"Devices take the times of {', '.join(sorted(map(str, true)))}, which the planner does not know.")
    if conditions.jitter:
        notes.append("With jitter runs may take less time than the bound supposes, so its share may exceed 100%.")
    for note in notes:
        out.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


_Read = Callable[[PromiseCounts], str]


def _share(part: int, whole: int) -> str:
    return percent(part / whole) if whole else _NOTHING


def _late(one: PromiseCounts) -> str:
    eta = one.eta_after
    return f"{eta.num_said_late}/{eta.num_rightly}/{eta.num_late}"


_PROMISE_OUTCOME: dict[str, _Read] = {
    "best effort\non time %": lambda one: _share(one.before, one.num_due),
    "promises\non time %": lambda one: _share(one.after, one.num_due),
    "of best\neffort %": lambda one: _share(one.after, one.before),
    "others\non time %": lambda one: _share(one.others_after, one.others),
}
_PROMISE_ANSWERS: dict[str, _Read] = {
    "asked": lambda one: str(one.asked),
    "accepted": lambda one: str(one.accepted),
    "of those\non time %": lambda one: _share(one.fitting_accepted, one.fitting),
    "kept": lambda one: str(one.kept),
    "broken": lambda one: str(one.broken),
    "eta\n±20% %": lambda one: _share(one.eta_after.num_near, one.eta_after.num_done),
    "late: said\nright/all": _late,
}


def print_promises(cells: Sequence[PromiseCell], asking: float) -> None:
    """Print a table per cell, or two where the terminal is narrow; then, if there are several cells, those of all.

    `asking` is the share that asks.
    """
    for cell in cells:
        devices = counted_devices(cell.cell.num_devices)
        seeds = counted(cell.num_seeds, "seed")
        title = f"{cell.cell.name}: {counted(cell.num_requests, 'request')} on {devices}, {seeds}, simulated"
        counts = {policy: total(of_seeds) for policy, of_seeds in cell.policies.items()}
        _print_promise_tables(title, counts, cell.errors)
    if len(cells) > 1:
        lines = promise_overall(cells)
        _print_promise_tables(f"all {len(cells)} cells, simulated", {one.policy: one.counts for one in lines}, ())
        for one in lines:
            out.print(_worst_text(one), style="dim", markup=False, highlight=False, soft_wrap=True)
    if cells:
        _print_promise_notes(asking)


def _print_promise_tables(title: str, counts: Mapping[str, PromiseCounts], failed: Iterable[str]) -> None:
    out.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    parts = [_PROMISE_OUTCOME, _PROMISE_ANSWERS]
    for columns in [_PROMISE_OUTCOME | _PROMISE_ANSWERS] if out.width >= _WIDE else parts:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("policy", no_wrap=True)
        for heading in columns:
            table.add_column(heading, justify="right")
        for policy, one in counts.items():
            table.add_row(policy, *(_promise_cell(heading, read, one) for heading, read in columns.items()))
        for policy in failed:
            table.add_row(policy, Text("failed", style="red"))
        out.print(table)


def _promise_cell(heading: str, read: _Read, one: PromiseCounts) -> Text:
    return Text(read(one), style="bold red" if heading == "broken" and one.broken else "")


def _worst_text(one: PromiseOverall) -> str:
    if one.worst is None:
        return f"{one.policy}: no request is on time as best effort"
    return f"{one.policy}: at worst {percent(one.worst)}% of best effort, in {one.worst_in}"


def _print_promise_notes(asking: float) -> None:
    for note in (
        f"Each policy serves the same requests twice: all as best effort, and with {100 * asking:g}% of those with a "
        "deadline asking for a promise (on_miss: reject). Counts are of all seeds.",
        "of best effort: on time with promises over on time as best effort. others: requests that do not ask. of those "
        "on time: accepted ones among those that ask and are on time as best effort.",
        "eta, late: of accepted requests, with promises. eta: latencies within 20% of the one told at acceptance. "
        "late: requests told to be late, those of them that were, and all that were.",
    ):
        out.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
