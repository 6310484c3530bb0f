"""OnePiece, which has no evaluation of its own: its theorem, its limits, its claim of 16 times, and its rules against
other policies.

The two-stage workflows are made up, after the paper's examples. The clips are those of TridentServe's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random
from statistics import fmean

from suite.case import Check, Table
from suite.pictures import grouped_bars, panels_png

from figures.cached_runs import CachedRuns, RemadeFigure, attainment, least, mean_of, most, percent, range_of
from figures.tridentserve import load_cell, mean_s, rates_of
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import StageSpec, StepShare
from tilework.core.policy import Policy
from tilework.core.request import Request, Shape, Status
from tilework.core.time import ns_from_s, s_from_ns
from tilework.cost.shipped import shipped_path
from tilework.cost.table import CostTable, graphs_of
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.policy.placement.profile import pieces_by_role
from tilework.policy.placement.roles import Role
from tilework.policy.placement.utilisation import proportional
from tilework.policy.published.fixed import FixedDegree
from tilework.policy.published.onepiece.dispatch import OnePieceDispatch
from tilework.policy.published.onepiece.policy import OnePiece, RateLimit
from tilework.policy.published.onepiece.traffic import Mode
from tilework.policy.registry import register
from tilework.report.panels import BarPanel, Curve, CurvePanel
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

ANY = "onepiece-any-instance"
NO_REJECT = "onepiece-wo-reject"
register(ANY, lambda: OnePiece(in_turn=False))

EXAMPLES = ((1, 4.0, 12.0), (2, 4.0, 12.0), (3, 4.0, 7.0), (2, 3.0, 11.0), (5, 2.0, 2.5), (8, 4.0, 12.0))
"""K, T_X and T_Y; the first two are the paper's (§5)."""
MINUTES = 5
LITERAL = RateLimit(headroom=1.0, burst_ns=0)
LOADS = (0.7, 0.8, 0.9, 0.95, 1.0, 1.1)
K = 8
X_S = 4.0
Y_S = 12.0
JITTER = 0.3
CLIPS = (  # The first two are nearest to Wan2.1's, which has 81 frames of 720p.
    ("hunyuanvideo_l20", "1280x720x129"),
    ("hunyuanvideo_l20", "1280x720x65"),
    ("cogvideox15_l20", "1360x768x81"),
)
NODES = (16, 64)
"""Numbers of nodes of eight devices that the monolith has."""
WIDTH = 8
KEPT = 0.97
"""Output over input from which on the nodes keep up, as in the check of Theorem 1."""
COMPARED = ("onepiece", ANY, "onepiece-wo-utilisation", NO_REJECT, "trident-b6", "tridentserve", "tilework")
COMPARED_CELLS = (("flux", "medium"), ("flux", "dynamic"))
GENTD26 = ("gentd26,load=0.5",)


# Two stages.


def theorem_1(cached: CachedRuns) -> RemadeFigure:
    """Check that output is input, with K workers at T_X, ceil(K T_Y / T_X) at T_Y, and requests at K / T_X."""
    rows = []
    ratios = []
    growths = []
    for k, x_s, y_s in cached.points(EXAMPLES):
        num = ceil(k * y_s / x_s)
        requests = _evenly(x_s / k, int(60 * MINUTES * k / x_s))
        trace = _run(OnePiece(limit=LITERAL, moves=False), _workflow(x_s, y_s), requests, k + num)
        ends_s = sorted(s_from_ns(one.finish_ns) for one in trace.endings if one.status is Status.DONE)
        output = (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])
        waits_s = [s_from_ns(one.latency_ns) - x_s - y_s for one in trace.endings]
        ratios.append(output * x_s / k)
        growths.append(waits_s[-1] - waits_s[0])
        counts = proportional({"x": x_s, "y": y_s}, k + num)
        rows.append(
            (
                f"K {k}, T {x_s:g} s and {y_s:g} s",
                f"{counts['x']} and {counts['y']}",
                f"{k / x_s:.3f}",
                f"{output:.3f}",
                f"{1000 * growths[-1]:.0f}",
            )
        )
    columns = ("", "instances", "requests per s", "done per s", "longer wait after five minutes, ms")
    curves = {"output over input": Curve(xs=tuple(range(1, len(ratios) + 1)), ys=tuple(ratios))}
    panel = CurvePanel(title="Theorem 1", x_label="example", y_label="output over input", curves=curves)
    return RemadeFigure(
        tables=(Table(title="Theorem 1 on the virtual clock", columns=columns, rows=tuple(rows)),),
        checks=(
            Check(what="output over input, least", measured=least(ratios), low=0.97),
            Check(what="output over input, most", measured=most(ratios), high=1.03),
            Check(what="how much longer the last request waits than the first, most", measured=most(growths), high=0.2),
        ),
        png=panels_png((panel,), tuple(curves), "OnePiece, Theorem 1, simulated"),
    )


def saturation(cached: CachedRuns) -> RemadeFigure:
    """Random arrivals and times, near K / T_X: how long requests wait, and how many are refused."""
    kinds: dict[str, Callable[[], OnePieceDispatch]] = {
        "in turn": lambda: OnePieceDispatch(moves=False),
        "any instance": lambda: OnePieceDispatch(moves=False, in_turn=False),
        "refused above K/T": lambda: OnePiece(limit=RateLimit(headroom=1.0), moves=False),
        "refused above 0.95 K/T": lambda: OnePiece(moves=False),
        "4 proxies, K/T each": lambda: OnePiece(limit=RateLimit(headroom=4.0), moves=False),
    }
    table = _workflow(X_S, Y_S)
    loads = cached.points(LOADS)
    num = 300 if cached.brief else 3000
    waits: dict[str, list[float]] = {name: [] for name in kinds}
    refused: dict[str, list[float]] = {name: [] for name in kinds}
    for load in loads:
        for name, make in kinds.items():
            runs = [
                _run(make(), table, _poisson(load * K / X_S, num, seed), 4 * K, JITTER, seed)
                for seed in range(cached.num_seeds)
            ]
            done = [one for run in runs for one in run.endings if one.status is Status.DONE]
            waits[name].append(fmean(s_from_ns(one.latency_ns) for one in done) - X_S - Y_S)
            refused[name].append(1 - len(done) / sum(len(run.endings) for run in runs))
    columns = ("", *(f"{load:g}" for load in loads))
    return RemadeFigure(
        tables=(
            Table(title="mean wait, s, by load over K/T", columns=columns, rows=_rows(waits, lambda one: f"{one:.1f}")),
            Table(title="refused, %, by load over K/T", columns=columns, rows=_rows(refused, percent)),
        ),
        checks=(
            Check(
                what="mean wait of requests in turn over any instance, least",
                measured=least([a / b for a, b in zip(waits["in turn"], waits["any instance"], strict=True)]),
                low=1.0,
            ),
            Check(
                what="mean wait with refusals above 0.95 K/T, s, most",
                measured=most(waits["refused above 0.95 K/T"]),
                high=X_S + Y_S,
            ),
        ),
        png=panels_png(
            (
                CurvePanel(
                    title=f"{K} and {3 * K} workers, times with {JITTER:.0%} of noise",
                    x_label="load over K/T",
                    y_label="mean wait, s",
                    curves={name: Curve(xs=tuple(loads), ys=tuple(found)) for name, found in waits.items()},
                ),
            ),
            tuple(kinds),
            "OnePiece near saturation, simulated",
        ),
    )


def _rows(of: Mapping[str, Sequence[float]], text: Callable[[float], str]) -> tuple[tuple[str, ...], ...]:
    return tuple((name, *map(text, found)) for name, found in of.items())


def _workflow(x_s: float, y_s: float) -> CostTable:
    """Return a table of two stages, each on one device of its own node."""
    graph = Graph(
        "workflow",
        (
            StageSpec(name="x", inputs=("prompt",), outputs=("a",)),
            StageSpec(name="y", inputs=("a",), outputs=("b",), steps=StepShare()),
        ),
    )
    rows = tuple(
        CostRow(pipeline="workflow", stage=stage, height=64, width=64, seconds=seconds)
        for stage, seconds in (("x", x_s), ("y", y_s))
    )
    return CostTable(hardware="made up", rows=rows, graphs=graphs_of(graph), devices_per_node=1)


def _request(
    index: int, at_s: float, pipeline: str = "workflow", shape: Shape | None = None, steps: int = 1
) -> Request:
    shape = shape or Shape(64, 64)
    return Request(uid=str(index), pipeline=pipeline, shape=shape, steps=steps, arrival_ns=ns_from_s(at_s))


def _evenly(period_s: float, num: int) -> list[Request]:
    return [_request(index, index * period_s) for index in range(num)]


def _poisson(rate_per_s: float, num: int, seed: int) -> list[Request]:
    random = Random(seed)
    at_s = 0.0
    found = []
    for index in range(num):
        at_s += random.expovariate(rate_per_s)
        found.append(_request(index, at_s))
    return found


def _run(
    rule: Policy, table: CostTable, requests: Sequence[Request], num_devices: int, jitter: float = 0.0, seed: int = 0
) -> Trace:
    config = SimConfig(num_devices=num_devices, jitter=jitter, seed=seed)
    simulation = Simulation(
        ControllerConfig(policy="onepiece"),
        table,
        config,
        make_controller=lambda given, costs: Controller(given, costs, policy=rule),
    )
    return simulation.run(requests)


# Sixteen times, or sixteen percent.


@dataclass(frozen=True, slots=True)
class Clip:
    """A request class of a shipped table, with the time of its stages: steps on `WIDTH` devices, the others on one."""

    table: str
    size: str

    def costs(self) -> CostTable:
        path = shipped_path(self.table)
        assert path is not None
        return read_table(path)

    def request(self, index: int, at_s: float) -> Request:
        table = self.costs()
        return _request(index, at_s, table.rows[0].pipeline, Shape.parse(self.size), table.steps or 1)

    def seconds(self) -> dict[Role, float]:
        asked = self.request(0, 0.0)
        costs = TableCosts(self.costs())
        return {
            role: sum(
                s_from_ns(costs.work_ns(stage, (asked,), WIDTH if stage.has_steps else 1, num)) for stage, num in pieces
            )
            for role, pieces in pieces_by_role(asked, costs).items()
        }

    def rate_per_s(self, num_nodes: int) -> float:
        """Return the rate of a monolith of this many nodes, each with one request at a time."""
        return num_nodes / sum(self.seconds().values())

    def least_devices(self, num_nodes: int) -> float:
        """Return the devices that the stages apart would need for as much, could devices be divided at will."""
        of = self.seconds()
        return self.rate_per_s(num_nodes) * sum(one * (WIDTH if role is Role.D else 1) for role, one in of.items())

    def keeps_up(self, make: Callable[[], Policy], num_nodes: int, rate_per_s: float) -> bool:
        """Return whether this many nodes have done requests at this rate as fast as they come, for twelve latencies."""
        total_s = sum(self.seconds().values())
        first = self.request(0, 0.0)
        num = ceil(12 * total_s * rate_per_s)
        requests = [replace(first, uid=str(index), arrival_ns=ns_from_s(index / rate_per_s)) for index in range(num)]
        trace = _run(make(), self.costs(), requests, WIDTH * num_nodes)
        done = sorted(one.finish_ns for one in trace.endings if one.status is Status.DONE)
        half = len(done) // 2
        output = (len(done) - half - 1) / s_from_ns(done[-1] - done[half])
        return len(done) == num and output >= KEPT * rate_per_s


def sixteen(cached: CachedRuns) -> RemadeFigure:
    """The fewest nodes that do as much as a monolith, with the stages on instances of their own."""
    rows = []
    saved = dict[tuple[Clip, int], float]()
    nodes = NODES[:1] if cached.brief else NODES
    for table, size in CLIPS:
        clip = Clip(table, size)
        of = clip.seconds()
        for num_nodes in nodes:
            rate = clip.rate_per_s(num_nodes)
            assert clip.keeps_up(lambda: FixedDegree(degree=WIDTH), num_nodes, rate), f"{clip} does not keep up"
            fewest = _fewest(clip, num_nodes, rate)
            saved[clip, num_nodes] = 1 - fewest / num_nodes
            rows.append(
                (
                    f"{table} {size}",
                    ", ".join(f"{role} {seconds:.1f}" for role, seconds in of.items()),
                    f"{WIDTH * num_nodes}",
                    f"{WIDTH * fewest}",
                    f"{clip.least_devices(num_nodes):.0f}",
                    f"{WIDTH * num_nodes / clip.least_devices(num_nodes):.2f}",
                )
            )
    columns = ("clip", "s of each role", "monolith", "apart, simulated", "apart, at best", "monolith over that")
    groups = tuple(f"{size}\n{num}" for _, size in CLIPS for num in nodes)
    panel = BarPanel(
        title="devices saved", y_label="share", groups=groups, bars={"apart": tuple(saved.values())}, is_share=True
    )
    return RemadeFigure(
        tables=(Table(title="Devices for equal throughput", columns=columns, rows=tuple(rows)),),
        checks=(
            Check(
                what=f"devices saved at 720p, {WIDTH * nodes[-1]} devices; the conclusion has 0.16",
                measured=range_of([share for (_, num), share in saved.items() if num == nodes[-1]][:2]),
                low=0.11,
                high=0.21,
            ),
            Check(
                what="monolith over apart, at best, most; the abstract has 16",
                measured=most([num / Clip(*clip).least_devices(num) * WIDTH for clip in CLIPS for num in nodes]),
                low=15.0,
            ),
        ),
        png=grouped_bars((panel,), ("apart",), "OnePiece: stages apart against a monolith, simulated"),
    )


def _fewest(clip: Clip, num_nodes: int, rate: float) -> int:
    """Return the fewest nodes that keep up, of those from what the stages need at best."""
    low = ceil(clip.least_devices(num_nodes) / WIDTH)
    for num in range(low, 2 * num_nodes):
        if clip.keeps_up(lambda: OnePieceDispatch(mode=Mode.COLLABORATION, moves=False), num, rate):
            return num
    raise AssertionError(f"{clip} needs twice as many nodes apart")


# Against other policies.


def against_others(cached: CachedRuns) -> RemadeFigure:
    """Run its rules on TridentServe's and GenTD26's workloads."""
    loads = cached.points(COMPARED_CELLS)
    cells = {
        f"{pipeline}, {load}, {rate:g}/s": load_cell(cached, pipeline, load, rate)
        for pipeline, load in loads
        for rate in rates_of(pipeline, load)
    }
    if not cached.brief:  # Their number of requests is the trace's.
        cells |= {text: cached.cell(text) for text in GENTD26}
    runs = cached.runs(cells.values(), COMPARED)
    shares = {name: [attainment(runs[cell.name, name]) for cell in cells.values()] for name in COMPARED}
    latencies = {name: [mean_of(runs[cell.name, name], mean_s) for cell in cells.values()] for name in COMPARED}
    lost = {
        name: [fmean(one.num_unserved / one.num_requests for one in runs[cell.name, name]) for cell in cells.values()]
        for name in COMPARED
    }
    others = [max(found) for found in zip(*(shares[name] for name in COMPARED[4:]), strict=True)]
    ahead = [ours - theirs for ours, theirs in zip(shares["onepiece"], others, strict=True)]
    gains = [a - b for a, b in zip(shares[ANY], shares["onepiece"], strict=True)]
    moves = [a - b for a, b in zip(shares["onepiece"], shares["onepiece-wo-utilisation"], strict=True)]
    return RemadeFigure(
        tables=tuple(
            Table(
                title=title,
                columns=("", *COMPARED),
                rows=tuple(
                    (cell, *(text(found[name][index]) for name in COMPARED)) for index, cell in enumerate(cells)
                ),
            )
            for title, found, text in (
                ("On time, %", shares, percent),
                ("mean latency, s, of what was served", latencies, lambda one: f"{one:.1f}"),
                ("Not served (refused, or failed for memory), %", lost, percent),
            )
        ),
        checks=(
            Check(what="onepiece over the best of the others, on time, mean", measured=range_of(ahead), low=0.0),
            Check(what="any instance over in turn, on time, least", measured=least(gains), low=0.0),
            Check(what="instances that change their stage over none, on time, least", measured=least(moves), low=0.0),
        ),
        png=grouped_bars(
            (
                BarPanel(
                    title="on time",
                    y_label="on time",
                    groups=tuple(text.replace(", ", "\n") for text in cells),
                    bars={name: tuple(found) for name, found in shares.items()},
                    is_share=True,
                ),
            ),
            COMPARED,
            "OnePiece's rules against other policies, simulated",
        ),
    )


FIGURES = {
    "onepiece-theorem": theorem_1,
    "onepiece-saturation": saturation,
    "onepiece-16": sixteen,
    "onepiece-compare": against_others,
}
