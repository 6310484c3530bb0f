"""The workers of a server: of this machine, or of several nodes. Needs the extra `serve`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tilework.cli.nodes import NodesWanted
from tilework.core.model import SimulatedSource
from tilework.pipelines.fits.beside import StartPlan
from tilework.runtime.cell_executor import local_executor
from tilework.runtime.executor import Executor
from tilework.runtime.local_config import LocalConfig


@dataclass(frozen=True, slots=True)
class Workers:
    """`each` are those of this machine, or of each of the `nodes`; the memory of their cards has a `plan`, or none."""

    each: LocalConfig
    nodes: NodesWanted | None = None
    plan: StartPlan | None = None

    def __str__(self) -> str:
        first = self.each.sources[0]
        device = "simulated device" if isinstance(first, SimulatedSource) else first.device
        cells = f" in cells of {self.each.cell_size}" if self.each.cell_size > 1 else ""
        where = "" if self.nodes is None else f" on {self.nodes.nodes_text}"
        return f"{self.each.num_workers} x {device}{cells}{where}"

    def executor(self, owner: Path | None) -> Executor:
        """What runs them, for a durable server if it has an `owner`. Raises BadNodes, WorkerStartFailed."""
        each = replace(self.each, owner=owner)
        return local_executor(each) if self.nodes is None else self.nodes.executor(each)
