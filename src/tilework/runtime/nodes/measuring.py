"""Measurements on nodes: the choice of a node, and the weights to drop afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping

from tilework.core.component import LoadSource
from tilework.core.cost_row import CostRow
from tilework.runtime.executor import CannotRun, WorkerStartFailed
from tilework.runtime.nodes.messages import EndMeasuring, LoadSpeeds, MeasureModel, ModelMeasured
from tilework.runtime.nodes.remote_node import RemoteNode


class NodeMeasuring:
    """Measures models on one node each: all `nodes`, which are the current ones by their place, are alike."""

    def __init__(self, nodes: Mapping[int, RemoteNode]) -> None:
        self._nodes = nodes
        self._used: set[RemoteNode] = set()  # Nodes that have loaded weights to measure.

    def run(self, asked: MeasureModel, places: Collection[int]) -> Awaitable[tuple[CostRow, ...]]:
        """Return the rows of a model, measured on the first node of these places, which serve it; it is asked at once.

        Awaiting them raises WorkerStartFailed or CannotRun.
        """
        serving = [node for node in self._nodes.values() if node.started is not None and node.node in places]
        if not serving:
            return _rows(None, f"all nodes that serve {asked.model} were lost")
        node = min(serving, key=lambda one: (one.leave is not None, one.node))
        self._used.add(node)
        return _rows(node.ask(asked, ModelMeasured))

    async def end(self) -> Mapping[LoadSource, float]:
        """Drop weights loaded for measurements; returns the speeds of the first node that has loaded some."""
        used = [node for node in self._nodes.values() if node in self._used]
        self._used.clear()
        answers = await asyncio.gather(*(node.ask(EndMeasuring(), LoadSpeeds) for node in used))
        return next((one.bytes_per_s for one in answers if one.bytes_per_s), {})


async def _rows(asked: Awaitable[ModelMeasured] | None, error: str = "") -> tuple[CostRow, ...]:
    """Return the rows that a node answers; raise the error if none was asked."""
    answer = ModelMeasured((), error) if asked is None else await asked
    if answer.error:
        raise (CannotRun if answer.cannot_run else WorkerStartFailed)(answer.error)
    return answer.rows
