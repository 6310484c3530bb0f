"""Costs of clips grow with their latents: one latent frame holds several frames, after the first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from builders import PIPELINE, sized
from stages import DECODE, DIFFUSE, stage_of
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.model import ModelInfo
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table, table_json

STEP = stage_of(PIPELINE, DIFFUSE)
WAN = replace(latent_diffusion(PIPELINE), frames_per_latent=4)


def clip(side: int, frames: int, seconds: float, **fields: int) -> CostRow:
    return CostRow(pipeline=PIPELINE, stage=DIFFUSE, height=side, width=side, frames=frames, seconds=seconds, **fields)


def model(*rows: CostRow, graph: Graph = WAN) -> TableCosts:
    return TableCosts(CostTable(hardware="toy", rows=rows, graphs={PIPELINE: graph}))


def step_s(costs: TableCosts, *shapes: Shape) -> float:
    return costs.run_ns(STEP, shapes, 1) / NS_PER_S


@pytest.mark.parametrize(("frames", "latents"), [(1, 1), (5, 2), (17, 5), (81, 21)])
def test_a_single_row_is_scaled_by_latent_frames(frames: int, latents: int) -> None:
    costs = model(clip(64, 17, 5.0, activation_bytes=500))
    assert step_s(costs, Shape(64, 64, frames)) == pytest.approx(latents)
    assert costs.weights.activation_bytes(STEP, (replace(sized(1), shape=Shape(64, 64, frames)),), 1) == 100 * latents


def test_a_size_of_as_many_latents_costs_the_same() -> None:
    """Four times the pixels of a frame, and 5 latent frames in place of 20."""
    costs = model(clip(64, 77, 20.0), clip(64, 157, 40.0))
    assert step_s(costs, Shape(128, 128, 17)) == pytest.approx(20.0)
    assert costs.is_profiled(STEP, Shape(128, 128, 17))
    assert not costs.is_profiled(STEP, Shape(128, 128, 21))


def test_savings_of_batches_go_by_latents() -> None:
    costs = model(clip(64, 17, 5.0), clip(64, 33, 9.0), clip(64, 17, 8.0, batch=2), clip(64, 33, 14.0, batch=2))
    assert step_s(costs, Shape(64, 64, 25), Shape(64, 64, 25)) == pytest.approx(11.0)
    assert step_s(costs, Shape(128, 128, 1), Shape(128, 128, 1)) == pytest.approx(4.0 + 4.0 - 2.0)


def test_without_it_each_frame_counts() -> None:
    assert step_s(model(clip(64, 17, 17.0), graph=latent_diffusion(PIPELINE)), Shape(64, 64, 5)) == pytest.approx(5.0)


def test_it_survives_the_file_and_another_name(tmp_path: Path) -> None:
    table = CostTable(hardware="toy", rows=(clip(64, 17, 5.0),), graphs={PIPELINE: WAN})
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table_json(table)), "utf-8")
    assert read_table(path) == table
    assert WAN.renamed("other").frames_per_latent == 4


def test_a_model_says_it_by_the_multiple_of_its_frames() -> None:
    info = ModelInfo(
        name=PIPELINE,
        family="wan",
        side_multiple=16,
        max_side=1280,
        default_height=480,
        default_width=832,
        default_steps=50,
        default_guidance_scale=5.0,
        parameters=1,
        library="",
        frame_multiple=4,
    )
    assert info.graph == WAN
    assert info.graph.stage(DECODE)
