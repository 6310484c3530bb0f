"""TetriServe's figures: shares of requests on time, FLUX.1-dev on eight H100 by the table that ships."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, pstdev

from suite.case import Check, Table
from suite.pictures import grouped_bars, panels_png
from suite.stats import Interval, exact, extremes

from figures.cached_runs import (
    CachedRuns,
    RemadeFigure,
    Runs,
    attainment,
    least,
    most,
    percent,
    range_of,
    share_curves,
    share_table,
    size_attainment,
    traced,
)
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.policy.published.tetriserve.policy import TetriServe
from tilework.policy.registry import register
from tilework.report.panels import BarPanel, Curve, CurvePanel
from tilework.sim.workloads.cells import Cell
from tilework_lab.compare.figures import Figures
from tilework_lab.compare.runs import Conditions

FIXED = ("fixed-sp1", "fixed-sp2", "fixed-sp4", "fixed-sp8")
THEIRS = ("tetriserve", *FIXED)
POLICIES = (*THEIRS, "tilework")  # The last one for comparison; the paper's claims are about the others.
SCALES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
STAND_IN_SCALES = (1.0, 1.2, 1.5)
RATES = (6, 9, 12, 15, 18)
SIDES = (256, 512, 1024, 2048)
NEAR_PERFECT, FAILS = 0.95, 0.05

# Figure 13: rounds in which this many steps of the largest size run on eight devices, 181 ms each. The margin
# leaves room for what is lost at a move, and 2% for errors, as in a round whose length the policy chooses itself.
GRAINS = (1, 2, 5, 10)
LOSSES_MS = (0, 20)
_STEP_NS = 181 * NS_PER_MS
_MARGIN_NS = 30 * NS_PER_MS


def _grain(steps: int) -> str:
    return f"tetriserve-{steps}-steps"


for _steps in GRAINS:
    _round_ns = round(1.02 * _steps * _STEP_NS) + _MARGIN_NS
    register(_grain(_steps), partial(TetriServe, round_ns=_round_ns, margin_ns=_MARGIN_NS))


def figure_3(cached: CachedRuns) -> RemadeFigure:
    """Fixed degrees, uniform mix, SLO scale 1.0: (a) by arrival rate, (b) by size at 12 per minute."""
    rates = cached.points(RATES)
    cells = {rate: cached.cell(f"tetriserve,rpm={rate}") for rate in dict.fromkeys((*rates, 12))}
    runs = cached.runs(cells.values(), FIXED)
    at_12 = {one: runs[cells[12].name, one] for one in FIXED}
    largest, smallest = _sizes()[-1], _sizes()[0]
    panels = (
        _curves("(a) uniform mix, SLO scale 1.0", "requests per minute", [cells[rate] for rate in rates], rates, runs),
        _bars("(b) by size, 12 per minute", at_12),
    )
    return RemadeFigure(
        tables=(
            _sweep_table("(a) On time, %, by requests per minute", rates, [cells[rate] for rate in rates], runs),
            _size_table("(b) On time, %, by size, 12 per minute", at_12),
        ),
        checks=(
            Check(
                what="(a) best fixed degree at any rate",
                measured=most(_shares([*cells.values()], FIXED, runs)),
                high=0.6,
            ),
            Check(
                what="(b) SP1 and SP2 at 256 px: near-perfect",
                measured=least([size_attainment(at_12[one], smallest) for one in FIXED[:2]]),
                low=NEAR_PERFECT,
            ),
            Check(
                what="(b) SP1 and SP2 at 2048 px: fail completely",
                measured=most([size_attainment(at_12[one], largest) for one in FIXED[:2]]),
                high=FAILS,
            ),
            Check(
                what="(b) SP4 and SP8 at 2048 px: handled (half on time at least)",
                measured=least([size_attainment(at_12[one], largest) for one in FIXED[2:]]),
                low=0.5,
            ),
            Check(
                what="(b) SP4 and SP8 at 256 px: below SP1 (largest difference)",
                measured=most(
                    [
                        size_attainment(at_12[one], smallest) - size_attainment(at_12["fixed-sp1"], smallest)
                        for one in FIXED[2:]
                    ]
                ),
                high=0.0,
            ),
        ),
        png=panels_png(panels, FIXED, "TetriServe, figure 3, simulated"),
    )


def figure_6(cached: CachedRuns) -> RemadeFigure:
    """Uniform mix at 12 per minute: (a) by SLO scale, (b, c) by size at scales 1.0 and 1.5."""
    return _by_scale(cached, "uniform", mean_lead=0.10, led=(1.1, 0.28), number=6)


def figure_7(cached: CachedRuns) -> RemadeFigure:
    """The same with the skewed mix."""
    return _by_scale(cached, "skewed", mean_lead=0.15, led=(1.2, 0.32), number=7)


def _by_scale(cached: CachedRuns, mix: str, mean_lead: float, led: tuple[float, float], number: int) -> RemadeFigure:
    scales = cached.points(SCALES)
    cells = {
        scale: cached.cell(f"tetriserve,rpm=12,mix={mix},scale={scale}")
        for scale in sorted({*scales, 1.0, 1.5, led[0]})
    }
    runs = cached.runs(cells.values(), POLICIES)
    leads = [_lead(cell, runs) for cell in cells.values()]
    tight, loose = ({one: runs[cells[scale].name, one] for one in POLICIES} for scale in (1.0, 1.5))
    tables = (
        _sweep_table("(a) On time, %, by SLO scale", list(cells), list(cells.values()), runs, POLICIES),
        _size_table("(b) On time, %, by size, SLO scale 1.0", tight),
        _size_table("(c) On time, %, by size, SLO scale 1.5", loose),
    )
    worst = {one: min(size_attainment(tight[one], size) for size in _sizes()) for one in THEIRS}
    panels = (
        _curves(f"(a) {mix} mix, 12 per minute", "SLO scale", list(cells.values()), list(cells), runs, POLICIES),
        _bars("(b) by size, SLO scale 1.0", tight),
        _bars("(c) by size, SLO scale 1.5", loose),
    )
    return RemadeFigure(
        tables=tables,
        checks=(
            Check(what="(a) lead over the best fixed degree at each scale, least", measured=least(leads), low=0.0),
            Check(
                what=f"(a) mean of this lead; the paper has {mean_lead:.2f}",
                measured=range_of(leads),
                low=mean_lead - 0.05,
                high=mean_lead + 0.05,
            ),
            Check(
                what=f"(a) lead at scale {led[0]}; the paper has {led[1]:.2f}",
                measured=_lead_interval(cells[led[0]], runs),
                low=led[1] - 0.05,
                high=led[1] + 0.05,
            ),
            Check(
                what="(b) its worst size above that of each fixed degree, least lead",
                measured=least([worst["tetriserve"] - worst[one] for one in FIXED]),
                low=0.0,
            ),
            Check(
                what="(c) its worst size: near-perfect",
                measured=least([size_attainment(loose["tetriserve"], size) for size in _sizes()]),
                low=NEAR_PERFECT,
            ),
        ),
        png=panels_png(panels, POLICIES, f"TetriServe, figure {number}, simulated"),
    )


def figure_8(cached: CachedRuns) -> RemadeFigure:
    """Uniform mix at 12 per minute, SLO scale 1.5: on time by the time of the arrival, in windows of 2.5 minutes."""
    window_s = 150.0
    cell = cached.cell("tetriserve,rpm=12,scale=1.5")
    shares: dict[str, list[float]] = {}
    ends: list[float] = []
    for name in POLICIES:
        cached.note(name)
        windows: dict[int, list[bool]] = {}
        for one in traced(cell, name, seed=0).endings:
            windows.setdefault(int(one.request.arrival_ns / NS_PER_S // window_s), []).append(one.on_time)
        if len(windows) > 1:  # The last one holds what is left over.
            del windows[max(windows)]
        ends = [(index + 1) * window_s / 60 for index in windows]
        shares[name] = [fmean(found) for found in windows.values()]
    spread = {name: pstdev(found) for name, found in shares.items()}
    panel = CurvePanel(
        title="uniform mix, 12 per minute, SLO scale 1.5, one seed",
        x_label="minutes (ends of windows of 2.5)",
        y_label="on time",
        curves={name: Curve(xs=tuple(ends), ys=tuple(found)) for name, found in shares.items()},
    )
    rows = tuple(
        (name, percent(fmean(found)), percent(min(found)), f"{100 * spread[name]:.1f}")
        for name, found in shares.items()
    )
    return RemadeFigure(
        tables=(
            Table(
                title="On time in windows of 2.5 minutes, %",
                columns=("policy", "mean", "lowest", "standard deviation"),
                rows=rows,
            ),
        ),
        checks=(
            Check(
                what="its mean above that of each fixed degree, least lead",
                measured=exact(fmean(shares["tetriserve"]) - max(fmean(shares[one]) for one in FIXED)),
                low=0.0,
            ),
            Check(
                what="its standard deviation below that of each fixed degree, largest difference",
                measured=exact(spread["tetriserve"] - min(spread[one] for one in FIXED)),
                high=0.0,
            ),
        ),
        png=panels_png((panel,), POLICIES, "TetriServe, figure 8, simulated"),
    )


def figure_10(cached: CachedRuns) -> RemadeFigure:
    """A stand-in for SD3 on four A40, of which nothing is known: FLUX.1-dev on four H100 at half the rate."""
    scales = cached.points(STAND_IN_SCALES)
    fixed = FIXED[:3]
    names = ("tetriserve", *fixed, "tilework")
    mixes = {
        mix: [cached.cell(f"tetriserve,rpm=6,mix={mix},scale={scale}", num_devices=4) for scale in scales]
        for mix in ("uniform", "skewed")
    }
    runs = cached.runs([cell for cells in mixes.values() for cell in cells], names)
    panels = []
    tables = []
    checks = []
    for part, (mix, cells) in zip("ab", mixes.items(), strict=True):
        panels.append(_curves(f"({part}) {mix} mix, 6 per minute", "SLO scale", cells, scales, runs, names))
        tables.append(_sweep_table(f"({part}) On time, %, {mix} mix, by SLO scale", scales, cells, runs, names))
        leads = [_lead(cell, runs, fixed) for cell in cells]
        checks += [
            Check(
                what=f"({part}) lead over the best fixed degree at each scale, least", measured=least(leads), low=0.0
            ),
            Check(
                what=f"({part}) lead at scale {scales[0]} less the largest at another: largest at the tightest",
                measured=exact(leads[0] - max(leads[1:])),
                low=0.0,
            ),
        ]
    return RemadeFigure(
        tables=tuple(tables),
        checks=tuple(checks),
        png=panels_png(panels, names, "TetriServe, figure 10: a stand-in on four devices, simulated"),
    )


def figure_11(cached: CachedRuns) -> RemadeFigure:
    """Uniform mix, SLO scale 1.0, by arrival rate."""
    rates = cached.points(RATES)
    cells = [cached.cell(f"tetriserve,rpm={rate}") for rate in rates]
    runs = cached.runs(cells, POLICIES)
    return RemadeFigure(
        tables=(_sweep_table("On time, %, by requests per minute", rates, cells, runs, POLICIES),),
        checks=(
            Check(
                what="lead over the best fixed degree at each rate, least",
                measured=least([_lead(cell, runs) for cell in cells]),
                low=0.0,
            ),
        ),
        png=panels_png(
            (_curves("uniform mix, SLO scale 1.0", "requests per minute", cells, rates, runs, POLICIES),),
            POLICIES,
            "TetriServe, figure 11, simulated",
        ),
    )


def figure_12(cached: CachedRuns) -> RemadeFigure:
    """Workloads of one size at 12 per minute, SLO scale 1.5."""
    sides = cached.points(SIDES)
    cells = [cached.cell(f"tetriserve,rpm=12,mix={side},scale=1.5") for side in sides]
    runs = cached.runs(cells, POLICIES)
    bars = {name: tuple(attainment(runs[cell.name, name]) for cell in cells) for name in POLICIES}
    panel = BarPanel(
        title="one size alone, 12 per minute, SLO scale 1.5",
        y_label="on time",
        groups=tuple(f"{side} px" for side in sides),
        bars=bars,
        is_share=True,
    )
    return RemadeFigure(
        tables=(_sweep_table("On time, %, by the side of all images", sides, cells, runs, POLICIES),),
        checks=tuple(
            Check(what=f"lead over the best fixed degree at {side} px", measured=_lead_interval(cell, runs), low=0.0)
            for side, cell in zip(sides, cells, strict=True)
        ),
        png=grouped_bars((panel,), POLICIES, "TetriServe, figure 12, simulated"),
    )


def figure_13(cached: CachedRuns) -> RemadeFigure:
    """Uniform mix, SLO scale 1.0: rounds of 1, 2, 5 and 10 steps of the largest size, by arrival rate."""
    rates = cached.points(RATES)
    names = tuple(map(_grain, GRAINS))
    cells = [cached.cell(f"tetriserve,rpm={rate}") for rate in rates]
    losses = {loss: cached.runs(cells, names, Conditions(switch_ns=loss * NS_PER_MS)) for loss in LOSSES_MS}
    panels = [
        _curves(f"a move costs {loss} ms, uniform mix, scale 1.0", "requests per minute", cells, rates, runs, names)
        for loss, runs in losses.items()
    ]
    checks = []
    for loss, runs in losses.items():
        at_most = {name: attainment(runs[cells[-1].name, name]) for name in names}
        others = max(at_most[_grain(steps)] for steps in GRAINS if steps != 5)
        checks.append(
            Check(
                what=f"lead of 5 steps over the best other at {rates[-1]} per minute, a move costs {loss} ms",
                measured=exact(at_most[_grain(5)] - others),
                low=0.0,
            )
        )
    return RemadeFigure(
        tables=tuple(
            _sweep_table(
                f"On time, %, by requests per minute; a move costs {loss} ms", rates, cells, losses[loss], names
            )
            for loss in LOSSES_MS
        ),
        checks=tuple(checks),
        png=panels_png(panels, names, "TetriServe, figure 13, simulated"),
    )


def _sizes() -> tuple[str, ...]:
    return tuple(f"{side}x{side}" for side in SIDES)


def _shares(cells: Sequence[Cell], policies: Sequence[str], runs: Runs) -> list[float]:
    return [attainment(runs[cell.name, name]) for cell in cells for name in policies]


def _lead(cell: Cell, runs: Runs, fixed: Sequence[str] = FIXED) -> float:
    return attainment(runs[cell.name, "tetriserve"]) - max(attainment(runs[cell.name, name]) for name in fixed)


def _lead_interval(cell: Cell, runs: Runs) -> Interval:
    """Return ratios to the fixed degree that is best on the mean, seed by seed."""
    best = max(FIXED, key=lambda name: attainment(runs[cell.name, name]))
    pairs = zip(runs[cell.name, "tetriserve"], runs[cell.name, best], strict=True)
    return extremes([(mine.attainment or 0.0) - (other.attainment or 0.0) for mine, other in pairs], fmean)


def _curves(
    title: str,
    x_label: str,
    cells: Sequence[Cell],
    xs: Sequence[float],
    runs: Runs,
    policies: Sequence[str] = FIXED,
) -> CurvePanel:
    return share_curves(title, x_label, xs, _by_cell(cells, runs, policies))


def _by_cell(cells: Sequence[Cell], runs: Runs, policies: Sequence[str]) -> dict[str, list[float]]:
    return {name: [attainment(runs[cell.name, name]) for cell in cells] for name in policies}


def _bars(title: str, runs: Mapping[str, Sequence[Figures]]) -> BarPanel:
    shares = {name: tuple(size_attainment(found, size) for size in _sizes()) for name, found in runs.items()}
    return BarPanel(title=title, y_label="on time", groups=_sizes(), bars=shares, is_share=True)


def _sweep_table(
    title: str, xs: Sequence[float], cells: Sequence[Cell], runs: Runs, policies: Sequence[str] = FIXED
) -> Table:
    return share_table(title, xs, _by_cell(cells, runs, policies))


def _size_table(title: str, runs: Mapping[str, Sequence[Figures]]) -> Table:
    rows = tuple((name, *(percent(size_attainment(found, size)) for size in _sizes())) for name, found in runs.items())
    return Table(title=title, columns=("policy", *_sizes()), rows=rows)


FIGURES = {
    "tetriserve-3": figure_3,
    "tetriserve-6": figure_6,
    "tetriserve-7": figure_7,
    "tetriserve-8": figure_8,
    "tetriserve-10": figure_10,
    "tetriserve-11": figure_11,
    "tetriserve-12": figure_12,
    "tetriserve-13": figure_13,
}
