"""The answer of `tilework plan` for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from tilework.cli.console import out
from tilework.cli.plan.answer import Answer
from tilework.cli.plan.document import uses_of
from tilework.report.tables import counted_devices
from tilework.sim.plan.error import PlanError
from tilework.sim.plan.mix import Purchase, unknown_pipelines
from tilework.sim.plan.search import Point, Sized
from tilework.sim.plan.stages import Partition, StagePlan


def show(answer: Answer) -> None:
    """Print the answer: what to buy, what was tried, what-ifs, stages, and how far to trust it."""
    _line(_headline(answer))
    for sized in answer.alone:
        if sized.points:
            out.print(_points_table(sized))
    for part in _parts(answer):
        if part.point is not None:
            out.print(_uses_table(part, part.point))
    if answer.what_ifs:
        out.print(_what_ifs_table(answer.what_ifs))
    if answer.stages is not None:
        out.print(_stages_table(answer.stages))
    for note in _notes(answer):
        _line(note, style="dim")


def _line(text: str, style: str = "") -> None:
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _parts(answer: Answer) -> Sequence[Sized]:
    choice = answer.choice
    return () if choice is None else choice.parts if isinstance(choice, Purchase) else (choice,)


def _headline(answer: Answer) -> str:
    target = f"{answer.asked.question.target:.1%} on time"
    parts = _parts(answer)
    if not parts:
        if answer.alone and not any(one.points for one in answer.alone):
            return f"{target}: out of reach"
        if not answer.alone:
            return f"{target}: no division of the sizes meets it; give more with --most, or a hardware that serves all"
        most = max(one.sizing.numbers[-1] for one in answer.alone)
        return f"{target}: not with {counted_devices(most)}; give more with --most, or a lower --target"
    text = " and ".join(
        f"{counted_devices(part.fewest or 0)} of {part.sizing.hardware}{_for_sizes(part)}" for part in parts
    )
    price = f", {answer.choice.usd_per_h:.2f} USD per hour" if isinstance(answer.choice, Purchase) else ""
    return f"{target}: {text}{price}"


def _for_sizes(part: Sized) -> str:
    return "" if part.sizing.sizes is None else f" for {'; '.join(sorted(map(str, part.sizing.sizes)))}"


def _points_table(sized: Sized) -> Table:
    table = _table(f"{sized.sizing.hardware}, simulated; requests one by one take {sized.demand.load:.1f} devices")
    for heading in ("devices", "on time", "95% interval", "samples", "target"):
        table.add_column(heading, justify="right")
    for one in sized.points:
        mark = "" if one.is_whole else "≤ "
        style = "bold" if one.num_devices == sized.fewest else ""
        interval = f"{one.share.low:.1%} to {one.share.high:.1%}"
        share = f"{mark}{one.share.value:.1%}"
        table.add_row(f"{one.num_devices}", share, interval, f"{len(one.outcomes)}", one.verdict, style=style)
    return table


def _uses_table(part: Sized, point: Point) -> Table:
    table = _table(f"use of {counted_devices(point.num_devices)} of {part.sizing.hardware}")
    for heading in ("model", "stage"):
        table.add_column(heading)
    table.add_column("devices busy", justify="right")
    table.add_column("device time by degree")
    for one in uses_of(point):
        degrees = ", ".join(f"{degree}: {share:.0%}" for degree, share in one.degrees.items())
        table.add_row(one.pipeline, one.stage, f"{one.devices:.1f}", degrees)
    return table


def _what_ifs_table(what_ifs: Sequence[Sized]) -> Table:
    table = _table(f"what if, on {what_ifs[0].sizing.hardware}")
    table.add_column("change")
    table.add_column("devices", justify="right")
    for one in what_ifs:
        table.add_row(str(one.sizing.what_if), "not enough" if one.fewest is None else f"{one.fewest}")
    return table


def _stages_table(plan: StagePlan) -> Table:
    table = _table(f"stages of {counted_devices(plan.num_devices)} of {plan.hardware}, in instances of {plan.width}")
    table.add_column("division")
    for share in plan.shares:
        table.add_column(share.name, justify="right")
    for heading in ("requests/s", "on time", "mean s"):
        table.add_column(heading, justify="right")
    table.add_row("device s per request", *(f"{one.device_s:.3f}" for one in plan.shares), f"{plan.offered_per_s:.3f}")
    for name, one in (("Theorem 1", plan.theorem), ("by simulation", plan.best), ("undivided", plan.undivided)):
        table.add_row(name, *_partition_cells(one, len(plan.shares)))
    return table


def _partition_cells(one: Partition, num_services: int) -> Iterator[str]:
    yield from map(str, one.counts or ("all",) * num_services)
    yield "" if one.rate_per_s is None else f"{one.rate_per_s:.3f}"
    yield "" if one.attainment is None else f"{one.attainment:.1%}"
    yield f"{one.mean_s:.2f}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _notes(answer: Answer) -> Iterator[str]:
    asked = answer.asked
    for name in asked.question.tables:
        if name not in asked.serving:
            lacks = ", ".join(unknown_pipelines(asked.requests, asked.question.tables[name]))
            yield f"{name} has no costs of {lacks}, so it cannot serve all requests."
    for sized in answer.alone:
        if not sized.points:
            late = f"{1 - sized.demand.reachable:.1%} of the requests would be late even alone"
            yield f"{sized.sizing.hardware}: {late}, on any number of devices."
    if answer.no_stages:
        yield f"stages: {answer.no_stages}."
    if not any(one.points for one in answer.alone):
        return
    yield "meets: the whole interval is at the target or above; misses: it is below."
    yield "unsure: neither, and more samples would probably not put it above."
    yield "≤: the run ended early, and the other requests count as on time; open: another number decided the search."
    for one in answer.alone:
        if one.in_the_mean is not None and one.in_the_mean != one.fewest:
            yield f"{counted_devices(one.in_the_mean)} of {one.sizing.hardware} reach the target in the mean only."
    yield error_text(answer.error)
    yield (
        f"{answer.num_trials} simulations in {answer.wall_s:.0f} s, in {answer.num_processes} "
        f"process{'es' if answer.num_processes > 1 else ''}."
    )


def error_text(error: PlanError) -> str:
    """Say in one sentence how far simulation was off."""
    return (
        f"Simulation against {error.compared_with}: {error.points:+.1f} points ({error.simulated:.1%} simulated, "
        f"{error.live:.1%} there, {error.num_requests} requests; {error.source})."
    )
