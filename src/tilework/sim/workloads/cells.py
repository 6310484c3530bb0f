"""Cells of comparisons of policies: a workload on a number of devices, under a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilework.cost.table import CostTable, check_covers, check_devices
from tilework.cost.table_file import read_table
from tilework.formats.trace import is_csv, read_trace
from tilework.formats.workload import WorkloadRequest
from tilework.sim.workloads.family import WorkloadFamily
from tilework.sim.workloads.registry import make_workload, values_of, workload_names

SHORT = {"rate": "rate_per_s", "num": "num_requests"}
"""Short names of parameters, as in the options of `tilework workload make`; `rpm`, requests per minute, is one too."""


class BadCell(ValueError):
    """A text does not name a cell; the message says what is wrong with it and what to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A workload, by name or as a file, on simulated devices.

    `table` is a place for `read_table`, as is `true_table`: the times that devices take, if they are not those by which
    is planned. `devices_per_node` None leaves the table's. `section` is the part of the grid.
    """

    name: str
    workload: WorkloadFamily | Path
    table: str
    num_devices: int
    devices_per_node: int | None = None
    section: str = ""
    true_table: str | None = None

    @property
    def source(self) -> str:
        return str(self.workload) if isinstance(self.workload, Path) else self.workload.name

    @property
    def is_drawn(self) -> bool:
        """True if another seed gives other requests; a file has its own."""
        return not isinstance(self.workload, Path)

    @property
    def parameters(self) -> dict[str, Any]:
        """All of them, also those that have their defaults; none of a file."""
        values = {} if isinstance(self.workload, Path) else self.workload.parameters()
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def requests(self, seed: int) -> tuple[WorkloadRequest, ...]:
        """Return the requests in order of arrival. Raises BadParameter, BadLine, BadCostTable, OSError."""
        if isinstance(self.workload, Path):
            return read_trace(self.workload, *self.costs().pipelines)
        return self.workload.requests(seed)

    def costs(self) -> CostTable:
        """Raises BadCostTable."""
        return self._read(self.table)

    def true_costs(self) -> CostTable:
        """Return the costs of the devices. Raises BadCostTable, also if they lack a cost that may be planned with."""
        if self.true_table is None:
            return self.costs()
        table = self._read(self.true_table)
        check_covers(self.costs(), table, planned_name=self.table, devices_name=self.true_table)
        return table

    def _read(self, place: str) -> CostTable:
        table = read_table(place)
        check_devices(table, self.num_devices, place)
        return table if self.devices_per_node is None else replace(table, devices_per_node=self.devices_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellDevices:
    """The devices that were asked for; None leaves those of the workload."""

    table: str | None = None
    num_devices: int | None = None
    devices_per_node: int | None = None


def cell_of(text: str, devices: CellDevices) -> Cell:
    """Return the cell of NAME[,key=value...], or of a file of requests.

    Raises:
        UnknownWorkload, BadParameter, BadCell: there is nothing of this name, or it has no such parameter or value.
    """
    name, *pairs = text.split(",")
    if name not in workload_names() and (Path(text).exists() or text.endswith(".jsonl") or is_csv(text)):
        if devices.table is None:
            raise BadCell("a file of requests does not say what they cost; give --cost")
        workload: WorkloadFamily | Path = Path(text)
        own = CellDevices(table=devices.table, num_devices=1)
    else:
        workload = made = make_workload(name, values_of(name, _texts(name, pairs)))
        own = CellDevices(table=made.cost_table, num_devices=made.num_devices)
    return Cell(
        name=text,
        workload=workload,
        table=devices.table or own.table or "",
        num_devices=devices.num_devices or own.num_devices or 1,
        devices_per_node=devices.devices_per_node,
    )


def _texts(name: str, pairs: Sequence[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadCell(f"{pair!r} is no parameter; write {name},key=value, as in tetriserve,mix=skewed")
        if key == "rpm":
            key, value = "rate_per_s", _per_s(value)
        key = SHORT.get(key, key)
        if key in texts:
            raise BadCell(f"{key} is set twice; leave one out")
        texts[key] = value
    return texts


def _per_s(rpm: str) -> str:
    try:
        return repr(float(rpm) / 60)
    except ValueError:
        raise BadCell(f"rpm is {rpm!r}; use a number of requests per minute") from None
