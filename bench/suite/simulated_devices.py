"""One workload against one policy: live on modelled workers, and the same requests simulated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from suite.case import CaseFailed
from suite.server import serving_simulated, tilework_json
from tilework.client.bench import BenchConfig, make_workload
from tilework.client.drive import drive
from tilework.client.mix import parse_slo, with_slo
from tilework.client.record import CallEnd, Record
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.cost.table import CostTable
from tilework.cost.table_file import table_json
from tilework.formats.workload import WorkloadRequest, write_workload
from tilework.pipelines.video.export import EXPORT
from tilework.report.served import served_figures
from tilework.report.tables import summary


def faster(table: CostTable, time_scale: float) -> CostTable:
    """The table of a device that is `time_scale` times as fast."""
    rows = tuple(replace(row, seconds=row.seconds / time_scale, p99_seconds=None) for row in table.rows)
    return replace(table, rows=rows, slo_s={size: seconds / time_scale for size, seconds in table.slo_s.items()})


def with_files(table: CostTable, seconds: float) -> CostTable:
    """The table of pipelines that also write their clips to video files, on a CPU slot; each takes `seconds`."""
    graphs, rows = dict(table.graphs), list(table.rows)
    for pipeline in dict.fromkeys(row.pipeline for row in table.rows):
        graph = table.graph(pipeline)
        graphs[pipeline] = Graph(pipeline, (*graph.specs, EXPORT))
        shapes = dict.fromkeys(row.shape for row in table.rows if row.pipeline == pipeline)
        rows += [
            CostRow(
                pipeline=pipeline,
                stage=EXPORT.name,
                height=shape.height,
                width=shape.width,
                frames=shape.frames,
                seconds=seconds,
            )
            for shape in shapes
        ]
    return replace(table, graphs=graphs, rows=tuple(rows))


def write_table(path: Path, table: CostTable) -> None:
    path.write_text(json.dumps(table_json(table)), encoding="utf-8")


def uniform_workload(
    table: CostTable, num_requests: int, rate_per_s: float, slo_scale: float, seed: int
) -> tuple[WorkloadRequest, ...]:
    """Poisson arrivals of all sizes of the table that have an SLO, each as often, due after SLO x `slo_scale`."""
    slo = ",".join(f"{size}={seconds}" for size, seconds in table.slo_s.items())
    config = BenchConfig(
        url="",
        rate_per_s=rate_per_s,
        num_requests=num_requests,
        seed=seed,
        sizes=",".join(table.slo_s),
        steps=table.steps,
        model=table.rows[0].pipeline,
    )
    return with_slo(make_workload(config), parse_slo(slo), unloaded_s={}, scale=slo_scale, on_miss=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """What clients saw (`records`, `seen`), what the event log says of it (`live`), and two simulations of it.

    `simulated` is on the costs and the dispatch time that the run itself measured (`simulate --log`), `predicted` on
    the cost table alone. All are summaries of `report.tables`.
    """

    policy: str
    seed: int
    records: Sequence[Record]
    live: Mapping[str, Any]
    simulated: Mapping[str, Any]
    predicted: Mapping[str, Any]
    latency_ratio: float

    @property
    def seen(self) -> Mapping[str, Any]:
        return summary(self.records)

    @property
    def mean_degree(self) -> float:
        """Devices per denoising step."""
        figures = served_figures(self.records)
        assert figures is not None
        degree: float = figures["mean_degree"]
        return degree

    @property
    def attainment_points(self) -> float:
        """Simulated minus live, in points; by the log, whose requests end when their last work does."""
        points: float = 100 * (self.simulated["attainment"] - self.live["attainment"])
        return points


def run(
    policy: str, seed: int, devices: int, table: Path, workload: Sequence[WorkloadRequest], folder: Path
) -> LiveRun:
    """Start a server, send the workload, stop it, and simulate what its log says. Raises CaseFailed."""
    log, requests = folder / "events.jsonl", folder / "requests.jsonl"
    with serving_simulated(devices, table, policy, log) as server:
        records = asyncio.run(drive(server.url, workload, keep_files=False))
    if failed := [record for record in records if record.status is not CallEnd.DONE]:
        raise CaseFailed(f"{policy}: {len(failed)} requests failed; the first: {failed[0].detail}")
    write_workload(requests, workload)
    on_log = tilework_json(["simulate", "--log", str(log)])
    on_table = tilework_json(
        ["simulate", str(requests), "--cost", str(table), "--devices", str(devices), "--policy", policy]
    )
    return LiveRun(
        policy=policy,
        seed=seed,
        records=records,
        live=on_log["live"],
        simulated=on_log["result"],
        predicted=on_table["result"],
        latency_ratio=on_log["mean_latency_ratio"],
    )
