"""The cost table of the workload: checkpoints, their inference times, and how long they take to load."""

from __future__ import annotations

from tilework.core.component import Component, LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import StageSpec, StepShare
from tilework.core.request import Shape
from tilework.cost.table import CostTable
from tilework_lab.workloads.gentd26.fit import CheckpointFit, Fit, read_fit

IMAGES = (1, 2, 4, 8)
CHECKPOINT_BYTES = 3_400_000_000
"""Ours, since the trace has no file sizes. Only the ratios to memory and speeds matter."""
HOST_S, DISK_S = 3.4, 32.8
"""Seconds to load a checkpoint from the host's memory and from storage, the trace's two modes."""
ON_DEVICE = 2
ON_HOST = 6
"""Number of checkpoints that a device has room for, and the host of a node."""
_SOURCE = (
    "Made by tilework_lab.workloads.gentd26.table from parameters fitted to GenTD26 (cluster-trace-v2026-GenAI of "
    "github.com/alibaba/clusterdata; Lin et al., SoCC 2025); no row of the trace is here. Inference of one picture in "
    "30 steps: the 10th percentile of the trace's seconds for that checkpoint. Loads: the trace's modes, 3.4 s from "
    "the host's memory and 32.8 s from storage. Ours: times by size and by pictures, bytes, and room for 2 checkpoints "
    "on a device and 6 on the host. A request for n pictures has n frames. One stage, on one device."
)


def make_table() -> CostTable:
    """Return the table that ships as `gentd26`."""
    fit = read_fit()
    speeds = {LoadSource.DISK: CHECKPOINT_BYTES / DISK_S, LoadSource.HOST: CHECKPOINT_BYTES / HOST_S}
    return CostTable(
        hardware="simulated GPU of an unknown type",
        sources={one.pipeline: _SOURCE for one in fit.checkpoints},
        devices_per_node=4,
        steps=30,
        rows=tuple(row for checkpoint in fit.checkpoints for row in _rows(fit, checkpoint)),
        graphs={one.pipeline: _graph(one.pipeline) for one in fit.checkpoints},
        components={one.pipeline: {"checkpoint": Component(one.pipeline, CHECKPOINT_BYTES)} for one in fit.checkpoints},
        memory_bytes=ON_DEVICE * CHECKPOINT_BYTES,
        host_bytes=ON_HOST * CHECKPOINT_BYTES,
        load_bytes_per_s=speeds,
    )


def _rows(fit: Fit, checkpoint: CheckpointFit) -> list[CostRow]:
    """Return one row for each number of pixels, which is all that a time depends on."""
    by_pixels: dict[int, CostRow] = {}
    for size in checkpoint.sizes:
        for images in IMAGES:
            shape = Shape(size.height, size.width, images)
            seconds = fit.step_s(checkpoint, size, images)
            row = CostRow.of((shape,), pipeline=checkpoint.pipeline, stage="infer", seconds=round(seconds, 6))
            assert by_pixels.setdefault(shape.pixels, row).seconds == row.seconds, f"{shape} is like another"
    return list(by_pixels.values())


def _graph(pipeline: str) -> Graph:
    return Graph(
        pipeline,
        (
            StageSpec(
                name="infer", components=("checkpoint",), inputs=("prompt",), outputs=("pictures",), steps=StepShare()
            ),
        ),
    )
