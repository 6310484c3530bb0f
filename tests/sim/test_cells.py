"""Models that exceed one device: several devices of a node count as one, a cell. Modelled, not live."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import simulate
from tilework.core.component import LoadSource
from tilework.core.request import Request, Shape, Status
from tilework.core.time import NS_PER_S
from tilework.cost.table import BadCostTable, CostTable, in_cells, in_smallest_cells
from tilework.cost.table_file import read_table

PIPELINE, SMALL, LARGE = "hunyuanvideo", Shape(544, 960, 17), Shape(720, 1280, 65)
TOO_LITTLE = 24_000_000_000
"""A device with this memory cannot hold the denoiser, which has 25.6 GB."""


@pytest.fixture(scope="module")
def narrow() -> CostTable:
    return replace(read_table("hunyuanvideo_l20"), memory_bytes=TOO_LITTLE)


def seconds(table: CostTable, stage: str, shape: Shape, degree: int) -> float:
    key = stage, (shape,), degree
    (found,) = [row.seconds for row in table.rows if (row.stage, row.shapes, row.degree) == key]
    return found


def test_a_cell_takes_what_its_devices_take_together() -> None:
    whole = read_table("hunyuanvideo_l20")
    cells = in_cells(whole, 2)
    assert cells == read_table("hunyuanvideo_l20,cell=2")
    assert whole == read_table("hunyuanvideo_l20,cell=auto")
    assert cells.devices_per_node * 2 == whole.devices_per_node
    assert whole.memory_bytes is not None
    assert cells.memory_bytes == 2 * whole.memory_bytes
    for degree in (1, 2, 4):
        assert seconds(cells, "diffuse", LARGE, degree) == seconds(whole, "diffuse", LARGE, 2 * degree)
    assert seconds(cells, "encode", LARGE, 1) == seconds(whole, "encode", LARGE, 1), "it has no other degree"
    speeds = [table.load_bytes_per_s for table in (whole, cells)]
    assert speeds[1][LoadSource.HOST] == 2 * speeds[0][LoadSource.HOST], "each loads its part"
    assert speeds[1][LoadSource.DISK] == speeds[0][LoadSource.DISK], "they share the disk"


def test_activations_of_a_cell_are_those_of_its_devices() -> None:
    cells = in_cells(whole := read_table("hunyuanvideo_l20"), 4)

    def needed(table: CostTable, degree: int) -> tuple[int, int]:
        (row,) = [one for one in table.rows if (one.stage, one.shape, one.degree) == ("diffuse", LARGE, degree)]
        assert row.activation_bytes is not None
        assert row.peak_bytes is not None
        return row.activation_bytes, row.peak_bytes - row.activation_bytes

    (cell, weights), (device, same) = needed(cells, 1), needed(whole, 4)
    assert (cell, weights) == (4 * device, same)


@pytest.mark.parametrize("policy", ["tilework", "tridentserve", "edf"])
def test_a_model_that_exceeds_one_device_is_served_by_cells(narrow: CostTable, policy: str) -> None:
    requests = [
        Request(
            uid=f"r{index}",
            pipeline=PIPELINE,
            shape=LARGE if index == 2 else SMALL,
            steps=6,
            arrival_ns=index * NS_PER_S,
            seed=index,
            deadline_ns=None if index % 2 else 600 * NS_PER_S,
        )
        for index in range(5)
    ]
    alone = simulate(requests, policy, num_devices=8, costs=narrow)
    assert {one.status for one in alone.endings} == {Status.REJECTED}
    cells = simulate(requests, policy, num_devices=4, costs=in_cells(narrow, 2))
    assert {one.status for one in cells.endings} == {Status.DONE}


@pytest.mark.parametrize(
    ("memory_bytes", "size"), [(None, 1), (48_000_000_000, 1), (TOO_LITTLE, 2), (8_000_000_000, 8)]
)
def test_the_smallest_cell_in_which_all_that_was_measured_fits(memory_bytes: int | None, size: int) -> None:
    whole = replace(read_table("hunyuanvideo_l20"), memory_bytes=memory_bytes)
    assert in_smallest_cells(whole) == (whole if size == 1 else in_cells(whole, size))


def test_what_fits_in_no_cell_of_a_node_is_named() -> None:
    whole = replace(read_table("hunyuanvideo_l20"), memory_bytes=1_000_000_000)
    with pytest.raises(
        BadCostTable, match=r"of 'hunyuanvideo' at \S+ needs \d+ bytes on each of its 8 devices, and memory"
    ):
        in_smallest_cells(whole)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hunyuanvideo_l20,cell=3", "cell=3 does not divide the 8 devices of a node"),
        ("hunyuanvideo_l20,cell=0", "cell=0 does not divide"),
        ("hunyuanvideo_l20,cells=2", "'cells=2' is no option of a cost table; give cell=N or cell=auto"),
        ("hunyuanvideo_l20,cell=two", "'cell=two' is no option"),
    ],
)
def test_a_cell_that_cannot_be_says_why(name: str, words: str) -> None:
    with pytest.raises(BadCostTable, match=words):
        read_table(name)


def test_cells_have_no_devices_by_pipeline(narrow: CostTable) -> None:
    with pytest.raises(BadCostTable, match="leave devices out"):
        in_cells(replace(narrow, devices={PIPELINE: (0, 1)}), 2)
