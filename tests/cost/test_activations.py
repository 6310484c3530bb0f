"""What a work needs on a device beyond weights: rows by size, degree and batch, and what lies between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import PIPELINE, costs, row, sized
from stages import DECODE, DIFFUSE, stage_of
from tilework.core.component import Component, LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.lora import UsedLora
from tilework.core.request import Bounded, Request, Shape
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts

STEP = stage_of(PIPELINE, DIFFUSE)


def needs(pixels: int, activation_bytes: int | None, **fields: Any) -> CostRow:
    return row(pixels, 1.0, activation_bytes=activation_bytes, **fields)


def together(activation_bytes: int, *shapes: Shape) -> CostRow:
    return CostRow.of(shapes, pipeline=PIPELINE, stage=DIFFUSE, seconds=1.0, activation_bytes=activation_bytes)


def of(model: TableCosts, *pixels: int, degree: int = 1) -> int:
    return model.weights.activation_bytes(STEP, [sized(number) for number in pixels], degree)


def shaped(shape: Shape) -> Request:
    return replace(sized(1), shape=shape)


def test_between_sizes_it_is_linear_in_pixels_and_beyond_them_it_goes_on() -> None:
    model = costs(needs(100, 1000), needs(300, 5000))
    assert [of(model, pixels) for pixels in (100, 200, 300, 400)] == [1000, 3000, 5000, 7000]
    assert of(model, 1) == 500, "not below half of the nearest, as seconds"
    assert of(costs(needs(100, 1000)), 250) == 2500, "one size says only what is in proportion"


def test_frames_count_as_pixels() -> None:
    model = costs(needs(100, 1000), needs(300, 5000))
    assert model.weights.activation_bytes(STEP, [shaped(Shape(2, 25, 4))], 1) == 3000


def test_a_degree_without_rows_takes_the_next_lower_one_and_below_all_nothing_is_known() -> None:
    model = costs(needs(100, 1000, degree=2), needs(100, 600, degree=8), needs(100, None, degree=4))
    assert [of(model, 100, degree=degree) for degree in (1, 2, 4, 7, 8, 16)] == [0, 1000, 1000, 1000, 600, 600]


def test_without_rows_of_batches_requests_need_the_sum_of_what_they_need_alone() -> None:
    model = costs(needs(100, 1000), needs(300, 5000))
    assert of(model, 100, 100, 100) == 3000
    assert of(model, 100, 300) == 6000


def test_a_measured_batch_needs_what_was_measured() -> None:
    model = costs(needs(100, 1000), needs(100, 1600, batch=4), together(999, Shape(1, 100), Shape(1, 200)))
    assert of(model, 100, 100, 100, 100) == 1600
    assert of(model, 200, 100) == 999
    assert model.weights.activation_bytes(STEP, [shaped(Shape(200, 1)), shaped(Shape(100, 1))], 1) == 999, "turned"


def test_other_batches_lie_between_measured_ones_and_grow_in_proportion_beyond_them() -> None:
    model = costs(needs(100, 1000), needs(300, 5000), needs(100, 1600, batch=4))
    assert [of(model, *[100] * number) for number in (1, 2, 3, 4, 8)] == [1000, 1200, 1400, 1600, 3200]
    assert of(model, 300, 300) == 6000, "it grows with the number as at the size that was measured"
    assert of(model, 100, 300) == (1200 + 6000) // 2, "each has its part of a batch of its own size"


def test_how_a_batch_grows_is_interpolated_between_sizes() -> None:
    model = costs(needs(100, 1000), needs(300, 5000), needs(100, 1000, batch=2), needs(300, 10_000, batch=2))
    assert of(model, 200, 200) == round(3000 * 1.5)


def test_rows_of_batches_count_at_their_degree_only() -> None:
    model = costs(needs(100, 1000), needs(100, 1100, batch=2), needs(100, 600, degree=2))
    assert (of(model, 100, 100), of(model, 100, 100, degree=2)) == (1100, 1200)


def test_what_no_row_says_is_0() -> None:
    model = costs(row(100, 1.0, peak_bytes=7), needs(100, 5, stage=DECODE))
    assert of(model, 100) == 0, "nothing is derived from peak_bytes"
    assert model.weights.activation_bytes(stage_of(PIPELINE, DECODE), [sized(100)], 1) == 5
    assert model.weights.activation_bytes(stage_of("unknown", DIFFUSE), [sized(100)], 1) == 0
    assert of(costs(needs(100, 1600, batch=2)), 100, 100) == 0, "a batch alone says nothing of its requests"


@pytest.mark.parametrize(("measured", "needed"), [(None, 700), (100, 700), (900, 900)])
def test_a_stage_needs_at_least_what_it_declares(measured: int | None, needed: int) -> None:
    specs = tuple(
        replace(one, memory_bytes=700, components=("vae",)) if one.name == DECODE else one
        for one in latent_diffusion("").specs
    )
    graph = Graph(PIPELINE, specs)
    rows = (needs(100, measured, stage=DECODE), row(100, 1.0))
    vae = Component("vae", 50)
    for memory_bytes, fits in ((49 + needed, False), (50 + needed, True)):
        model = TableCosts(
            CostTable(
                hardware="x",
                rows=rows,
                graphs={PIPELINE: graph},
                components={PIPELINE: {"vae": vae}},
                memory_bytes=memory_bytes,
                load_bytes_per_s=dict.fromkeys(LoadSource, 1e9),
            )
        )
        decode = graph.stage(DECODE)
        assert model.weights.activation_bytes(decode, [sized(100)], 1) == needed
        assert model.fits_together(decode, [sized(100).shape]) is fits
        assert model.weights.most_bytes == 50 + needed


def test_loras_change_nothing() -> None:
    model = costs(needs(100, 1000))
    assert model.weights.activation_bytes(replace(STEP, loras=(UsedLora("ink", 1.0),)), [sized(100)], 1) == 1000


def test_answers_stay_the_same_with_more_shapes_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounded.__init__, "__defaults__", (3,))
    model = costs(needs(100, 1000), needs(300, 5000))
    assert [of(model, pixels) for pixels in [*range(100, 120), *range(100, 120)]] == [
        1000 + 20 * more for more in [*range(20), *range(20)]
    ]


def test_a_table_that_is_served_in_the_place_of_another_has_its_own() -> None:
    model = costs(needs(100, 1000))
    assert of(model, 100) == 1000
    model.serve(replace(model.table, rows=(needs(100, 2000),)))
    assert of(model, 100) == 2000
