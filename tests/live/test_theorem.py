"""OnePiece's Theorem 1 on live workers that sleep; rates and waits over minutes are measured by the bench `theorem`."""

from __future__ import annotations

import asyncio
from collections import Counter
from math import ceil

import pytest

import tiny
from tilework.control.controller import ControllerConfig
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import StageSpec, StepShare
from tilework.core.model import SimulatedSource
from tilework.core.request import Status
from tilework.cost.table import CostTable, graphs_of
from tilework.policy import registry
from tilework.policy.published.onepiece.dispatch import OnePieceDispatch
from tilework.runtime.engine import EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.ticket import Outcome

pytestmark = pytest.mark.slow
GRAPH = Graph(
    "workflow",
    (
        StageSpec(name="x", inputs=("prompt",), outputs=("a",)),
        StageSpec(name="y", inputs=("a",), outputs=("b",), steps=StepShare()),
    ),
)
NUM = 24


@pytest.mark.parametrize(("k", "x_s", "y_s"), [(1, 0.1, 0.3), (2, 0.1, 0.17)])
def test_k_workers_begin_what_the_others_finish(
    k: int, x_s: float, y_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices are divided as the theorem says, and those of each stage take turns."""
    monkeypatch.setitem(registry._GIVEN, "onepiece-as-divided", lambda: OnePieceDispatch(moves=False))
    num_y = ceil(k * y_s / x_s)
    outcomes = asyncio.run(served(k + num_y, x_s, y_s, x_s / k))
    assert {one.status for one in outcomes} == {Status.DONE}
    used = {
        name: Counter(part.devices for one in outcomes for part in one.segments if part.stage == name) for name in "xy"
    }
    assert [len(used[name]) for name in "xy"] == [k, num_y]
    assert used["x"].keys().isdisjoint(used["y"])
    assert all(max(one.values()) - min(one.values()) <= 1 for one in used.values()), "round robin"


async def served(num_workers: int, x_s: float, y_s: float, period_s: float) -> list[Outcome]:
    """The outcomes of requests that come at K / T_X."""
    rows = tuple(
        CostRow(pipeline="workflow", stage=stage, height=64, width=64, seconds=seconds)
        for stage, seconds in (("x", x_s), ("y", y_s))
    )
    table = CostTable(hardware="made up", rows=rows, graphs=graphs_of(GRAPH), devices_per_node=1)
    source = SimulatedSource(pipeline="workflow", hardware=table.hardware, steps=1, rows=rows, stages=GRAPH.specs)
    starting = EngineStart(
        EngineConfig(controller=ControllerConfig(policy="onepiece-as-divided"), table=table),
        LocalExecutor(LocalConfig(num_workers=num_workers, sources=(source,))),
    )
    engine = await starting.start()
    try:
        tickets = []
        for index in range(NUM):
            answer = engine.submit({str(index): tiny.spec(steps=1, seed=index)})
            assert isinstance(answer, tuple)
            tickets += answer
            await asyncio.sleep(period_s)
        return [await one.outcome for one in tickets]
    finally:
        await engine.stop()
