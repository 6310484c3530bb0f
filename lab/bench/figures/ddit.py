"""DDiT's figures: latency without deadlines, Open-Sora on H800 by the table that ships."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import fmean

from suite.case import Check, Table
from suite.pictures import grouped_bars
from suite.stages import DECODE, DIFFUSE

from figures.cached_runs import CachedRuns, RemadeFigure, Runs, least, mean_of, most, percent, range_of, traced
from figures.ddit_allocation import RequestClass, batch_s, optimal_allocation
from tilework.core.request import Shape
from tilework.core.time import s_from_ns
from tilework.cost.demand import Speed
from tilework.cost.table import CostTable
from tilework.policy.published.ddit import DDiT
from tilework.policy.registry import register
from tilework.policy.toolkit.elastic_groups import DevicePool, Placement
from tilework.policy.toolkit.tasks import Task
from tilework.report.panels import BarPanel
from tilework.sim.workloads.cells import Cell
from tilework.sim.workloads.requests import to_requests
from tilework_lab.compare.figures import figures_of
from tilework_lab.policies.rssp import ResolutionDegrees
from tilework_lab.workloads.ddit import SHAPES

BASELINES = ("fixed-sp1", "fixed-sp2", "fixed-sp4", "spci", "dpci", "dp")
POLICIES = ("ddit", *BASELINES, "tilework")  # The last one for comparison; the paper's claims are about the others.
LOADS = ("0.25", "0.5", "0.75", "1", "burst")
METRICS = {"p99": "p99_s", "mean": "mean_s"}
REQUESTS = 100
MANY_GPUS, MANY_REQUESTS = 64, 200
OUR_MIXES = ("1:1:1", "2:1:1", "1:2:1", "1:1:2", "1:1:4")  # Figure 10 has five of the workload's ten.
READINGS = {"held": "until its own last work ends", "all": "until the last work of all ends"}
MANY_BASELINES = ("fixed-sp4", "spci", "dpci", "dp")
MANY_DRAWN = ("ddit", *MANY_BASELINES)
MANY_POLICIES = (*MANY_DRAWN, "tilework")

# Percent by which DDiT lowers a metric, as §6.2 says: loads, compared policy, metric.
TOLD: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("0.25",), "fixed-sp4", "p99", "12.9"),
    (("0.5",), "fixed-sp2", "p99", "10.7"),
    (("0.5",), "fixed-sp4", "p99", "up to 36.6"),
    (("0.5",), "fixed-sp4", "mean", "up to 44.4"),
    (("0.75", "1"), "fixed-sp2", "p99", "up to 19.2"),
    (("0.75", "1"), "fixed-sp2", "mean", "up to 29.5"),
    (("burst",), "fixed-sp1", "p99", "up to 20.7"),
    (("burst",), "fixed-sp1", "mean", "up to 21.7"),
    (LOADS, "spci", "p99", "27.6 to 48.6"),
    (LOADS, "dpci", "p99", "14.5 to 75.1"),
    (("0.25", "0.5"), "dp", "p99", "4.9"),
    (("1", "burst"), "dp", "p99", "22 to 24"),
)
# Figure 13: load, metric, and by how much decoupling lowers it at most, in §6.3; at 0.5 the mean stays "similar".
STATIC_DOP = 2
TOLD_OF_DECOUPLING = (("0.5", "p99", 0.20), ("0.5", "mean", 0.0), ("burst", "p99", 0.261), ("burst", "mean", 0.232))
BEST_STATIC = {"0.25": "fixed-sp4", "0.5": "fixed-sp2", "0.75": "fixed-sp2", "1": "fixed-sp2", "burst": "fixed-sp1"}


class Unpromoted(DDiT):
    """A request keeps the devices that it began with."""

    def _promote(self, pool: DevicePool, task: Task, placed: Placement | None) -> None:
        pass


register("ddit-unpromoted", Unpromoted)


class Decoupled(ResolutionDegrees):
    """Static DoP 2, but only one device of the group stays for the decode."""

    def _degree(self, speeds: Sequence[Speed]) -> int:
        return max(speed.degree for speed in speeds if speed.degree <= STATIC_DOP)


register("fixed-sp2-decoupled", Decoupled)


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Runs on each mix at each load."""

    cells: Mapping[tuple[str, str], Cell]
    runs: Runs

    def value(self, mix: str, load: str, name: str, metric: str) -> float:
        return mean_of(self.runs[self.cells[mix, load].name, name], lambda one: float(getattr(one, METRICS[metric])))

    def mixes(self) -> list[str]:
        return list(dict.fromkeys(mix for mix, _ in self.cells))

    def loads(self) -> list[str]:
        return list(dict.fromkeys(load for _, load in self.cells))

    def cuts(self, loads: Sequence[str], name: str, rival: str, metric: str) -> list[float]:
        """Return by how much `name` is below `rival`, as a share of the latter, in each mix at each of these loads."""
        return [self.cut(mix, load, name, rival, metric) for mix, load in self.cells if load in loads]

    def cut(self, mix: str, load: str, name: str, rival: str, metric: str) -> float:
        return 1 - self.value(mix, load, name, metric) / self.value(mix, load, rival, metric)

    def normalised(self, load: str, name: str, metric: str, names: Sequence[str]) -> list[float]:
        """Return the ratio in each mix over the worst of `names` there."""
        return [
            self.value(mix, load, name, metric) / max(self.value(mix, load, one, metric) for one in names)
            for mix in self.mixes()
        ]


def _swept(cached: CachedRuns, names: Sequence[str], loads: Sequence[str] = LOADS) -> _Sweep:
    cells = {
        (mix, load): _cell(cached, mix, load, REQUESTS)
        for mix in cached.points(OUR_MIXES)
        for load in cached.points(loads)
    }
    return _Sweep(cells, cached.runs(cells.values(), names))


def _cell(cached: CachedRuns, mix: str, load: str, num_requests: int, num_devices: int | None = None) -> Cell:
    when = "arrivals=at_once" if load == "burst" else f"rate={load}"
    count = f",num={num_requests}" if cached.num_requests is None else ""  # Else the cached says how many.
    return cached.cell(f"ddit,{when},mix={mix}{count}", num_devices)


def figure_10(cached: CachedRuns) -> RemadeFigure:
    """One node: p99 and mean by arrival rate, for each of five mixes."""
    sweep = _swept(cached, POLICIES)
    beaten = [
        (mix, load, metric)
        for mix, load in sweep.cells
        for metric in METRICS
        if any(sweep.value(mix, load, one, metric) < sweep.value(mix, load, "ddit", metric) for one in BASELINES)
    ]
    checks = [
        Check(
            what=f"subplots (mix and load) of {len(sweep.cells)} in which a baseline has a better {metric}",
            measured=most([float(sum(one[2] == metric for one in beaten))]),
            high=0,
        )
        for metric in METRICS
    ]
    for load in sweep.loads():
        rivals = [name for name in BASELINES[:3] if name != BEST_STATIC[load]]
        checks.append(
            Check(
                what=f"load {load}: p99 of another static degree over that of {BEST_STATIC[load]}, least",
                measured=least(
                    [
                        min(sweep.value(mix, load, one, "p99") for one in rivals)
                        / sweep.value(mix, load, BEST_STATIC[load], "p99")
                        for mix in sweep.mixes()
                    ]
                ),
                low=1.0,
            )
        )
    return RemadeFigure(
        tables=(
            *(_latency_table(sweep, metric) for metric in METRICS),
            _told_table(sweep),
            _beaten_table(sweep, beaten),
        ),
        checks=tuple(checks),
        png=_normalised_bars(
            sweep, POLICIES, "DDiT, figure 10, simulated: means over the mixes, lines from least to most"
        ),
    )


def figure_11(cached: CachedRuns) -> RemadeFigure:
    """Eight nodes, all requests at once: p99 and mean."""
    found = _on_many(cached)
    checks = []
    for metric, goal in (("p99", 0.304), ("mean", 0.30)):
        cuts = [
            1 - figures["ddit"][metric] / figures[one][metric] for figures in found.values() for one in MANY_BASELINES
        ]
        checks.append(Check(what=f"{metric}: least reduction over any baseline", measured=least(cuts), low=goal))
    order = ("spci", "dpci", "dp")
    for worse, better in pairwise(order):
        ratios = [figures[worse]["p99"] / figures[better]["p99"] for figures in found.values()]
        checks.append(Check(what=f"p99 of {worse} over that of {better}", measured=range_of(ratios), low=1.0))
    tables = tuple(_many_table(f"{metric}, s", metric, found) for metric in METRICS)
    panels = [_many_panel(f"{metric}, s", metric, found) for metric in METRICS]
    return RemadeFigure(
        tables=tables,
        checks=tuple(checks),
        png=grouped_bars(panels, MANY_DRAWN, "DDiT, figure 11, simulated: 64 devices, all requests at once"),
    )


def figure_12(cached: CachedRuns) -> RemadeFigure:
    """The same: device seconds from the burst on, by two readings of what a device is paid for."""
    found = _on_many(cached)
    tables = []
    checks = []
    for reading, what in READINGS.items():
        ratios = {
            name: [figures[name][reading] / figures["optimum"]["held"] for figures in found.values()]
            for name in MANY_POLICIES
        }
        best = min(MANY_BASELINES, key=lambda name: fmean(ratios[name]))
        rows = [
            (name, *(f"{figures[name][reading]:.0f}" for figures in found.values()), f"{fmean(ratios[name]):.2f}")
            for name in MANY_POLICIES
        ]
        rows.append(("optimum", *(f"{figures['optimum']['held']:.0f}" for figures in found.values()), "1.00"))
        columns = ("policy", *found, "over the optimum")
        tables.append(Table(title=f"Device seconds, each paid {what}", columns=columns, rows=tuple(rows)))
        told = (("ddit", 1.39, ratios["ddit"]), (f"the best baseline ({best})", 2.08, ratios[best]))
        checks += [
            Check(
                what=f"paid {what}: cost of {name} over the optimum; the paper has {number}",
                measured=range_of(values),
                low=number - 0.1,
                high=number + 0.1,
            )
            for name, number, values in told
        ]
        rivals = zip(*(ratios[name] for name in MANY_BASELINES), strict=True)
        over = [mine / min(others) for mine, others in zip(ratios["ddit"], rivals, strict=True)]
        checks.append(
            Check(what=f"paid {what}: cost of ddit over the cheapest baseline, most", measured=most(over), high=1.0)
        )
    return RemadeFigure(
        tables=tuple(tables),
        checks=tuple(checks),
        png=grouped_bars(
            [_many_panel(f"device seconds, each paid {what}", one, found) for one, what in READINGS.items()],
            MANY_DRAWN,
            "DDiT, figure 12, simulated: 64 devices, all requests at once",
        ),
    )


def figure_13(cached: CachedRuns) -> RemadeFigure:
    """Static DoP 2 on one node: what the decode of one device instead of two lowers, and what it can lower."""
    names = ("fixed-sp2-decoupled", "fixed-sp2")
    sweep = _swept(cached, names, ("0.5", "burst"))
    freed = {mix: _freed_share(sweep.cells[mix, "burst"]) for mix in sweep.mixes()}
    rows = [("device time of the decodes that is freed", *(percent(freed[mix]) for mix in freed))]
    checks = []
    for load, metric, told in TOLD_OF_DECOUPLING:
        cuts = sweep.cuts([load], *names, metric)
        rows.append((f"{metric} lowered, {load}", *map(percent, cuts)))
        what = f"{load}: largest reduction of the {metric} in any mix; the paper has {told}"
        checks.append(Check(what=what, measured=most(cuts), low=told - 0.05, high=told + 0.05))
    return RemadeFigure(
        tables=(Table(title="By mix, %", columns=("", *freed), rows=tuple(rows)),),
        checks=tuple(checks),
        png=_normalised_bars(
            sweep, names, "DDiT, figure 13, simulated: means over the mixes, lines from least to most"
        ),
    )


def _freed_share(cell: Cell) -> float:
    """Return the share of half the decodes' device time in all that requests of static DoP 2 hold: what decoupling can
    save.
    """
    table = cell.costs()
    held_s = 0.0
    freed_s = 0.0
    for one in to_requests(cell.requests(0)):
        decode_s = _seconds(table, DECODE, one.shape, STATIC_DOP)
        held_s += STATIC_DOP * (one.steps * _seconds(table, DIFFUSE, one.shape, STATIC_DOP) + decode_s)
        freed_s += (STATIC_DOP - 1) * decode_s
    return freed_s / held_s


def figure_14(cached: CachedRuns) -> RemadeFigure:
    """Promotion on and off, one node."""
    names = ("ddit", "ddit-unpromoted")
    sweep = _swept(cached, names)
    rows = []
    checks = []
    for metric, told in (("p99", 0.352), ("mean", 0.135)):
        for load in sweep.loads():
            cuts = sweep.cuts([load], *names, metric)
            rows.append((f"{metric}, {load}", *(percent(value) for value in (fmean(cuts), min(cuts), max(cuts)))))
        rest = [load for load in sweep.loads() if load != "burst"]
        checks.append(
            Check(
                what=f"{metric}: largest reduction by promotion in any mix, but for the burst; the paper has {told}",
                measured=most(sweep.cuts(rest, *names, metric)),
                low=told - 0.05,
                high=told + 0.05,
            )
        )
        checks.append(
            Check(
                what=f"{metric}: mean reduction in the burst: minimal",
                measured=range_of(sweep.cuts(["burst"], *names, metric)),
                low=-0.05,
                high=0.05,
            )
        )
    columns = ("metric, load", "mean of mixes", "least", "most")
    return RemadeFigure(
        tables=(Table(title="What promotion lowers, %", columns=columns, rows=tuple(rows)),),
        checks=tuple(checks),
        png=_normalised_bars(
            sweep, names, "DDiT, figure 14, simulated: means over the mixes, lines from least to most"
        ),
    )


def _latency_table(sweep: _Sweep, metric: str) -> Table:
    rows = tuple(
        (
            name,
            *(
                f"{fmean(sweep.value(mix, load, name, metric) for mix in sweep.mixes()):.2f} "
                f"({fmean(sweep.normalised(load, name, metric, POLICIES)):.2f})"
                for load in sweep.loads()
            ),
        )
        for name in POLICIES
    )
    title = f"{metric}, s, and in brackets over the worst policy: means over the mixes"
    return Table(title=title, columns=("policy", *sweep.loads()), rows=rows)


def _told_table(sweep: _Sweep) -> Table:
    rows = []
    for loads, rival, metric, told in TOLD:
        if set(loads) <= set(sweep.loads()):
            cuts = sweep.cuts(loads, "ddit", rival, metric)
            values = (percent(value) for value in (fmean(cuts), min(cuts), max(cuts)))
            rows.append((f"{', '.join(loads)} against {rival}: {metric}", told, *values))
    columns = ("load, baseline, metric", "the paper", "mean of mixes", "least", "most")
    return Table(title="What ddit lowers, %", columns=columns, rows=tuple(rows))


def _beaten_table(sweep: _Sweep, beaten: Sequence[tuple[str, str, str]]) -> Table:
    rows = []
    for mix, load, metric in beaten:
        best = min(BASELINES, key=lambda one: sweep.value(mix, load, one, metric))
        rows.append((f"{mix}, {load}: {metric}", best, percent(-sweep.cut(mix, load, "ddit", best, metric))))
    title = "Where a baseline is better than ddit"
    return Table(title=title, columns=("mix, load: metric", "the best", "ddit above it by, %"), rows=tuple(rows))


def _normalised_bars(sweep: _Sweep, names: Sequence[str], title: str) -> bytes:
    panels = []
    for metric in METRICS:
        values = {name: [sweep.normalised(load, name, metric, names) for load in sweep.loads()] for name in names}
        panels.append(
            BarPanel(
                title=f"{metric} latency over the worst policy",
                y_label=f"normalised {metric}",
                groups=tuple(load if load == "burst" else f"{load} per second" for load in sweep.loads()),
                bars={name: tuple(map(fmean, found)) for name, found in values.items()},
                marks={name: tuple((min(one), max(one)) for one in found) for name, found in values.items()},
            )
        )
    return grouped_bars(panels, names, title)


def _on_many(cached: CachedRuns) -> dict[str, dict[str, dict[str, float]]]:
    """Return p99, mean, busy and held by mix and policy. `optimum` has only what it is held for."""
    found = {}
    for mix in cached.points(OUR_MIXES):
        cached.note(f"64 devices, {mix}")
        cell = _cell(cached, mix, "burst", MANY_REQUESTS, MANY_GPUS)
        found[mix] = {name: _held(cell, name) for name in MANY_POLICIES} | {"optimum": {"held": _optimum_s(cell)}}
    return found


@cache
def _held(cell: Cell, name: str) -> dict[str, float]:
    trace = traced(cell, name, seed=0)
    last_ns: dict[int, int] = {}
    for run in trace.runs:
        last_ns |= {device_id: max(run.end_ns, last_ns.get(device_id, 0)) for device_id in run.devices}
    figures = figures_of(trace)
    return {
        "p99": figures.p99_s,
        "mean": figures.mean_s,
        "held": s_from_ns(sum(last_ns.values())),
        "all": cell.num_devices * s_from_ns(max(last_ns.values())),
    }


def _optimum_s(cell: Cell) -> float:
    """Algorithm 1 with the batch model: device seconds of the best division, the mix being known."""
    table = cell.costs()
    requests = to_requests(cell.requests(0))
    classes = [
        RequestClass(
            name=str(shape),
            amount=sum(one.shape == shape for one in requests),
            service_s={
                degree: requests[0].steps * _seconds(table, DIFFUSE, shape, degree) + _seconds(table, DECODE, shape, 1)
                for degree in (1, 2, 4, 8)
            },
        )
        for shape in SHAPES
    ]
    return optimal_allocation(
        classes, num_devices=cell.num_devices, devices_per_node=table.devices_per_node, model=batch_s
    ).cost


def _seconds(table: CostTable, stage: str, shape: Shape, degree: int) -> float:
    return next(
        row.seconds
        for row in table.rows
        if row.stage == stage and row.degree == degree and (row.height, row.width) == (shape.height, shape.width)
    )


def _many_table(title: str, metric: str, found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    rows = tuple((name, *(f"{figures[name][metric]:.1f}" for figures in found.values())) for name in MANY_POLICIES)
    return Table(title=title, columns=("policy", *found), rows=rows)


def _many_panel(title: str, metric: str, found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> BarPanel:
    bars = {name: tuple(figures[name][metric] for figures in found.values()) for name in MANY_DRAWN}
    return BarPanel(title=title, y_label=title.partition(",")[0], groups=tuple(found), bars=bars)


FIGURES = {
    "ddit-10": figure_10,
    "ddit-11": figure_11,
    "ddit-12": figure_12,
    "ddit-13": figure_13,
    "ddit-14": figure_14,
}
