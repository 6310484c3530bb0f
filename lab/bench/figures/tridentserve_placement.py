"""TridentServe's figures 11 and 13, and its tables 5 to 7: where stages run, and when that changes.

What fits where was fitted to what the paper says of memory, and the mixes to its table 6 (lab/docs/reproduction.md).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import fmean
from typing import get_args

from suite.case import Check, Table
from suite.pictures import grouped_bars, panels_png
from suite.stats import exact

from figures.cached_runs import CachedRuns, RemadeFigure, most, percent, range_of, traced
from figures.tridentserve import BY_REQUESTS, PIPELINES, ROOMLESS, document_of, load_cell, rates_of
from tilework.core.actions import Action, Place
from tilework.core.events import Event
from tilework.core.request import Request, Status
from tilework.core.time import s_from_ns
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.policy.placement.demand import By, grouped, mix_of
from tilework.policy.placement.feasible import virtual_replica
from tilework.policy.placement.placement import Nodes
from tilework.policy.placement.profile import ClassProfile, class_profile
from tilework.policy.placement.roles import PlacementType, Role, VirtualReplica, role_of
from tilework.report.panels import BarPanel, Curve, CurvePanel
from tilework.sim.trace import Trace, TraceEnding
from tilework.sim.workloads.cells import Cell
from tilework.sim.workloads.requests import to_requests
from tilework_lab.compare.figures import Figures, figures_of
from tilework_lab.policies.trident_baselines.layout import Layout
from tilework_lab.policies.trident_baselines.profiles import SeenRequests
from tilework_lab.policies.variants import DOWNTIME_S

DIVISIONS = ("tridentserve", BY_REQUESTS)
TOLD_V0 = {"flux": (0.84, 0.80), "hunyuanvideo": (0.87, 0.84)}
"""§8.3: the share of requests that may run on V0, and of those that do."""
WHOLE_MINUTES = 30
SURGE, LARGE = (12, 18), (20, 26)
"""Minutes of many light and of many heavy requests, of the thirty of the dynamic load."""
BINS = 15
WATCHED_SIZE = "1024x1024"
FIRST_S = 60.0
"""Changes after the first placement come later."""
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Result of a run for its requests and devices. Times are seconds from the first arrival.

    Attributes:
        eligible: the share of requests whose stages all fit on one device together, at some degree.
        used: the share of served requests by the virtual replica that they ran on.
        placements: from when on how many devices each type has; all hold all stages at first.
        ends_s: when requests were done, ascending.
        latencies_s: of those of `WATCHED_SIZE` that were done, the arrival and the latency.
    """

    figures: Figures
    eligible: float
    used: Mapping[VirtualReplica, float]
    placements: tuple[tuple[float, Mapping[str, int]], ...]
    ends_s: tuple[float, ...]
    latencies_s: tuple[tuple[float, float], ...]

    def devices(self, kind: str, from_s: float, to_s: float) -> float:
        """Return the average number of devices of a type over a time."""
        times = [from_s, *(at_s for at_s, _ in self.placements if from_s < at_s < to_s), to_s]
        starts = [at_s for at_s, _ in self.placements]
        spans = pairwise(times)
        held = [(end - begin, self.placements[bisect_right(starts, begin) - 1][1].get(kind, 0)) for begin, end in spans]
        return sum(span * num for span, num in held) / (to_s - from_s)

    def per_minute(self, from_s: float, to_s: float) -> float:
        """Return the number of requests done per minute of a time."""
        num = bisect_left(self.ends_s, to_s) - bisect_left(self.ends_s, from_s)
        return 60 * num / (to_s - from_s)


@cache
def course_of(cell: Cell, policy: str) -> Course:
    """Return one run with seed 0."""
    placements: list[tuple[float, Mapping[str, int]]] = [(0.0, {PlacementType.EDC.value: cell.num_devices})]

    def note(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        for action in actions:
            if isinstance(action, Place):
                found = Counter[str]()
                for group, kind in action.placement.groups:
                    found[kind] += len(group)
                placements.append((s_from_ns(now_ns), found))

    trace = traced(cell, policy, 0, note)
    costs = TableCosts(cell.costs())
    done = [one for one in trace.endings if one.status is Status.DONE]
    used = _used(trace, costs)
    return Course(
        figures=figures_of(trace),
        eligible=fmean(_is_eligible(one.request, costs) for one in trace.endings),
        used={one: used[one] / max(1, sum(used.values())) for one in VirtualReplica},
        placements=tuple(placements),
        ends_s=tuple(sorted(s_from_ns(one.finish_ns) for one in done)),
        latencies_s=tuple(
            (s_from_ns(one.request.arrival_ns), s_from_ns(one.latency_ns))
            for one in done
            if str(one.request.shape) == WATCHED_SIZE
        ),
    )


def _is_eligible(request: Request, costs: TableCosts) -> bool:
    return virtual_replica(_profile(request, costs).fits, costs.table.devices_per_node) is VirtualReplica.V0


def _profile(request: Request, costs: TableCosts) -> ClassProfile:
    return class_profile(request, costs, costs.table.memory_bytes)


def _used(trace: Trace, costs: TableCosts) -> Counter[VirtualReplica]:
    """Count the requests that ran on each virtual replica: by which stages had other devices than the steps."""
    held: dict[tuple[int, Role], set[int]] = {}
    of: dict[int, TraceEnding] = {one.job_id: one for one in trace.endings if one.job_id is not None}
    for run in trace.runs:
        for job_id in run.work.job_ids:
            role = role_of(costs.graph(of[job_id].request.pipeline), run.work.stage)
            if role is not None:
                held.setdefault((job_id, role), set()).update(run.devices)
    found = Counter[VirtualReplica]()
    for job_id, one in of.items():
        if one.status is Status.DONE:
            beside = {role for role in (Role.E, Role.C) if not held[job_id, role] <= held[job_id, Role.D]}
            found[next(one for one in VirtualReplica if {Role(kind.value) for kind in one.auxiliaries} == beside)] += 1
    return found


def figure_11(cached: CachedRuns) -> RemadeFigure:
    """FLUX, dynamic load: the devices of each placement type, and requests done per minute against B5 and B6."""
    rate = rates_of("flux", "dynamic")[-1]
    cell = load_cell(cached, "flux", "dynamic", rate, minutes=WHOLE_MINUTES)
    names = ("tridentserve", "trident-b5", "trident-b6")
    courses = {name: _noted(cached, cell, name) for name in names}
    ours = courses["tridentserve"]
    minute_s = len(cell.requests(0)) / rate / WHOLE_MINUTES
    edges_s = [minute_s * WHOLE_MINUTES * index / BINS for index in range(BINS + 1)]
    spans = list(pairwise(edges_s))
    types = [one.value for one in PlacementType if any(one.value in counts for _, counts in ours.placements)]
    ends = tuple(float(WHOLE_MINUTES * (index + 1) // BINS) for index in range(BINS))
    devices = {kind: [ours.devices(kind, *span) for span in spans] for kind in types}
    rates = {name: [one.per_minute(*span) for span in spans] for name, one in courses.items()}
    later_s = (SURGE[0] * minute_s, edges_s[-1])
    before, surge, large = ([minute_s * one for one in span] for span in ((6, 12), SURGE, LARGE))
    return RemadeFigure(
        tables=(
            _course_table("Devices by placement type, mean of two minutes up to minute", ends, devices),
            _course_table("Requests done per minute, up to minute", ends, rates),
            Table(
                title="The placements",
                columns=("minute", *types),
                rows=tuple(
                    (f"{at_s / minute_s:.1f}", *(str(counts.get(kind, 0)) for kind in types))
                    for at_s, counts in ours.placements
                ),
            ),
            _shares_of_v2(cached),
        ),
        checks=(
            Check(
                what="more EDC in the light surge (minutes 12 to 18) than before, devices",
                measured=exact(ours.devices("EDC", *surge) - ours.devices("EDC", *before)),
                low=1.0,
            ),
            Check(
                what="more ED with many heavy requests (20 to 26) than in the surge, devices",
                measured=exact(ours.devices("ED", *large) - ours.devices("ED", *surge)),
                low=1.0,
            ),
            *(
                Check(
                    what=f"requests done from minute 12 on, over {name}",
                    measured=exact(ours.per_minute(*later_s) / max(1e-9, courses[name].per_minute(*later_s))),
                    low=1.0,
                )
                for name in names[1:]
            ),
        ),
        png=panels_png(
            (
                _course_panel("devices by placement type", "devices", ends, devices),
                _course_panel(f"requests done, {rate:g} per s", "per minute", ends, rates),
            ),
            (*types, *names),
            "TridentServe, figure 11, simulated: FLUX, dynamic",
        ),
    )


def _shares_of_v2(cached: CachedRuns) -> Table:
    """Return what each mix asks of V2: by the division of `tridentserve`, and by that of the paper."""
    rows = []
    for load in document_of(PIPELINES["flux"][1])["mixes"]:
        cell = load_cell(cached, "flux", load, rates_of("flux", load)[0])
        costs = TableCosts(cell.costs())
        demands = [_profile(one, costs).demand(1) for one in to_requests(cell.requests(0))]
        groups = grouped(demands, costs.table.devices_per_node)
        found = (mix_of(groups, by).get(VirtualReplica.V2, 0.0) for by in get_args(By))
        rows.append((load, *map(percent, found)))
    columns = ("mix", *(f"by {by.replace('_', ' ')}" for by in get_args(By)))
    return Table(title="Share of FLUX that cannot be on V0, %", columns=columns, rows=tuple(rows))


def figure_13(cached: CachedRuns) -> RemadeFigure:
    """Dynamic load: the virtual replicas that requests run on; and requests beside a change of the placement."""
    courses = {
        (pipeline, rate, name): _noted(cached, load_cell(cached, pipeline, "dynamic", rate), name)
        for pipeline in ROOMLESS
        for rate in rates_of(pipeline, "dynamic")
        for name in DIVISIONS
    }
    rows = [
        (
            f"{pipeline}, {rate:g}/s, {name}",
            percent(one.eligible),
            *(percent(one.used[kind]) for kind in VirtualReplica),
            percent(_on_time(one)),
        )
        for (pipeline, rate, name), one in courses.items()
    ]
    checks = []
    for pipeline, (eligible, used) in TOLD_V0.items():
        own = {name: [one for key, one in courses.items() if key[::2] == (pipeline, name)] for name in DIVISIONS}
        told = {"may run on V0": (eligible, [one.eligible for one in own["tridentserve"]])}
        told |= {f"{name} on V0": (used, [one.used[VirtualReplica.V0] for one in own[name]]) for name in DIVISIONS}
        checks += [
            Check(
                what=f"{pipeline}: {what}; the paper has {share}",
                measured=range_of(found),
                low=share - TOLERANCE,
                high=share + TOLERANCE,
            )
            for what, (share, found) in told.items()
        ]
    return RemadeFigure(
        tables=(
            Table(
                title="Share of requests, %, by virtual replica, and on time",
                columns=("pipeline, rate, policy", "may run on V0", *map(str, VirtualReplica), "on time"),
                rows=tuple(rows),
            ),
            _beside_a_change(cached),
        ),
        checks=tuple(checks),
        png=grouped_bars(
            [
                BarPanel(
                    title=f"{pipeline}, dynamic load",
                    y_label="share of requests",
                    groups=tuple(
                        f"{rate:g}/s, devices\nby {'requests' if name == BY_REQUESTS else 'device time'}"
                        for one, rate, name in courses
                        if one == pipeline
                    ),
                    bars={
                        str(kind): tuple(course.used[kind] for (one, *_), course in courses.items() if one == pipeline)
                        for kind in VirtualReplica
                    },
                    is_share=True,
                )
                for pipeline in ROOMLESS
            ],
            tuple(map(str, VirtualReplica)),
            "TridentServe, figure 13, simulated",
        ),
    )


def _beside_a_change(cached: CachedRuns) -> Table:
    """Return the 1024 px requests of FLUX that come within the downtime after a change of placement, and all others."""
    rate = rates_of("flux", "dynamic")[-1]
    cell = load_cell(cached, "flux", "dynamic", rate, minutes=WHOLE_MINUTES)
    rows = []
    for name in ("tridentserve", "tridentserve-downtime"):
        one = _noted(cached, cell, name)
        changes_s = [at_s for at_s, _ in one.placements if at_s > FIRST_S]
        near, others = list[float](), list[float]()
        for came_s, took_s in one.latencies_s:
            is_near = any(0 <= came_s - at_s < DOWNTIME_S for at_s in changes_s)
            (near if is_near else others).append(took_s)
        texts = map(_mean_text, (near, others))
        rows.append((name, str(len(changes_s)), str(len(near)), *texts, percent(_on_time(one))))
    columns = ("policy", "changes", "came within 45 s of one", "their mean latency, s", "of all others, s")
    title = "FLUX, half an hour: requests of 1024 px, at changes of the placement; and all on time, %"
    return Table(title=title, columns=(*columns, "on time, %"), rows=tuple(rows))


def tables(cached: CachedRuns) -> RemadeFigure:
    """Tables 5 to 7: rates, steps and mixes; the devices of B2's buckets and of B5's pools, as ours would have them."""
    mixes = []
    buckets = []
    pools = []
    off = dict[str, list[float]]()
    for pipeline, (_, table) in PIPELINES.items():
        document = document_of(table)
        told = document["static_baselines"]
        for load, shares in document["mixes"].items():
            cell = load_cell(cached, pipeline, load, rates_of(pipeline, load)[0])
            own, per_role = _divisions(cell)
            rate = document["published_rates"][load]
            steps = document["steps"]
            mixes.append((f"{pipeline}, {load}", f"{rate:g}", str(steps), _mix_text(shares)))
            theirs = told["bucket_gpus_degree_8_4_2_1"][load]
            buckets.append((f"{pipeline}, {load}", *_pairs(theirs, [own.get(degree, 0) for degree in (8, 4, 2, 1)])))
            off.setdefault("buckets (table 6)", []).append(_moved(theirs, [own.get(one, 0) for one in (8, 4, 2, 1)]))
            theirs = told["stage_gpus_encode_diffuse_decode"]
            pools.append((f"{pipeline}, {load}", *_pairs(theirs, [per_role[role] for role in Role])))
            off.setdefault("pools (table 7)", []).append(_moved(theirs, [per_role[role] for role in Role]))
    names = tuple(row[0] for row in pools)
    return RemadeFigure(
        tables=(
            Table(
                title="Table 5: rate and steps of the paper, our mixes",
                columns=("pipeline, load", "per s", "steps", "share of requests, %"),
                rows=tuple(mixes),
            ),
            Table(
                title="Table 6: devices by degree, the paper / ours",
                columns=("pipeline, load", "8", "4", "2", "1"),
                rows=tuple(buckets),
            ),
            Table(
                title="Table 7: devices by stage, the paper / ours",
                columns=("pipeline, load", "encode", "diffuse", "decode"),
                rows=tuple(pools),
            ),
        ),
        checks=tuple(
            Check(what=f"{what}: share of devices that are elsewhere, most", measured=most(found), high=TOLERANCE)
            for what, found in off.items()
        ),
        png=grouped_bars(
            [
                BarPanel(
                    title="devices that are elsewhere than in the paper",
                    y_label="of 128",
                    groups=tuple(
                        f"{load}\n{pipeline if load == 'medium' else ''}"
                        for pipeline, _, load in (name.partition(", ") for name in names)
                    ),
                    bars={what: tuple(128 * one for one in found) for what, found in off.items()},
                )
            ],
            tuple(off),
            "TridentServe, tables 6 and 7",
        ),
    )


def _divisions(cell: Cell) -> tuple[dict[int, int], dict[Role, int]]:
    """Count the devices that B2 gives each degree, and B5 each role, when it has seen all requests of a cell."""
    table = cell.costs()
    costs = TableCosts(table)
    seen = SeenRequests()
    nodes = _nodes(table, cell.num_devices)
    for request in to_requests(cell.requests(0)):
        seen.note(request, costs)
    by_degree, by_role = Counter[int](), Counter[Role]()
    for line in Layout(grouping="buckets").lines(nodes, seen):
        by_degree[line.degree or 1] += sum(map(len, line.groups))
    for line in Layout(grouping="per_request", is_pooled=True).lines(nodes, seen):
        by_role[line.leader] += sum(map(len, line.groups))
    return dict(by_degree), {role: by_role[role] for role in Role}


def _nodes(table: CostTable, num_devices: int) -> Nodes:
    wide = table.devices_per_node
    return {first // wide: range(first, first + wide) for first in range(0, num_devices, wide)}


def _pairs(theirs: Sequence[int], own: Sequence[int]) -> list[str]:
    return [f"{one} / {other}" for one, other in zip(theirs, own, strict=True)]


def _moved(theirs: Sequence[int], own: Sequence[int]) -> float:
    """Return the share of devices that are elsewhere. The paper's rows of table 7 do not all sum to the devices."""
    return sum(max(0, other - one) for one, other in zip(theirs, own, strict=True)) / sum(own)


def _mix_text(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{size} {100 * share:.1f}" for size, share in shares.items())


def _noted(cached: CachedRuns, cell: Cell, name: str) -> Course:
    cached.note(f"{cell.name}, {name}")
    return course_of(cell, name)


def _on_time(one: Course) -> float:
    return one.figures.attainment or 0.0


def _mean_text(values: Sequence[float]) -> str:
    return f"{fmean(values):.1f}" if values else ""


def _course_table(title: str, ends: Sequence[float], rows: Mapping[str, Sequence[float]]) -> Table:
    found = tuple((name, *(f"{value:.0f}" for value in values)) for name, values in rows.items())
    return Table(title=title, columns=("", *(f"{end:g}" for end in ends)), rows=found)


def _course_panel(title: str, y_label: str, ends: tuple[float, ...], rows: Mapping[str, Sequence[float]]) -> CurvePanel:
    curves = {name: Curve(xs=ends, ys=tuple(values)) for name, values in rows.items()}
    return CurvePanel(title=title, x_label="minute", y_label=y_label, curves=curves, is_share=False)


FIGURES = {
    "tridentserve-11": figure_11,
    "tridentserve-13": figure_13,
    "tridentserve-tables": tables,
}
