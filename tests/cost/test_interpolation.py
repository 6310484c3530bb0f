"""Costs between and beyond the rows of a table, and those of stages, degrees and frames that have none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from builders import PIPELINE, SIDES, costs, row, sized, table
from stages import DECODE, DIFFUSE, ENCODE, STAGES, stage_of
from tilework.core.cost_row import CostRow
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.table_costs import TableCosts
from tilework.cost.tabled import UnknownCost

STEP = stage_of(PIPELINE, DIFFUSE)


def step_s(model: TableCosts, pixels: int, **more: Any) -> float:
    return model.run_ns(STEP, (Shape(1, pixels),), **({"degree": 1} | more)) / NS_PER_S


def rows_of(data: dict[int, float]) -> tuple[CostRow, ...]:
    return tuple(row(pixels, seconds) for pixels, seconds in data.items())


POINTS = st.dictionaries(st.integers(1, 10_000), st.floats(1e-3, 1e3), min_size=1, max_size=6)


@given(points=POINTS)
@example(points={1: 130.0, 2: 1.9484791944999955})  # The second lies a nanosecond beside the line from the first.
def test_profiled_points_are_exact(points: dict[int, float]) -> None:
    model = costs(*rows_of(points))
    for pixels, seconds in points.items():
        assert model.run_ns(STEP, (Shape(1, pixels),), 1) == ns_from_s(seconds)
        assert model.is_profiled(STEP, Shape(1, pixels))


@given(points=POINTS, pixels=st.lists(st.integers(1, 20_000), min_size=2, max_size=6))
def test_a_monotone_table_gives_monotone_costs(points: dict[int, float], pixels: list[int]) -> None:
    rising = dict(zip(sorted(points), sorted(points.values()), strict=True))
    model = costs(*rows_of(rising))
    answers = [model.run_ns(STEP, (Shape(1, count),), 1) for count in sorted(pixels)]
    assert all(first <= second + 1 for first, second in pairwise(answers))


@given(points=POINTS, pixels=st.integers(1, 20_000))
def test_values_between_two_points_lie_between_theirs(points: dict[int, float], pixels: int) -> None:
    below, above = (
        max((p for p in points if p <= pixels), default=0),
        min((p for p in points if p >= pixels), default=0),
    )
    answer = step_s(costs(*rows_of(points)), pixels)
    if below and above:
        low, high = sorted((points[below], points[above]))
        assert low - 1e-9 <= answer <= high + 1e-9
    else:
        assert answer > 0


def test_it_is_linear_between_points_and_beyond_them_but_never_below_half_the_nearest() -> None:
    model = costs(row(100, 1.0), row(200, 5.0), row(300, 6.0))
    assert step_s(model, 125) == 2.0
    assert step_s(model, 260) == 5.6
    assert step_s(model, 400) == 7.0, "the last two points are extended"
    assert step_s(model, 90) == 0.6, "the first two points are extended"
    assert step_s(model, 50) == 0.5, "half the nearest value; extended it would be negative"
    falling = costs(row(100, 4.0), row(200, 2.0))
    assert step_s(falling, 250) == 1.0
    assert step_s(falling, 400) == 1.0


def test_a_small_shape_is_not_priced_by_a_large_neighbour() -> None:
    """Four times the pixels, four times the time: the smallest profiled size costs what was measured."""
    model = TableCosts(table(step_s=0.1))
    assert [model.run_ns(STEP, (Shape(side, side),), 1) / NS_PER_S for side in SIDES] == [0.025, 0.1, 0.225]


def test_one_point_alone_is_scaled_by_pixels() -> None:
    model = costs(row(100, 2.0))
    assert (step_s(model, 50), step_s(model, 400)) == (1.0, 8.0)


def test_frames_count_as_pixels_and_equal_pixels_are_averaged() -> None:
    model = costs(row(10, 1.0, frames=4), row(20, 3.0, height=2))
    assert step_s(model, 40) == 2.0
    assert model.is_profiled(STEP, Shape(8, 5))
    assert not model.is_profiled(STEP, Shape(1, 41))
    assert not model.is_profiled(STEP, Shape(8, 5), degree=2)


def test_steps_multiply() -> None:
    assert step_s(costs(row(10, 0.5)), 10, num_steps=7) == 3.5


def test_a_stage_that_no_row_mentions_costs_nothing() -> None:
    model = costs(row(10, 1.0))
    for stage in (ENCODE, DECODE):
        assert model.run_ns(stage_of(PIPELINE, stage), (Shape(1, 10),), 1) == 0
    model.observe(stage_of(PIPELINE, ENCODE), (sized(10),), 1, 1, NS_PER_S)
    assert model.run_ns(stage_of(PIPELINE, ENCODE), (Shape(1, 10),), 1) == 0, "zero times any correction is zero"
    assert model.version == 0


def test_an_unknown_pipeline_is_an_error_that_names_the_known_ones() -> None:
    model = costs(row(10, 1.0, pipeline="b"), row(10, 1.0, pipeline="a"))
    with pytest.raises(UnknownCost, match=r"pipeline 'c' is not in the cost table; it knows a, b$"):
        model.run_ns(stage_of("c", DIFFUSE), (Shape(1, 1),), 1)


@pytest.mark.parametrize("stage", STAGES)
def test_a_profiled_stage_at_an_unprofiled_degree_is_as_fast_as_the_next_narrower_one(stage: str) -> None:
    known, shapes = stage_of(PIPELINE, stage), (Shape(1, 10),)
    model = costs(*(row(10, seconds, stage=stage, degree=degree) for degree, seconds in ((2, 1.0), (4, 0.6))))
    assert [model.run_ns(known, shapes, degree) / NS_PER_S for degree in (2, 3, 4, 5, 8)] == [1.0, 1.0, 0.6, 0.6, 0.6]
    assert model.run_ns(known, shapes * 2, 3) == 2 * NS_PER_S
    assert model.degrees(known) == (2, 4)
    with pytest.raises(UnknownCost, match=f"{PIPELINE}/{stage} was not profiled at degree 1, nor below it"):
        model.run_ns(known, shapes, 1)


def test_the_degrees_are_those_at_which_single_requests_have_a_price() -> None:
    model = costs(
        row(10, 0.4, degree=4),
        row(10, 1.0),
        row(20, 2.0),
        row(10, 0.3, degree=8, batch=2),
        row(10, 0.7, stage=DECODE, degree=2),
    )
    assert model.degrees(STEP) == (1, 4)
    assert model.degrees(stage_of(PIPELINE, DECODE)) == (2,)
    assert model.degrees(stage_of(PIPELINE, ENCODE)) == (1,), "it costs nothing"
    for stage in (STEP, stage_of(PIPELINE, DECODE)):
        assert all(model.run_ns(stage, (Shape(1, 10),), degree) for degree in model.degrees(stage))
    with pytest.raises(UnknownCost, match=r"pipeline 'c' is not in the cost table; it knows toy$"):
        model.degrees(stage_of("c", ENCODE))


def test_degrees_are_priced_by_their_own_rows() -> None:
    model = costs(row(10, 1.0), row(20, 2.0), row(10, 0.6, degree=2), row(20, 1.1, degree=2))
    assert (step_s(model, 10), step_s(model, 10, degree=2), step_s(model, 20, degree=2)) == (1.0, 0.6, 1.1)
