"""Theorem 1 of OnePiece on live workers: as many results come out as requests go in, and no queue grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.stats import extremes
from tilework.control.controller import ControllerConfig
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import StageSpec, StepShare
from tilework.core.model import SimulatedSource
from tilework.core.request import Status
from tilework.core.time import NS_PER_S, s_from_ns
from tilework.core.wire.spec import Spec
from tilework.cost.table import CostTable, graphs_of
from tilework.policy.published.onepiece.dispatch import OnePieceDispatch
from tilework.policy.registry import register
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.ticket import Ticket

_POLICY = "onepiece-as-divided"
register(_POLICY, lambda: OnePieceDispatch(moves=False))
_SIDE = 64
_WARM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Theorem:
    """K workers at T_X and ceil(K T_Y / T_X) at T_Y, on one machine; requests come evenly, at shares of K / T_X.

    Workers sleep instead of computing: processes, messages and states are real, and a run takes the time of the table.
    The `examples` are K, T_X and T_Y in seconds: the paper's (§5), ten times as fast.
    """

    examples: tuple[tuple[int, float, float], ...] = ((1, 0.4, 1.2), (2, 0.4, 1.2))
    loads: tuple[float, ...] = (1.0, 0.97)
    seconds: float = 300.0

    @classmethod
    def make(cls, quick: bool) -> Theorem:
        return cls(examples=((1, 0.4, 1.2),), seconds=20.0) if quick else cls()

    def measure(self, note: Note) -> Finding:
        rows = []
        ratios: dict[float, list[float]] = {load: [] for load in self.loads}
        growths: dict[float, list[float]] = {load: [] for load in self.loads}
        for k, x_s, y_s in self.examples:
            for load in self.loads:
                note(f"K {k}, T {x_s:g} s and {y_s:g} s, {load:g} of K / T_X")
                run = asyncio.run(_served(k, x_s, y_s, load, self.seconds))
                ratios[load].append(run.ratio)
                growths[load].append(run.growth_s / x_s)
                name = f"K {k}, T {x_s:g} s and {y_s:g} s, {load:g} of K/T"
                wait = [f"{1000 * (one - x_s - y_s):.0f}" for one in (run.first_s, run.last_s)]
                rows.append(
                    (name, f"{k} and {ceil(k * y_s / x_s)}", f"{run.input_per_s:.3f}", f"{run.ratio:.4f}", *wait)
                )
        lowest = min(self.loads)
        every = [one for some in ratios.values() for one in some]
        return Finding(
            checks=(
                Check(what="output over input, of the lowest", measured=extremes([min(every)]), low=0.97),
                Check(what="output over input, of the highest", measured=extremes([max(every)]), high=1.03),
                Check(
                    what=f"growth of the wait from the first tenth of the requests to the last, at {lowest:g} of K/T",
                    measured=extremes(growths[lowest]),
                    high=0.1,
                    unit="T_X",
                ),
            ),
            method=(
                "Requests come evenly; none is refused. Output: requests done per second, from first to last end.",
                "Wait: latency without T_X and T_Y, the mean of the first and of the last tenth of the requests.",
            ),
            tables=(
                Table(
                    title=f"{self.seconds:g} s each",
                    columns=("", "workers", "requests per s", "output over input", "first wait, ms", "last wait, ms"),
                    rows=tuple(rows),
                ),
            ),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What came out: rates, and the mean latency of the first and the last tenth of the requests."""

    input_per_s: float
    output_per_s: float
    first_s: float
    last_s: float

    @property
    def ratio(self) -> float:
        return self.output_per_s / self.input_per_s

    @property
    def growth_s(self) -> float:
        return self.last_s - self.first_s


async def _served(k: int, x_s: float, y_s: float, load: float, seconds: float) -> Run:
    table = two_stages(x_s, y_s)
    num_workers = k + ceil(k * y_s / x_s)
    source = SimulatedSource(
        pipeline="workflow",
        hardware=table.hardware,
        steps=1,
        rows=table.rows,
        stages=table.graph("workflow").specs,
    )
    starting = EngineStart(
        EngineConfig(controller=ControllerConfig(policy=_POLICY), table=table),
        LocalExecutor(LocalConfig(num_workers=num_workers, sources=(source,))),
    )
    engine = await starting.start()
    try:
        for index in range(_WARM):
            await _submitted(engine, f"warm {index}").outcome
        return await _run(engine, x_s / k / load, int(seconds * k * load / x_s))
    finally:
        await engine.stop()


async def _run(engine: Engine, period_s: float, num: int) -> Run:
    begin_s, tickets = time.monotonic(), list[Ticket]()
    arrivals_ns = []
    for index in range(num):
        await asyncio.sleep(begin_s + index * period_s - time.monotonic())
        arrivals_ns.append(engine.now_ns())
        tickets.append(_submitted(engine, str(index)))
    outcomes = [await ticket.outcome for ticket in tickets]
    failed = [one for one in outcomes if one.status is not Status.DONE]
    if failed:
        raise CaseFailed(f"{len(failed)} of {num} requests were not done: {failed[0].reason}")
    ends_ns = [one.finished_ns for one in outcomes]
    latencies_s = [s_from_ns(end - arrival) for arrival, end in zip(arrivals_ns, ends_ns, strict=True)]
    tenth = max(1, num // 10)
    return Run(_per_s(arrivals_ns), _per_s(sorted(ends_ns)), fmean(latencies_s[:tenth]), fmean(latencies_s[-tenth:]))


def _submitted(engine: Engine, uid: str) -> Ticket:
    spec = Spec(prompt=uid, height=_SIDE, width=_SIDE, steps=1, guidance_scale=1.0, seed=1)
    answer = engine.submit({uid: spec})
    assert isinstance(answer, tuple), "nothing is refused"
    return answer[0]


def _per_s(times_ns: Sequence[int]) -> float:
    return (len(times_ns) - 1) * NS_PER_S / (times_ns[-1] - times_ns[0])


def two_stages(x_s: float, y_s: float) -> CostTable:
    """A workflow of two stages that take these times, each on one device."""
    graph = Graph(
        "workflow",
        (
            StageSpec(name="x", inputs=("prompt",), outputs=("a",)),
            StageSpec(name="y", inputs=("a",), outputs=("b",), steps=StepShare()),
        ),
    )
    rows = tuple(
        CostRow(pipeline="workflow", stage=stage, height=_SIDE, width=_SIDE, seconds=seconds)
        for stage, seconds in (("x", x_s), ("y", y_s))
    )
    return CostTable(hardware="made up", rows=rows, graphs=graphs_of(graph), devices_per_node=1)
