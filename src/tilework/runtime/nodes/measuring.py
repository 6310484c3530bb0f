"""Measurements on nodes: where they are made, and what must be given back then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping

from tilework.core.component import LoadSource
from tilework.core.cost_row import CostRow
from tilework.runtime.executor import CannotRun, WorkerStartFailed
from tilework.runtime.nodes.messages import EndMeasuring, LoadSpeeds, Measure, Measured
from tilework.runtime.nodes.remote_node import RemoteNode


class NodeMeasuring:
    """Measures models on one node each: all `nodes`, which are those that are there by their place, are alike."""

    def __init__(self, nodes: Mapping[int, RemoteNode]) -> None:
        self._nodes = nodes
        self._used: set[RemoteNode] = set()  # They have loaded weights to measure.

    def run(self, asked: Measure, places: Collection[int]) -> Awaitable[tuple[CostRow, ...]]:
        """The rows of a model, measured on the first node of these places, which serve it; it is asked at once.

        They raise WorkerStartFailed or CannotRun.
        """
        serving = [node for node in self._nodes.values() if node.started is not None and node.node in places]
        if not serving:
            return _rows(None, f"all nodes that serve {asked.model} were lost")
        node = min(serving, key=lambda one: (one.leave is not None, one.node))
        self._used.add(node)
        return _rows(node.ask(asked, Measured))

    async def end(self) -> Mapping[LoadSource, float]:
        """Drop what was loaded to measure; the speeds of the first node that has loaded something."""
        used = [node for node in self._nodes.values() if node in self._used]
        self._used.clear()
        answers = await asyncio.gather(*(node.ask(EndMeasuring(), LoadSpeeds) for node in used))
        return next((one.bytes_per_s for one in answers if one.bytes_per_s), {})


async def _rows(asked: Awaitable[Measured] | None, error: str = "") -> tuple[CostRow, ...]:
    """What a node answers; the error if none was asked."""
    answer = Measured((), error) if asked is None else await asked
    if answer.error:
        raise (CannotRun if answer.cannot_run else WorkerStartFailed)(answer.error)
    return answer.rows
