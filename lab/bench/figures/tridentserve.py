"""TridentServe's figures on 128 simulated L20: requests on time and latency, its ablations, readings and deadlines.

The tables are fitted to what the paper says of memory and of its best degrees, so that agreement there is circular
(lab/docs/reproduction.md). Rates are the published ones, at which static baselines of these tables are on time nearly
always, and those at which the best of them keeps about nine of ten, as the tables suggest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf, isfinite
from statistics import fmean
from typing import Any

from suite.case import Check, Table
from suite.pictures import grouped_bars, panels_png

from figures.cached_runs import (
    CachedRuns,
    RemadeFigure,
    attainment,
    least,
    mean_of,
    most,
    percent,
    range_of,
    share_curves,
    share_table,
)
from tilework.cost.shipped import shipped_path
from tilework.policy.published.tridentserve.orchestration import Orchestration
from tilework.policy.published.tridentserve.policy import TridentServe
from tilework.policy.registry import register
from tilework.report.panels import BarPanel
from tilework.sim.workloads.cells import Cell
from tilework_lab.compare.figures import Figures

BASELINES = tuple(f"trident-b{number}" for number in range(1, 7))
POLICIES = (*BASELINES, "tridentserve", "tilework")
ABLATIONS = ("tridentserve", *(f"tridentserve-{name}" for name in ("wo-switch", "wo-stageaware", "wo-scheduler")))
BY_REQUESTS = "tridentserve-by-requests"
READINGS: dict[str, Callable[[], TridentServe]] = {
    BY_REQUESTS: lambda: TridentServe(orchestration=Orchestration(by="requests")),
    "tridentserve-completions": lambda: TridentServe(orchestration=Orchestration(reading="completions")),
    "tridentserve-paper-times": lambda: TridentServe(paper_times=True),
    "tridentserve-literal": lambda: TridentServe(
        orchestration=Orchestration(by="requests", reading="completions"), paper_times=True
    ),
}
"""Claims of the paper's text taken literally, where `tridentserve` does something else."""
ONE_BY_ONE = "tridentserve-one-by-one"
PIPELINES = {
    "sd3": ("tridentserve-sd3", "sd3medium_l20"),
    "flux": ("tridentserve-flux", "flux1_l20"),
    "cogvideox": ("tridentserve-cogvideox", "cogvideox15_l20"),
    "hunyuanvideo": ("tridentserve-hunyuanvideo", "hunyuanvideo_l20"),
}
ROOMLESS = ("flux", "hunyuanvideo")
"""The pipelines of which some sizes fit on no device with all stages."""
BATCHING = ("sd3", "flux", "hunyuanvideo")
"""The pipelines in which something can be batched: small images, or encodes on auxiliaries."""
LOADS = ("light", "medium", "heavy", "dynamic", "diurnal")
MINUTES = {"sd3": 2, "flux": 10, "cogvideox": 15, "hunyuanvideo": 20}
"""The paper's half hour takes hours to simulate at twenty requests per second."""
NEAR = 0.9  # Share of the best static baseline, at the rates that the tables suggest.
SCALES = (1.0, 1.5, 2.0, 2.5)
SLOWEST = 0.95

for _name, _make in READINGS.items():
    register(_name, _make)
register(ONE_BY_ONE, lambda: TridentServe(batches=False))


def figure_10(cached: CachedRuns) -> RemadeFigure:
    """All pipelines and loads: on time, mean and P95 of the latency, against B1 to B6."""
    cells = {
        (pipeline, load, rate): load_cell(cached, pipeline, load, rate)
        for pipeline in PIPELINES
        for load in cached.points(LOADS)
        for rate in rates_of(pipeline, load)
    }
    runs = cached.runs(cells.values(), POLICIES)
    of = {key: {policy: runs[cell.name, policy] for policy in POLICIES} for key, cell in cells.items()}
    ours = [attainment(one["tilework"]) - max(attainment(one[other]) for other in POLICIES[:-1]) for one in of.values()]
    theirs = [attainment(one["tridentserve"]) / max(1e-9, attainment(one["trident-b6"])) for one in of.values()]
    hard = [
        attainment(one["tilework"]) - max(attainment(one[other]) for other in BASELINES)
        for one in of.values()
        if max(attainment(one[other]) for other in BASELINES) <= NEAR
    ]
    latencies = {name: [_ratio(one, read) for one in of.values()] for name, read in _LATENCIES.items()}
    return RemadeFigure(
        tables=(
            _table("On time, %", of, lambda runs: percent(attainment(runs))),
            *(_table(f"{name}, s, of what was served", of, _seconds(read)) for name, read in _LATENCIES.items()),
            _table("Not served (failed for memory, or refused), %", of, _unserved),
        ),
        checks=(
            Check(what="tridentserve over B6, on time; the paper has 1.3 to 2.5", measured=range_of(theirs), low=1.3),
            Check(what="tilework over the best of all others, on time, least", measured=least(ours), low=0.0),
            *(
                [Check(what="the same where B1 to B6 keep 90% at most, mean", measured=range_of(hard), low=0.03)]
                if hard
                else []
            ),
            *(
                Check(what=f"tilework's {name} over the best of the others, most", measured=most(found), high=1.0)
                for name, found in latencies.items()
            ),
        ),
        png=grouped_bars(
            tuple(_panel(f"{pipeline}, on time", pipeline, of) for pipeline in PIPELINES),
            POLICIES,
            "TridentServe, figure 10, simulated",
        ),
    )


def figure_14(cached: CachedRuns) -> RemadeFigure:
    """Ablations on FLUX and HunyuanVideo: latency and requests on time without one of its parts."""
    of = _on_roomless(cached, ABLATIONS)
    told = (
        ("wo-switch", "dynamic", "flux", 0.331),
        ("wo-switch", "dynamic", "hunyuanvideo", 0.176),
        ("wo-switch", "medium", "flux", 0.117),
        ("wo-switch", "medium", "hunyuanvideo", 0.062),
        ("wo-stageaware", "medium", "flux", 0.223),
        ("wo-stageaware", "medium", "hunyuanvideo", 0.253),
    )
    checks = []
    for name, load, pipeline, share in told:
        one = of[pipeline, load, rates_of(pipeline, load)[-1]]
        saved = 1 - mean_of(one["tridentserve"], mean_s) / mean_of(one[f"tridentserve-{name}"], mean_s)
        what = f"{pipeline}, {load}: mean latency saved against {name}; the paper has {share:.3f}"
        checks.append(Check(what=what, measured=range_of([saved]), low=share - 0.1, high=share + 0.1))
    return RemadeFigure(
        tables=(
            _table("On time, %", of, lambda runs: percent(attainment(runs)), ABLATIONS),
            *(
                _table(f"{name}, s, of what was served", of, _seconds(read), ABLATIONS)
                for name, read in _LATENCIES.items()
            ),
        ),
        checks=tuple(checks),
        png=grouped_bars(
            tuple(_panel(f"{pipeline}, on time", pipeline, of, ABLATIONS) for pipeline in ROOMLESS),
            ABLATIONS,
            "TridentServe, figure 14, simulated",
        ),
    )


def readings(cached: CachedRuns) -> RemadeFigure:
    """The literal readings of the paper's text against what `tridentserve` does in their place, on the same loads."""
    names = ("tridentserve", *READINGS)
    of = _on_roomless(cached, names)
    ahead = [attainment(one[name]) - attainment(one["tridentserve"]) for one in of.values() for name in names[1:]]
    shown = {key: {_label(name): runs for name, runs in one.items()} for key, one in of.items()}
    labels = tuple(map(_label, names))
    return RemadeFigure(
        tables=(
            _table("On time, %", of, lambda runs: percent(attainment(runs)), names),
            *(_table(f"{name}, s, of what was served", of, _seconds(read), names) for name, read in _LATENCIES.items()),
        ),
        checks=(Check(what="a literal reading over ours, on time, most", measured=most(ahead), high=0.0),),
        png=grouped_bars(
            tuple(_panel(f"{pipeline}, on time", pipeline, shown, labels) for pipeline in ROOMLESS),
            labels,
            "TridentServe, literal readings, simulated",
        ),
    )


def batches(cached: CachedRuns) -> RemadeFigure:
    """Appendix E.1: `tridentserve` with and without batches, at the higher rates."""
    names = (ONE_BY_ONE, "tridentserve")
    cells = {
        (pipeline, load, rates_of(pipeline, load)[-1]): load_cell(cached, pipeline, load, rates_of(pipeline, load)[-1])
        for pipeline in BATCHING
        for load in cached.points(LOADS)
    }
    runs = cached.runs(cells.values(), names)
    of = {key: {policy: runs[cell.name, policy] for policy in names} for key, cell in cells.items()}
    ahead = [attainment(one["tridentserve"]) - attainment(one[ONE_BY_ONE]) for one in of.values()]
    saved = [1 - mean_of(one["tridentserve"], mean_s) / mean_of(one[ONE_BY_ONE], mean_s) for one in of.values()]
    return RemadeFigure(
        tables=(
            _table("On time, %", of, lambda runs: percent(attainment(runs)), names),
            *(_table(f"{name}, s, of what was served", of, _seconds(read), names) for name, read in _LATENCIES.items()),
        ),
        checks=(
            Check(what="with batches over without, on time, least", measured=least(ahead), low=0.0),
            Check(what="mean latency saved by batches, least", measured=least(saved), low=0.0),
        ),
        png=grouped_bars(
            tuple(_panel(f"{pipeline}, on time", pipeline, of, names) for pipeline in BATCHING),
            names,
            "TridentServe with batches (appendix E.1), simulated",
        ),
    )


def _label(reading: str) -> str:
    return reading.removeprefix("tridentserve-")


def _on_roomless(cached: CachedRuns, policies: Sequence[str]) -> dict[Any, dict[str, Sequence[Figures]]]:
    """Return runs at the higher rates, steady and dynamic, by pipeline, load and rate."""
    cells = {
        (pipeline, load, rates_of(pipeline, load)[-1]): load_cell(cached, pipeline, load, rates_of(pipeline, load)[-1])
        for pipeline in ROOMLESS
        for load in ("medium", "dynamic")
    }
    runs = cached.runs(cells.values(), policies)
    return {key: {policy: runs[cell.name, policy] for policy in policies} for key, cell in cells.items()}


def figure_15(cached: CachedRuns) -> RemadeFigure:
    """Other deadlines on the dynamic load: times 2.5 latencies as in the paper."""
    policies = ("trident-b6", "tridentserve", "tilework")
    scales = cached.points(SCALES)
    tables = []
    panels = []
    leads = []
    for pipeline in ROOMLESS:
        rate = rates_of(pipeline, "dynamic")[-1]
        cells = [load_cell(cached, pipeline, "dynamic", rate, scale / 2.5) for scale in scales]
        runs = cached.runs(cells, policies)
        shares = {one: [attainment(runs[cell.name, one]) for cell in cells] for one in policies}
        leads += [theirs - other for theirs, other in zip(shares["tridentserve"], shares["trident-b6"], strict=True)]
        title = f"{pipeline}, dynamic, {rate:g} per s"
        tables.append(share_table(f"On time, %, {title}, by deadline over the best latency", scales, shares))
        panels.append(share_curves(title, "deadline / best latency", scales, shares))
    return RemadeFigure(
        tables=tuple(tables),
        checks=(Check(what="tridentserve over B6 at each deadline, least", measured=least(leads), low=0.0),),
        png=panels_png(panels, policies, "TridentServe, figure 15, simulated"),
    )


def load_cell(
    cached: CachedRuns, pipeline: str, load: str, rate: float, scale: float = 1.0, minutes: int | None = None
) -> Cell:
    """Return a load of a pipeline, at this rate per second, for as long as `MINUTES` say; deadlines times `scale`."""
    workload, _ = PIPELINES[pipeline]
    scaled = "" if scale == 1.0 else f",scale={scale:g}"
    return cached.cell(f"{workload},load={load},rate={rate:g},minutes={minutes or MINUTES[pipeline]}{scaled}")


@cache
def document_of(table: str) -> Mapping[str, Any]:
    """Return a shipped cost table with what it quotes of the paper."""
    path = shipped_path(table)
    assert path is not None
    document: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
    return document


def rates_of(pipeline: str, load: str) -> tuple[float, ...]:
    """Return the published rate per second, and one at which the best static baseline keeps about `NEAR`, if there is
    one.
    """
    document = document_of(PIPELINES[pipeline][1])
    published = document["published_rates"].get(load, document["published_rates"]["medium"])
    suggested = document["suggested_rates"].get(load, [])
    near = sorted(suggested, key=lambda one: abs(one["best_static_attainment"] - NEAR))[:1]
    return (float(published), *(float(one["rate_per_s"]) for one in near))


def mean_s(figures: Figures) -> float:
    """Return the mean latency of what was served; that of a size of which a part was not is unknown, and left out."""
    served = [one for one in figures.by_size.values() if isfinite(one.mean_s)]
    return sum(one.mean_s * one.num_requests for one in served) / max(1, sum(one.num_requests for one in served))


def _p95_s(figures: Figures) -> float:
    """Return the latency that 95% of what was served does not exceed."""
    served = [one for one in figures.quantiles_s if isfinite(one)]
    return served[min(len(served) - 1, int(SLOWEST * len(served)))] if served else inf


_LATENCIES = {"mean latency": mean_s, "P95 latency": _p95_s}


def _ratio(one: Mapping[str, Sequence[Figures]], read: Any) -> float:
    """Return Tilework's latency over the least of the policies that serve as much."""
    others = [mean_of(runs, read) for policy, runs in one.items() if policy != "tilework" and not _lost(runs)]
    return mean_of(one["tilework"], read) / min(others) if others else 0.0


def _lost(runs: Sequence[Figures]) -> float:
    return fmean(one.num_unserved / one.num_requests for one in runs)


def _unserved(runs: Sequence[Figures]) -> str:
    return percent(_lost(runs))


def _seconds(read: Any) -> Any:
    return lambda runs: f"{mean_of(runs, read):.1f}"


def _table(title: str, of: Mapping[Any, Any], text: Any, policies: Sequence[str] = POLICIES) -> Table:
    rows = tuple(
        (f"{pipeline}, {load}, {rate:g}/s", *(text(one[policy]) for policy in policies))
        for (pipeline, load, rate), one in of.items()
    )
    return Table(title=title, columns=("pipeline, load, rate", *policies), rows=rows)


def _panel(title: str, pipeline: str, of: Mapping[Any, Any], policies: Sequence[str] = POLICIES) -> BarPanel:
    shown = {key: one for key, one in of.items() if key[0] == pipeline}
    return BarPanel(
        title=title,
        y_label="on time",
        groups=tuple(f"{load}\n{rate:g}/s" for _, load, rate in shown),
        bars={policy: tuple(attainment(one[policy]) for one in shown.values()) for policy in policies},
        is_share=True,
    )


FIGURES = {
    "tridentserve-10": figure_10,
    "tridentserve-14": figure_14,
    "tridentserve-15": figure_15,
    "tridentserve-readings": readings,
    "tridentserve-batches": batches,
}
