"""The tables of `tilework compare --promises`: one per cell and one of all cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from tilework.cli.console import out
from tilework.report.tables import counted_devices
from tilework.server.text import counted
from tilework_lab.cli.tables import percent
from tilework_lab.compare.promises import PromiseCell, PromiseCounts, PromiseOverall, promise_overall, total

_NOTHING = "-"
_WIDE = 150
_Read = Callable[[PromiseCounts], str]


def _share(part: int, whole: int) -> str:
    return percent(part / whole) if whole else _NOTHING


def _late(one: PromiseCounts) -> str:
    eta = one.eta_after
    return f"{eta.num_said_late}/{eta.num_rightly}/{eta.num_late}"


_OUTCOME: Mapping[str, _Read] = {
    "best effort\non time %": lambda one: _share(one.before, one.num_due),
    "promises\non time %": lambda one: _share(one.after, one.num_due),
    "of best\neffort %": lambda one: _share(one.after, one.before),
    "others\non time %": lambda one: _share(one.others_after, one.others),
}
_ANSWERS: Mapping[str, _Read] = {
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
        _print(title, counts, cell.errors)
    if len(cells) > 1:
        lines = promise_overall(cells)
        _print(f"all {len(cells)} cells, simulated", {one.policy: one.counts for one in lines}, ())
        for one in lines:
            out.print(_worst(one), style="dim", markup=False, highlight=False, soft_wrap=True)
    if cells:
        _print_notes(asking)


def _print(title: str, counts: Mapping[str, PromiseCounts], failed: Iterable[str]) -> None:
    out.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    for columns in [{**_OUTCOME, **_ANSWERS}] if out.width >= _WIDE else [_OUTCOME, _ANSWERS]:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("policy", no_wrap=True)
        for heading in columns:
            table.add_column(heading, justify="right")
        for policy, one in counts.items():
            table.add_row(policy, *(_cell(heading, read, one) for heading, read in columns.items()))
        for policy in failed:
            table.add_row(policy, Text("failed", style="red"))
        out.print(table)


def _cell(heading: str, read: _Read, one: PromiseCounts) -> Text:
    return Text(read(one), style="bold red" if heading == "broken" and one.broken else "")


def _worst(one: PromiseOverall) -> str:
    if one.worst is None:
        return f"{one.policy}: no request is on time as best effort"
    return f"{one.policy}: at worst {percent(one.worst)}% of best effort, in {one.worst_in}"


def _print_notes(asking: float) -> None:
    for note in (
        f"Each policy serves the same requests twice: all as best effort, and with {100 * asking:g}% of those with a "
        "deadline asking for a promise (on_miss: reject). Counts are of all seeds.",
        "of best effort: on time with promises over on time as best effort. others: those that do not ask. of those on "
        "time: how many are accepted of those that ask and are on time as best effort.",
        "eta, late: of accepted requests, with promises. eta: latencies within 20% of the one told at acceptance. "
        "late: how many were told to be late, of these were, and were in all.",
    ):
        out.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
