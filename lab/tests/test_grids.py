"""Cells of comparisons: the grids, sweeps, and texts that name a workload."""

from __future__ import annotations

from pathlib import Path

import pytest
from compared import summary

from tilework.policy import registry
from tilework.sim.workloads.cells import BadCell, CellDevices, cell_of
from tilework.sim.workloads.family import BadParameter
from tilework.sim.workloads.registry import UnknownWorkload
from tilework_lab.compare.grid import BATCHING, POLICIES, chosen, grid, patchedserve_grid
from tilework_lab.compare.runs import given
from tilework_lab.compare.summary import sweeps_of
from tilework_lab.workloads.tetriserve import TetriServe


def test_the_grid_has_56_cells_of_which_28_are_the_study_s() -> None:
    cells = grid()
    assert len(cells) == len({cell.name for cell in cells}) == 56
    main = [cell for cell in cells if cell.section in ("deadlines", "rates")]
    kinds = {(c.parameters["mix"], c.parameters["scale"], round(60 * c.parameters["rate_per_s"])) for c in main}
    wanted = {(mix, scale, 12) for mix in ("uniform", "skewed") for scale in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)}
    wanted |= {(mix, s, rpm) for mix in ("uniform", "skewed") for s in (1.0, 1.5) for rpm in (6, 9, 12, 15, 18)}
    assert kinds == wanted
    assert {(cell.num_devices, cell.table, cell.parameters["num_requests"]) for cell in main} == {
        (8, "flux1dev_h100_eager", 300)
    }
    assert set(POLICIES) <= set(registry.policy_names())
    for cell in cells:
        given(cell, 0)


def test_patchedserve_has_a_grid_of_its_own() -> None:
    cells = patchedserve_grid()
    assert len(cells) == len({cell.name for cell in cells}) == 46
    assert {(cell.source, cell.table) for cell in cells} == {
        ("patchedserve-sdxl", "sdxl_h100"),
        ("patchedserve-sd3", "sd3_h100"),
    }
    rates = {(cell.num_devices, cell.parameters["rate_per_s"]) for cell in cells if cell.name.startswith("sdxlx")}
    assert rates == {(devices, round(devices * rate, 6)) for devices in (1, 2, 4, 8) for rate in (0.7, 0.9, 1.1, 1.3)}
    assert {cell.parameters["scale"] for cell in cells} == {0.6, 0.8, 1.0, 1.2, 1.4}
    assert set(BATCHING) <= set(registry.policy_names())
    assert not {cell.name for cell in cells} & {cell.name for cell in grid()}
    for cell in cells[::8]:
        given(cell, 0)


def test_sweeps_are_cells_that_differ_in_one_parameter() -> None:
    cells = [summary({"a": [1]}, cell=cell, due=0 if cell.name.startswith("ddit8-r") else 100) for cell in grid()]
    found = sweeps_of(cells)
    assert [(one.parameter, one.cells[0].cell.name, len(one.cells)) for one in found] == [
        ("scale", "flux8-uniform-s1.0-r12", 6),
        ("scale", "flux8-skewed-s1.0-r12", 6),
        ("rate_per_s", "flux8-uniform-s1.0-r6", 7),
        ("rate_per_s", "flux8-uniform-s1.5-r6", 7),
        ("rate_per_s", "flux8-skewed-s1.0-r6", 7),
        ("rate_per_s", "flux8-skewed-s1.5-r6", 7),
        ("rate_per_s", "ddit8-r0.25", 4),
    ]
    assert all(list(one.xs) == sorted(one.xs) for one in found)


def test_a_text_names_a_workload_with_parameters() -> None:
    cell = cell_of("tetriserve,rpm=18,scale=1.2,mix=skewed,num=40", CellDevices())
    assert cell.workload == TetriServe(rate_per_s=0.3, scale=1.2, mix="skewed", num_requests=40)
    assert (cell.table, cell.num_devices) == ("flux1dev_h100_eager", 8)
    other = cell_of("tetriserve", CellDevices(table="x.json", num_devices=3, devices_per_node=2))
    assert (other.table, other.num_devices, other.devices_per_node) == ("x.json", 3, 2)
    assert cell_of("tetriserve", CellDevices(devices_per_node=2)).costs().devices_per_node == 2


def test_a_cell_may_be_a_csv_file_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("arrival_s,height,width,steps\n2,512,512,50\n1,512,512,50\n")
    requests = cell_of(str(path), CellDevices(table="sdxl_h100")).requests(0)
    assert [(one.id, one.arrival_s, one.pipeline) for one in requests] == [(1, 1.0, "sdxl"), (0, 2.0, "sdxl")]


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("tetriserv", UnknownWorkload, "did you mean tetriserve"),
        ("tetriserve,mixx=1", BadParameter, "did you mean mix"),
        ("tetriserve,mix", BadCell, "'mix' is no parameter; write tetriserve,key=value"),
        ("tetriserve,rpm=fast", BadCell, "rpm is 'fast'; use a number"),
        ("tetriserve,rpm=6,rate=1", BadCell, "rate_per_s is set twice"),
        ("tetriserve,rpm=0", BadParameter, "rate_per_s is 0.0; use a number above 0"),
        ("r.jsonl", BadCell, "give --cost"),
        ("r.csv", BadCell, "give --cost"),
    ],
)
def test_a_text_that_names_nothing_is_refused(text: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        cell_of(text, CellDevices())


def test_cells_of_the_grid_are_chosen_by_pattern() -> None:
    assert len(chosen(grid(), "flux8-*-s1.0-r30")) == 2
    with pytest.raises(BadCell, match="no cell of the grid is called 'flux9"):
        chosen(grid(), "flux9*")
