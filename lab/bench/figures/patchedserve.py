"""PatchedServe's figures: shares of requests on time, Stable Diffusion XL and 3 on H100 by the tables that ship."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise

from suite.case import Check, Table
from suite.pictures import grouped_bars, panels_png
from suite.stages import DIFFUSE
from suite.stats import exact

from figures.cached_runs import (
    CachedRuns,
    RemadeFigure,
    attainment,
    least,
    most,
    percent,
    range_of,
    share_curves,
    share_table,
)
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import Stage
from tilework.core.request import Shape
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.report.panels import BarPanel
from tilework.sim.workloads.cells import Cell
from tilework_lab.workloads.patchedserve import SIDES

MODELS = {"sdxl": "SDXL", "sd3": "SD3"}
STUDIED = {"sdxl": 8.8, "sd3": 3.2}  # Requests per second on eight devices, figures 13 and 15.
# Requests per second and device. The paper's are in its plots; the last but one is that of figure 13.
RATES = {"sdxl": (0.3, 0.5, 0.7, 0.9, 1.1, 1.3), "sd3": (0.15, 0.2, 0.25, 0.325, 0.4, 0.475)}
LIGHT, NUM_LAST = 0.05, 3  # Figure 14 has the last of these, and one at which there is hardly a queue.
SCALES = (0.6, 0.8, 1.0, 1.2, 1.4)  # Deadlines of 3 to 7 times the latency alone.
LATENCIES = 5  # Times the latency alone are deadlines at scale 1.
SKIPPED = 0.21
SKIPPING = "nirvana, skipping"
OWN = "patchedserve, caching"
FCFS = "mixed-cache, caching"
BASELINES = ("mixed-cache", "nirvana")
WITH_CACHES = (OWN, FCFS, SKIPPING)
SINGLE = ("patchedserve", *BASELINES, "edf", *WITH_CACHES)
SEVERAL = ("patchedserve", *BASELINES, "distrifusion", "edf", *WITH_CACHES)
ON_ONE = 400  # Requests on one device.
SECONDS = 120  # Length of a workload on several devices.
FEWEST = 200  # Requests on several devices, at least.
MET = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A workload, at a rate for all devices together."""

    model: str
    rate: float
    num_devices: int = 8
    mix: str = "equal"
    scale: float = 1.0
    skipped: float = 0.0
    cache: str = "off"

    def cell(self, cached: CachedRuns) -> Cell:
        num = ON_ONE if self.num_devices == 1 else max(FEWEST, round(self.rate * SECONDS))
        count = f",num={num}" if cached.num_requests is None else ""  # Else the cached says how many.
        more = (f",skipped={self.skipped}" if self.skipped else "") + (
            "" if self.cache == "off" else f",cache={self.cache}"
        )
        text = f"patchedserve-{self.model},rate={self.rate:g},mix={self.mix},scale={self.scale:g}{more}{count}"
        return cached.cell(text, self.num_devices)


Shares = Mapping[str, Sequence[float]]
"""Return the shares on time by policy, point by point."""


def _variant(name: str, point: Point) -> tuple[str, Point]:
    """Return the policy of a name, and the point with what its system saves of the steps."""
    policy, _, saves = name.partition(", ")
    if not saves:
        return policy, point
    return policy, replace(point, skipped=SKIPPED) if name == SKIPPING else replace(point, cache="patch")


def _shares(cached: CachedRuns, points: Sequence[Point], names: Sequence[str]) -> Shares:
    found: dict[str, list[float]] = {}
    for name in names:
        variants = [_variant(name, point) for point in points]
        cells = [point.cell(cached) for _, point in variants]
        runs = cached.runs(cells, [variants[0][0]])
        found[name] = [attainment(runs[cell.name, policy]) for cell, (policy, _) in zip(cells, variants, strict=True)]
    return found


def _leads(shares: Shares, rivals: Sequence[str], own: str = "patchedserve") -> list[float]:
    """Return the ratios of `own` to the best of some others, point by point."""
    ours, *others = (shares[name] for name in (own, *rivals))
    return [mine - max(rest) for mine, *rest in zip(ours, *others, strict=True)]


def _cache_checks(found: Mapping[str, Shares], told: str = "") -> list[Check]:
    """Return the leads of PatchedServe over NIRVANA and Mixed-Cache, without what each saves of its steps and with it.

    In points and relative, which the paper's words leave open. `told` is what it says of the former.
    """
    checks = []
    for own, other in (("patchedserve", "nirvana"), (OWN, SKIPPING), ("patchedserve", "mixed-cache"), (OWN, FCFS)):
        pairs = [pair for one in found.values() for pair in zip(one[own], one[other], strict=True) if pair[1] > 0]
        said = told if other in ("nirvana", SKIPPING) else ""
        what = f"lead of {own} over {other}, mean of all points"
        points, ratios = [mine - theirs for mine, theirs in pairs], [mine / theirs - 1 for mine, theirs in pairs]
        checks.append(Check(what=f"{what}, in points{said}", measured=range_of(points)))
        checks.append(Check(what=f"{what}, relative{said}", measured=range_of(ratios)))
    return checks


def figure_12(cached: CachedRuns) -> RemadeFigure:
    """One device, by arrival rate."""
    found = {
        model: _shares(
            cached, [Point(model=model, rate=rate, num_devices=1) for rate in cached.points(RATES[model])], SINGLE
        )
        for model in MODELS
    }
    rates = {model: cached.points(RATES[model]) for model in MODELS}
    checks = [
        Check(
            what="lead over mixed-cache and nirvana at each rate, least",
            measured=least([lead for shares in found.values() for lead in _leads(shares, BASELINES)]),
            low=0.0,
        ),
        Check(
            what="on time at each rate, least",
            measured=least([share for shares in found.values() for share in shares["patchedserve"]]),
            low=MET,
        ),
    ]
    goodput = (("patchedserve", "nirvana", 5.33), (OWN, SKIPPING, 5.33), ("patchedserve", "mixed-cache", 1.06))
    for own, name, told in (*goodput, (OWN, FCFS, 1.06)):
        ratios = [
            _rate_at(rates[model], shares[own]) / _rate_at(rates[model], shares[name])
            for model, shares in found.items()
        ]
        what = f"requests per second at 90% on time of {own} over those of {name}, mean of both models"
        checks.append(
            Check(what=f"{what}; the paper has {told}", measured=range_of(ratios), low=told - 0.1, high=told + 0.1)
        )
    checks += _cache_checks(found, "; the paper has 0.301")
    return RemadeFigure(
        tables=tuple(
            share_table(f"{MODELS[model]}: on time, %, by requests per second", rates[model], shares)
            for model, shares in found.items()
        ),
        checks=tuple(checks),
        png=panels_png(
            [
                share_curves(f"{MODELS[model]} on one device", "requests per second", rates[model], shares)
                for model, shares in found.items()
            ],
            SINGLE,
            "PatchedServe, figure 12, simulated",
        ),
    )


def _rate_at(rates: Sequence[float], shares: Sequence[float]) -> float:
    """Return the rate up to which nine tenths are on time, in proportion between two of the points tried."""
    points = list(zip(rates, shares, strict=True))
    if points[0][1] < MET:
        return points[0][0]
    for (low, above), (high, below) in pairwise(points):
        if below < MET:
            return low + (high - low) * (above - MET) / (above - below)
    return points[-1][0]


def figure_13(cached: CachedRuns) -> RemadeFigure:
    """Eight devices, one size has half."""
    mixes = cached.points(tuple(SIDES))
    found = {
        model: _shares(cached, [Point(model=model, rate=rate, mix=mix) for mix in mixes], SEVERAL)
        for model, rate in STUDIED.items()
    }
    checks = [
        _lead_check(found),
        Check(
            what="on time, least",
            measured=least([share for shares in found.values() for share in shares["patchedserve"]]),
            low=MET,
        ),
        Check(
            what="SD3: lead over mixed-cache, most; the paper has 0.114",
            measured=most(_leads(found["sd3"], ["mixed-cache"])),
            low=0.064,
            high=0.164,
        ),
        Check(
            what=f"SD3: lead of {OWN} over {FCFS}, most; the paper has 0.114",
            measured=most(_leads(found["sd3"], [FCFS], OWN)),
            low=0.064,
            high=0.164,
        ),
        *_cache_checks(found),
    ]
    return RemadeFigure(
        tables=tuple(
            Table(
                title=f"{MODELS[model]}: on time, %, by the size that has half",
                columns=("policy", *mixes),
                rows=tuple((name, *map(percent, values)) for name, values in shares.items()),
            )
            for model, shares in found.items()
        ),
        checks=tuple(checks),
        png=grouped_bars(
            [
                BarPanel(
                    title=f"{MODELS[model]}, {STUDIED[model]} per second on eight devices",
                    y_label="on time",
                    groups=tuple(mixes),
                    bars={name: tuple(values) for name, values in shares.items()},
                    is_share=True,
                )
                for model, shares in found.items()
            ],
            SEVERAL,
            "PatchedServe, figure 13, simulated: one size has half",
        ),
    )


def _lead_check(found: Mapping[str, Shares]) -> Check:
    return Check(
        what="lead over the best of mixed-cache, nirvana and distrifusion, least",
        measured=least(
            [lead for shares in found.values() for lead in _leads(shares, ("mixed-cache", "nirvana", "distrifusion"))]
        ),
        low=0.0,
    )


def figure_14(cached: CachedRuns) -> RemadeFigure:
    """Two, four and eight devices, by arrival rate."""
    found: dict[str, Shares] = {}
    rates: dict[str, Sequence[float]] = {}
    for model, label in MODELS.items():
        for num_devices in cached.points((2, 4, 8)):
            name = f"{label} on {num_devices} devices"
            each = cached.points((LIGHT, *RATES[model][-NUM_LAST:]))
            rates[name] = [round(rate * num_devices, 6) for rate in each]
            points = [Point(model=model, rate=rate, num_devices=num_devices) for rate in rates[name]]
            found[name] = _shares(cached, points, SEVERAL)
    alone = [shares["distrifusion"] for shares in found.values()]
    return RemadeFigure(
        tables=tuple(
            share_table(f"{name}: on time, %, by requests per second", rates[name], shares)
            for name, shares in found.items()
        ),
        checks=(
            _lead_check(found),
            Check(what="distrifusion at the lightest load, least", measured=least([one[0] for one in alone]), low=MET),
            Check(what="distrifusion at the heaviest load, most", measured=most([one[-1] for one in alone]), high=0.5),
            *_cache_checks(found),
        ),
        png=panels_png(
            [share_curves(name, "requests per second", rates[name], shares) for name, shares in found.items()],
            SEVERAL,
            "PatchedServe, figure 14, simulated",
        ),
    )


def figure_15(cached: CachedRuns) -> RemadeFigure:
    """Eight devices, by SLO scale."""
    scales = cached.points(SCALES)
    found = {
        model: _shares(cached, [Point(model=model, rate=rate, scale=scale) for scale in scales], SEVERAL)
        for model, rate in STUDIED.items()
    }
    xs = [LATENCIES * scale for scale in scales]
    tight = {name: shares[0] for name, shares in found["sd3"].items()}
    checks = [_lead_check(found)]
    checks += [
        Check(
            what=f"SD3, deadlines of 3 times the latency alone: lead of {name} over {other}",
            measured=exact(tight[name] - tight[other]),
            low=0.0,
        )
        for name, other in (("nirvana", "mixed-cache"), (SKIPPING, FCFS))
    ]
    checks += _cache_checks(found)
    return RemadeFigure(
        tables=tuple(
            share_table(f"{MODELS[model]}: on time, %, by deadline over the latency alone", xs, shares)
            for model, shares in found.items()
        ),
        checks=tuple(checks),
        png=panels_png(
            [
                share_curves(
                    f"{MODELS[model]}, {STUDIED[model]} per second", "deadline over the latency alone", xs, shares
                )
                for model, shares in found.items()
            ],
            SEVERAL,
            "PatchedServe, figure 15, simulated: eight devices",
        ),
    )


# Ratios by the tables, without a simulation. The tables were fitted to some of them.


@dataclass(frozen=True, slots=True)
class _Steps:
    """Seconds of a step of batches, by the letters of their sizes: L, M, H."""

    costs: TableCosts
    stage: Stage

    @staticmethod
    def of(model: str) -> _Steps:
        return _Steps(TableCosts(read_table(f"{model}_h100")), latent_diffusion(model).stage(DIFFUSE))

    def ns(self, letters: str, degree: int = 1) -> int:
        return self.costs.run_ns(self.stage, [_SHAPES[letter] for letter in letters], degree)


_SHAPES = {name[0].upper(): Shape(side, side) for name, side in SIDES.items()}
_NUMS = (1, 2, 3, 4)  # Requests of each size in a batch.


def figure_6(cached: CachedRuns) -> RemadeFigure:
    """Batches of three, by their sizes."""
    batches = ["".join(letters) for letters in combinations_with_replacement(_SHAPES, 3)]
    ratios = {
        MODELS[model]: tuple(steps.ns(batch) / steps.ns("LLL") for batch in batches)
        for model, steps in ((model, _Steps.of(model)) for model in MODELS)
    }
    panel = BarPanel(title="batches of three", y_label="time over that of LLL", groups=tuple(batches), bars=ratios)
    return RemadeFigure(
        tables=(_ratio_table("Time of a batch over that of LLL", batches, ratios),),
        checks=(
            Check(
                what="SDXL: HHH over LLL; the paper has up to 1.68",
                measured=exact(ratios["SDXL"][-1]),
                low=1.58,
                high=1.78,
            ),
        ),
        png=grouped_bars((panel,), tuple(ratios), "PatchedServe, figure 6, by the tables"),
    )


def figure_16(cached: CachedRuns) -> RemadeFigure:
    """Return the gain of batches of mixed sizes over a batch of each size, one after another."""
    gains = {}
    for model, label in MODELS.items():
        steps = _Steps.of(model)
        gains[label] = tuple(
            sum(steps.ns(letter * num) for letter in _SHAPES) / steps.ns("".join(_SHAPES) * num) - 1 for num in _NUMS
        )
    groups = [f"{3 * num}" for num in _NUMS]
    panel = BarPanel(title="mixed batches over batches of a size", y_label="gain", groups=tuple(groups), bars=gains)
    return RemadeFigure(
        tables=(_ratio_table("More throughput by mixed batches, by batch size, as a share", groups, gains),),
        checks=(
            Check(
                what="mean gain of both models; the paper has 0.13",
                measured=range_of([gain for values in gains.values() for gain in values]),
                low=0.08,
                high=0.18,
            ),
            Check(
                what="gain of SDXL less that of SD3, least: SDXL gains more",
                measured=least([xl - three for xl, three in zip(gains["SDXL"], gains["SD3"], strict=True)]),
                low=0.0,
            ),
        ),
        png=grouped_bars((panel,), tuple(gains), "PatchedServe, figure 16, by the tables"),
    )


def figure_18(cached: CachedRuns) -> RemadeFigure:
    """Eight devices: batches of all sizes on each, against one request after another on all."""
    ratios = {}
    for model, label in MODELS.items():
        steps = _Steps.of(model)
        wide_ns = sum(steps.ns(letter, degree=8) for letter in _SHAPES)
        ratios[label] = tuple(8 * num * wide_ns / steps.ns("".join(_SHAPES) * num) for num in _NUMS)
    groups = [f"{3 * num}" for num in _NUMS]
    panel = BarPanel(
        title="throughput of patched batches over DistriFusion's", y_label="ratio", groups=tuple(groups), bars=ratios
    )
    return RemadeFigure(
        tables=(_ratio_table("Throughput of patched batches over DistriFusion's, by batch size", groups, ratios),),
        checks=(
            Check(
                what="throughput over DistriFusion's, least",
                measured=least([ratio for values in ratios.values() for ratio in values]),
                low=1.0,
            ),
        ),
        png=grouped_bars((panel,), tuple(ratios), "PatchedServe, figure 18, by the tables"),
    )


def _ratio_table(title: str, columns: Sequence[str], values: Mapping[str, Sequence[float]]) -> Table:
    rows = tuple((name, *(f"{value:.2f}" for value in found)) for name, found in values.items())
    return Table(title=title, columns=("model", *columns), rows=rows)


FIGURES = {
    "patchedserve-6": figure_6,
    "patchedserve-12": figure_12,
    "patchedserve-13": figure_13,
    "patchedserve-14": figure_14,
    "patchedserve-15": figure_15,
    "patchedserve-16": figure_16,
    "patchedserve-18": figure_18,
}
