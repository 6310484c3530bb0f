"""A pipeline with two stages that have steps, a draft and a painting of it, and its costs."""

from __future__ import annotations

from builders import PIPELINE
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import StageSpec, StepShare
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts

GRAPH = Graph(
    PIPELINE,
    (
        StageSpec(name="read", outputs=("words",)),
        StageSpec(name="draft", inputs=("words",), outputs=("a",), steps=StepShare(last=0.8), degrees=None),
        StageSpec(name="enlarge", inputs=("a",), outputs=("b",)),
        StageSpec(name="paint", inputs=("b",), outputs=("c",), steps=StepShare(first=0.8), degrees=None),
        StageSpec(name="show", inputs=("c",), outputs=("picture",)),
    ),
)
MS_BY_STAGE = {"read": {1: 10}, "draft": {1: 100, 2: 60, 4: 40}, "enlarge": {1: 30}, "paint": {1: 200, 2: 120}} | {
    "show": {1: 50}
}
COSTS = TableCosts(
    CostTable(
        hardware="toy",
        rows=tuple(
            CostRow(pipeline=PIPELINE, stage=stage, height=128, width=128, degree=degree, seconds=ms / 1000)
            for stage, times in MS_BY_STAGE.items()
            for degree, ms in times.items()
        ),
        graphs={PIPELINE: GRAPH},
    )
)
