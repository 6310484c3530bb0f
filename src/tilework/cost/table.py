"""A cost table: the durations that were measured on one type of hardware."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tilework.core.component import Component, LoadSource, num_bytes
from tilework.core.cost_row import Batch, CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.lora import Lora
from tilework.core.pools import unknown_device
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.loading import Link
from tilework.cost.mixes import Mixes

T = TypeVar("T")


def graphs_of(graph: Graph) -> dict[str, Graph]:
    """Return the graphs that a table must state for a pipeline with this graph: none if the graph is the default."""
    return {} if graph == latent_diffusion(graph.pipeline) else {graph.pipeline: graph}


class BadCostTable(ValueError):
    """A cost table that cannot be used; the message names the file, the row, the field and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Durations measured on one type of hardware. `table_file` reads and writes it.

    `sources` state, by pipeline, the origin of the figures. Tables made for a published evaluation also have its
    `steps` per request and its base SLOs, seconds by `str(Shape)`. `batch_models`, by pipeline, predict batches of
    steps at degree 1. `graphs` are those of pipelines that are not latent diffusion pipelines (see
    `core.graph.shipped`).

    `components` are, by pipeline, those that its stages name; components that are missing there have no weight. `loras`
    are, by pipeline, those that its requests may use, by name. `devices` are, by pipeline, the accelerators that serve
    it, ascending; all serve a pipeline that is missing there.

    A device has `memory_bytes` for components (None: no limit), and loads them at `load_bytes_per_s`. The host of a
    node keeps `host_bytes` of those that were read last (None: all). `links` connect devices of one node ("device") and
    of two nodes ("node"). `mixes` are the mixes of sizes in the evaluation.
    """

    hardware: str
    rows: tuple[CostRow, ...]
    devices_per_node: int = 8
    sources: Mapping[str, str] = field(default_factory=dict)
    steps: int | None = None
    slo_s: Mapping[str, float] = field(default_factory=dict)
    batch_models: Mapping[str, BatchLatencyModel] = field(default_factory=dict)
    graphs: Mapping[str, Graph] = field(default_factory=dict)
    components: Mapping[str, Mapping[str, Component]] = field(default_factory=dict)
    loras: Mapping[str, Mapping[str, Lora]] = field(default_factory=dict)
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    memory_bytes: int | None = None
    host_bytes: int | None = None
    load_bytes_per_s: Mapping[LoadSource, float] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    mixes: Mixes = field(default_factory=Mixes)

    @property
    def source(self) -> str:
        """Origin of the figures of all pipelines, each text once."""
        return " + ".join(dict.fromkeys(self.sources.values()))

    @property
    def pipelines(self) -> tuple[str, ...]:
        """Pipelines that have rows, each once, in the order of the rows."""
        return tuple(dict.fromkeys(row.pipeline for row in self.rows))

    @property
    def all_components(self) -> tuple[Component, ...]:
        """Components of all pipelines and LoRAs, each once, by digest."""
        found = {one for named in self.components.values() for one in named.values()}
        loras = [one for named in self.loras.values() for one in named.values()]
        return tuple(sorted(found.union(one.component for one in loras if one.component is not None)))

    def graph(self, pipeline: str) -> Graph:
        """Return the graph of a pipeline."""
        return self.graphs.get(pipeline) or latent_diffusion(pipeline)

    @property
    def needs_slots(self) -> bool:
        """True if a stage of some pipeline runs on CPU slots."""
        return any(graph.needs_slots for graph in self.graphs.values())

    @property
    def has_batches(self) -> bool:
        """True if works of several requests were measured."""
        return any(row.batch != 1 for row in self.rows)


def merged(tables: Sequence[CostTable]) -> CostTable:
    """Return one table of the pipelines of all `tables`, which are of one hardware: for serving them side by side.

    `steps` is kept if all agree on it. Sizes keep their SLOs. Mixes are left out: each is of one pipeline.

    Raises:
        BadCostTable: they are of different hardware, or two have the same pipeline or an SLO for the same size.
    """
    first = tables[0]
    for index, table in enumerate(tables[1:], 1):
        for name in ("hardware", "devices_per_node", "memory_bytes", "host_bytes", "load_bytes_per_s", "links"):
            ours = getattr(first, name)
            other = getattr(table, name)
            if ours != other:
                raise BadCostTable(f"{name} is {ours!r} in one and {other!r} in another; join tables of one hardware")
        for earlier in tables[:index]:
            twice = set(earlier.pipelines) & set(table.pipelines)
            if twice:
                raise BadCostTable(f"pipeline {min(twice)!r} is in two of them; leave one out")
            sizes = earlier.slo_s.keys() & table.slo_s.keys()
            if sizes:
                raise BadCostTable(f"slo_s of {min(sizes)} is in two of them; take it out of both")
    steps = {table.steps for table in tables}
    return CostTable(
        hardware=first.hardware,
        devices_per_node=first.devices_per_node,
        sources={pipeline: text for table in tables for pipeline, text in table.sources.items()},
        steps=first.steps if len(steps) == 1 else None,
        slo_s={size: seconds for table in tables for size, seconds in table.slo_s.items()},
        rows=tuple(row for table in tables for row in table.rows),
        batch_models={pipeline: one for table in tables for pipeline, one in table.batch_models.items()},
        graphs={pipeline: graph for table in tables for pipeline, graph in table.graphs.items()},
        components={pipeline: named for table in tables for pipeline, named in table.components.items()},
        loras={pipeline: named for table in tables for pipeline, named in table.loras.items()},
        devices={pipeline: ids for table in tables for pipeline, ids in table.devices.items()},
        memory_bytes=first.memory_bytes,
        host_bytes=first.host_bytes,
        load_bytes_per_s=first.load_bytes_per_s,
        links=first.links,
    )


_OWN_LANES = frozenset({LoadSource.HOST, LoadSource.PEER})
"""Sources from which the devices of a cell load their parts at the same time: each has a link of its own to them."""


def in_cells(table: CostTable, size: int) -> CostTable:
    """Return the table for *cells*, `size` devices of a node that count as one: for models that exceed one device.

    A cell has the memory of all its devices, and each holds a part of the weights. A work that `size` devices share is
    a work of a cell at degree 1. A work that was not measured on that many devices takes its time on the most that it
    was measured on. The cost of running on parts of the weights is not counted: no table has it. A cache saves nothing
    there, as on several devices.

    Source: TridentServe §7, "treating multiple devices as one", and appendix E.2. There only the stage with steps is
    split, and one device encodes and decodes; here a cell does.

    Raises:
        BadCostTable: nodes do not consist of such cells, or the table names devices of pipelines.
    """
    if size < 1 or table.devices_per_node % size:
        raise BadCostTable(f"cell={size} does not divide the {table.devices_per_node} devices of a node; give another")
    if table.devices:
        raise BadCostTable(f"cell={size} is for tables without devices by pipeline; leave devices out of the table")
    widest: dict[tuple[str, str, Batch], int] = {}  # The widest degree, up to a cell.
    for row in table.rows:
        if row.degree <= size:
            key = row.pipeline, row.stage, row.shapes
            widest[key] = max(row.degree, widest.get(key, 0))
    rows = [
        _of_cell(row, size)
        for row in table.rows
        if row.degree % size == 0 or row.degree == widest.get((row.pipeline, row.stage, row.shapes))
        if row.cache is None or size == 1
    ]
    return replace(
        table,
        hardware=f"{table.hardware}, {size} devices as one",
        rows=tuple(rows),
        devices_per_node=table.devices_per_node // size,
        batch_models={},
        memory_bytes=None if table.memory_bytes is None else table.memory_bytes * size,
        load_bytes_per_s={
            source: speed * (size if source in _OWN_LANES else 1) for source, speed in table.load_bytes_per_s.items()
        },
    )


def _of_cell(row: CostRow, size: int) -> CostRow:
    """Return the row of a cell: its devices, `row.degree` of them at most, need `row.activation_bytes` each."""
    num_devices = min(size, row.degree)
    activation_bytes = row.activation_bytes
    if activation_bytes is None:
        return replace(row, degree=max(1, row.degree // size), peak_bytes=None)
    weights = None if row.peak_bytes is None else row.peak_bytes - activation_bytes
    needed = activation_bytes * num_devices
    peak_bytes = None if weights is None else weights + needed
    return replace(row, degree=max(1, row.degree // size), activation_bytes=needed, peak_bytes=peak_bytes)


def in_smallest_cells(table: CostTable) -> CostTable:
    """Return the table for the smallest cells in which each measured size of all stages fits at some degree.
    It is `table` itself if that is one device. A stage needs its weights and, unless it can run in slices, its
    activations, as far as the table has them.

    Raises:
        BadCostTable: it fits into no cell, or as `in_cells`.
    """
    limit = table.memory_bytes
    for size in (one for one in range(1, table.devices_per_node + 1) if table.devices_per_node % one == 0):
        cells = table if size == 1 else in_cells(table, size)
        needed, what = _most_needed(cells)
        room = cells.memory_bytes
        if room is None or needed <= room:
            return cells
    raise BadCostTable(
        f"cell=auto fits in no cell of a node: {what} needs {-(-needed // size)} bytes on each of its {size} devices, "
        f"and memory_bytes is {limit}; raise memory_bytes or devices_per_node, or leave the size out"
    )


def _most_needed(table: CostTable) -> tuple[int, str]:
    """Return the most bytes that a stage needs for a size, at its degree with the least, and which stage it is."""
    least: dict[tuple[str, str, str], int] = {}
    for row in table.rows:
        if row.batch == 1:
            stage = table.graph(row.pipeline).stage(row.stage)
            known = table.components.get(row.pipeline, {})
            weights = num_bytes({known[name] for name in stage.spec.components if name in known})
            needed = weights + (0 if stage.spec.sliceable else row.activation_bytes or 0)
            key = row.pipeline, row.stage, str(row.shape)
            least[key] = min(needed, least.get(key, needed))
    (pipeline, stage_name, shape), needed = max(least.items(), key=lambda item: (item[1], item[0]))
    return needed, f"{stage_name} of {pipeline!r} at {shape}"


def sped_up(table: CostTable, factor: float) -> CostTable:
    """Return the table for devices on which everything but loads is `factor` times as fast."""
    rows = tuple(
        replace(
            row,
            seconds=row.seconds / factor,
            p99_seconds=None if row.p99_seconds is None else row.p99_seconds / factor,
        )
        for row in table.rows
    )
    return replace(table, rows=rows)


def with_last_stage(table: CostTable, num_steps: float) -> CostTable:
    """Return the table with a last stage that takes as long, on one device, as `num_steps` steps.
    For tables without rows of that stage, as those of publications that measured steps alone.

    Raises:
        BadCostTable: the table has rows of that stage, or a pipeline ends with steps.
    """
    added = []
    for pipeline in table.pipelines:
        last = table.graph(pipeline).stages[-1]
        if last.has_steps or any(row.stage == last.name for row in table.rows if row.pipeline == pipeline):
            what = "has steps" if last.has_steps else "has rows of its own"
            raise BadCostTable(f"the last stage of {pipeline!r}, {last.name}, {what}; leave last={num_steps:g} out")
        stepped = table.graph(pipeline).stepped[-1].name
        added += [
            replace(row, stage=last.name, seconds=num_steps * row.seconds, p99_seconds=None)
            for row in table.rows
            if row.pipeline == pipeline and row.stage == stepped and row.degree == row.batch == 1 and row.cache is None
        ]
    return replace(table, rows=(*table.rows, *added))


def only(table: CostTable, pipeline: str) -> CostTable:
    """Return the part of the table about this pipeline and the hardware."""
    return without(table, set(table.pipelines) - {pipeline})


def renamed(table: CostTable, pipeline: str) -> CostTable:
    """Return a table of one pipeline under the new name `pipeline`; its graph, if the table has one, is left out."""
    (before,) = table.pipelines

    def named(by_pipeline: Mapping[str, T]) -> dict[str, T]:
        return {pipeline: by_pipeline[before]} if before in by_pipeline else {}

    return replace(
        table,
        rows=tuple(replace(row, pipeline=pipeline) for row in table.rows),
        sources=named(table.sources),
        batch_models=named(table.batch_models),
        graphs={},
        components=named(table.components),
        loras=named(table.loras),
        devices=named(table.devices),
    )


def without(table: CostTable, pipelines: Collection[str]) -> CostTable:
    """Return the table without the parts about these pipelines."""

    def kept(by_pipeline: Mapping[str, T]) -> dict[str, T]:
        return {pipeline: value for pipeline, value in by_pipeline.items() if pipeline not in pipelines}

    return replace(
        table,
        rows=tuple(row for row in table.rows if row.pipeline not in pipelines),
        sources=kept(table.sources),
        batch_models=kept(table.batch_models),
        graphs=kept(table.graphs),
        components=kept(table.components),
        loras=kept(table.loras),
        devices=kept(table.devices),
    )


def check_covers(planned: CostTable, devices: CostTable, *, planned_name: str, devices_name: str) -> None:
    """Check that `devices` has a time for everything that may be planned by `planned`.

    Raises:
        BadCostTable: a pipeline, stage or degree is missing.
    """
    known = {(row.pipeline, row.stage, row.degree) for row in devices.rows}
    for row in planned.rows:
        if (row.pipeline, row.stage, row.degree) not in known:
            raise BadCostTable(
                f"{devices_name} has no time for {row.stage} of {row.pipeline!r} at degree {row.degree}, which "
                f"{planned_name} has; measure it, or leave it out of {planned_name}"
            )


def check_devices(table: CostTable, num_devices: int, name: str) -> None:
    """Check that the devices of each pipeline are some of `num_devices`. Raises BadCostTable, which names the table."""
    for pipeline, ids in table.devices.items():
        if (unknown := unknown_device(ids, num_devices)) is not None:
            raise BadCostTable(
                f"{name}: devices.{pipeline} has {unknown}, and there are {num_devices} devices, from 0; leave it out, "
                "or give more devices"
            )
