"""The cost of batches: rows of one size and of several, interpolation between them, and corrections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import PIPELINE, costs, row, sized
from stages import DIFFUSE, stage_of
from tilework.core.cost_row import CostRow
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.rows import merge_rows, missing_batches, row_key
from tilework.cost.table import BadCostTable, CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, table_json

GRAPH = latent_diffusion(PIPELINE)
STEP = stage_of(PIPELINE, DIFFUSE)
SMALL, WIDE, LARGE = Shape(512, 512), Shape(512, 768), Shape(1024, 1024)
FIELDS = {"pipeline": PIPELINE, "stage": DIFFUSE}


def turned(shape: Shape) -> Shape:
    return Shape(shape.width, shape.height, shape.frames)


def together(seconds: float, *shapes: Shape, **more: Any) -> CostRow:
    return CostRow.of(shapes, **FIELDS, seconds=seconds, **more)


def batch_s(model: TableCosts, *shapes: Shape) -> float:
    return model.run_ns(STEP, shapes, 1) / NS_PER_S


def thin(*pixels: int) -> tuple[Shape, ...]:
    return tuple(Shape(1, count) for count in pixels)


# Rows.


def test_a_row_of_a_batch_has_one_form_whatever_the_order() -> None:
    mixed = together(1.0, LARGE, SMALL, turned(WIDE), SMALL)
    assert mixed == together(1.0, SMALL, turned(WIDE), LARGE, SMALL)
    assert mixed.batch == mixed.shapes == (SMALL, SMALL, turned(WIDE), LARGE)
    assert mixed.shape == LARGE
    alike = together(1.0, SMALL, SMALL, SMALL)
    assert (alike.batch, alike.shape, alike.shapes) == (3, SMALL, (SMALL,) * 3)
    assert together(1.0, SMALL).batch == 1


def test_mixed_rows_survive_a_file_in_which_their_members_have_any_order() -> None:
    table = CostTable(hardware="toy", rows=(together(1.0, SMALL, LARGE, SMALL, p99_seconds=2.0), together(0.3, SMALL)))
    document = json.loads(json.dumps(table_json(table)))
    assert document["rows"][0]["batch"] == ["512x512", "512x512", "1024x1024"]
    assert (document["rows"][0]["height"], document["rows"][1]["batch"]) == (1024, 1)
    document["rows"][0]["batch"].reverse()
    assert parse_table(document) == table


def test_of_two_largest_members_either_may_give_the_row_its_size() -> None:
    rows = [FIELDS | {"seconds": 1, "height": h, "width": w, "batch": ["6x4", "4x6"]} for h, w in ((4, 6), (6, 4))]
    first, second = parse_table({"rows": rows}).rows
    assert first == second


@pytest.mark.parametrize(
    "batch", [[], ["512x512"], ["512x512", "512x512"], ["512x512", "wide"], ["512x512", 7], [512, 1024], "512x512", {}]
)
def test_an_invalid_batch_is_named(batch: object) -> None:
    given = FIELDS | {"height": 512, "width": 512, "seconds": 1, "batch": batch}
    with pytest.raises(BadCostTable) as caught:
        parse_table({"rows": [given]})
    wanted = 'a whole number of at least 1, or a list of shapes that differ, such as ["512x512", "1024x768"]'
    assert str(caught.value) == f"rows[0].batch is {batch!r}; expected {wanted}"


@pytest.mark.parametrize("side", [512, 2048])
def test_a_mixed_row_has_the_size_of_its_largest_member(side: int) -> None:
    given = FIELDS | {"height": side, "width": side, "seconds": 1, "batch": ["512x512", "1024x1024"]}
    with pytest.raises(
        BadCostTable, match=rf"^rows\[0\] is of {side}x{side} and its batch .*of the largest, 1024x1024$"
    ):
        parse_table({"rows": [given]})


def test_rows_of_different_batches_have_different_keys() -> None:
    rows = [
        together(1.0, SMALL, LARGE),
        together(1.0, SMALL, SMALL, LARGE),
        together(1.0, LARGE),
        together(1.0, *[LARGE] * 2),
    ]
    assert len({row_key(one) for one in rows}) == 4
    merged = merge_rows([*rows, together(3.0, LARGE, SMALL)])
    assert merged == (replace(rows[0], seconds=2.0), *rows[1:])
    assert missing_batches(rows[:2], GRAPH, ((LARGE,), (LARGE, SMALL), (LARGE, LARGE)), 1) == (
        (LARGE,),
        (LARGE, LARGE),
    )


# Prices.

UNIFORM = (row(10, 1.0), row(30, 4.0), row(10, 1.6, batch=2), row(30, 7.6, batch=2))


def test_without_measured_batches_nothing_is_saved() -> None:
    model = costs(*UNIFORM[:2])
    assert batch_s(model, *thin(10, 30, 10)) == 6.0


def test_a_measured_batch_has_its_own_price_and_others_save_as_much_per_member() -> None:
    """Two of 10 save 0.4 s, and so do two of 30: that is what each member beyond the first saves."""
    model = costs(*UNIFORM)
    assert batch_s(model, *thin(10, 10)) == 1.6
    assert batch_s(model, *thin(20, 20)) == pytest.approx(5.0 - 0.4)
    assert batch_s(model, *thin(10, 30)) == pytest.approx(5.0 - 0.4)
    assert batch_s(model, *thin(10, 30, 10)) == pytest.approx(6.0 - 0.8)


def test_savings_are_linear_between_sizes_and_numbers_and_constant_beyond() -> None:
    """Beyond the first each member saves: of 10 pixels 0.2 of two and 0.6 of four, of 30 pixels 0.4 of two."""
    model = costs(row(10, 1.0), row(30, 3.0), row(10, 1.8, batch=2), row(30, 5.6, batch=2), row(10, 2.2, batch=4))
    assert batch_s(model, *thin(15, 15)) == pytest.approx(3.0 - 0.25)
    assert batch_s(model, *thin(10, 10, 10)) == pytest.approx(3.0 - 2 * 0.4)
    assert batch_s(model, *thin(10, 10, 10, 10, 10)) == pytest.approx(5.0 - 4 * 0.6)
    assert batch_s(model, *thin(60, 60)) == pytest.approx(12.0 - 0.4)


def test_in_a_mix_every_member_saves_except_the_one_that_would_save_most() -> None:
    model = costs(row(10, 1.0), row(30, 3.0), row(10, 1.7, batch=2), row(30, 5.9, batch=2))
    assert batch_s(model, *thin(10, 30)) == pytest.approx(4.0 - 0.1)
    assert batch_s(model, *thin(10, 10, 30)) == pytest.approx(5.0 - 0.4)


def test_a_batch_measured_as_dearer_than_its_members_keeps_that_price() -> None:
    model = costs(row(10, 1.0), row(10, 2.5, batch=2))
    assert batch_s(model, *thin(10, 10)) == 2.5
    assert batch_s(model, *thin(10, 10, 10)) == 4.0


def test_no_batch_is_cheaper_than_its_longest_member() -> None:
    model = costs(row(10, 1.0), row(30, 3.0), row(10, 1.0, batch=2))
    assert batch_s(model, *thin(10, 10, 10)) == 1.0
    assert batch_s(model, *thin(10, 10, 30)) == 3.0


def test_a_batch_at_another_degree_follows_the_rows_of_that_degree() -> None:
    model = costs(*UNIFORM, row(10, 0.6, degree=2))
    assert model.run_ns(STEP, thin(10, 10), 2) == ns_from_s(1.2)


def test_a_table_with_one_measured_batch_knows_only_that_batch() -> None:
    model = costs(together(1.0, SMALL, LARGE))
    assert batch_s(model, LARGE, SMALL) == 1.0
    with pytest.raises(LookupError, match="was not profiled at degree 1, nor below it, at batch 2 or 1"):
        batch_s(model, SMALL, SMALL)


SHAPES = st.sampled_from([SMALL, WIDE, LARGE, Shape(768, 768), Shape(512, 512, 2)])
BATCHES = st.lists(SHAPES, min_size=2, max_size=6)
SECONDS = st.floats(0.01, 10)


@st.composite
def tables(draw: st.DrawFn) -> tuple[CostRow, ...]:
    """Some shapes alone, some batches of one shape, some mixes; no two rows have the same key."""
    alone = draw(st.lists(st.tuples(SHAPES), min_size=1, max_size=4))
    batches = draw(
        st.lists(st.one_of(BATCHES, st.builds(lambda one, n: [one] * n, SHAPES, st.integers(2, 5))), max_size=6)
    )
    rows = {row_key(one): one for one in (together(draw(SECONDS), *shapes) for shapes in [*alone, *batches])}
    return tuple(rows.values())


@given(rows=tables(), batch=BATCHES, seed=st.integers(0, 100))
def test_neither_order_nor_turning_makes_a_difference(rows: Sequence[CostRow], batch: list[Shape], seed: int) -> None:
    model, rng = costs(*rows), Random(seed)
    other = [turned(shape) for shape in batch]
    rng.shuffle(other)
    assert model.run_ns(STEP, other, 1) == model.run_ns(STEP, batch, 1)
    shuffled = [replace(one) for one in rows]
    rng.shuffle(shuffled)
    assert costs(*shuffled).run_ns(STEP, batch, 1) == model.run_ns(STEP, batch, 1)


@given(rows=tables(), batch=BATCHES)
def test_a_measured_batch_costs_its_measured_time_and_others_at_least_their_longest_member(
    rows: Sequence[CostRow], batch: list[Shape]
) -> None:
    model = costs(*rows)
    for one in rows:
        if one.batch != 1:
            assert model.run_ns(STEP, one.shapes, 1) == ns_from_s(one.seconds)
    if sorted(batch) not in [sorted(one.shapes) for one in rows]:
        dearest = max(model.run_ns(STEP, (shape,), 1) for shape in batch)
        assert model.run_ns(STEP, batch, 1) >= dearest - 1


@given(fixed=st.floats(0, 1), batch=st.lists(st.integers(100, 200), min_size=2, max_size=8))
def test_the_fixed_cost_of_a_forward_pass_is_found_exactly(fixed: float, batch: list[int]) -> None:
    """A fixed part and a part by pixels: two sizes, alone and in pairs, determine both."""
    rows = [row(pixels, fixed + pixels * count * 0.01, batch=count) for pixels in (100, 200) for count in (1, 2)]
    assert batch_s(costs(*rows), *thin(*batch)) == pytest.approx(fixed + sum(batch) * 0.01)


def test_the_extra_cost_of_a_measured_mix_applies_to_other_mixes_as_a_share() -> None:
    """The savings of batches of one size predict 4.6 s for the mix; it took a fifth of 5 s more."""
    model = costs(*UNIFORM, together(5.6, *thin(10, 30)))
    assert batch_s(model, *thin(10, 30)) == 5.6
    assert batch_s(model, *thin(10, 10, 30)) == pytest.approx(6.0 - 0.8 + 6.0 / 5)
    assert batch_s(model, *thin(10, 10, 10)) == pytest.approx(3.0 - 0.8), "this is no mix"


def beyond_s(first: float, second: float, *asked: int) -> float:
    """What a mix takes beyond its members, if mixes of 4 s and of 8 s took this much more."""
    mixes = (together(4.0 + first, *thin(10, 30)), together(8.0 + second, *thin(10, 10, 30, 30)))
    return batch_s(costs(row(10, 1.0), row(30, 3.0), *mixes), *thin(*asked)) - sum(asked) / 10


@pytest.mark.parametrize(
    ("first", "second", "fixed", "share"),
    [(0.7, 1.1, 0.3, 0.1), (0.5, 0.5, 0.5, 0.0), (0.4, 0.8, 0.0, 0.1), (-0.4, -0.8, 0.0, -0.1)],
)
def test_the_fixed_part_and_the_share_of_mixing_are_separated(
    first: float, second: float, fixed: float, share: float
) -> None:
    assert beyond_s(first, second, 10, 20, 30) == pytest.approx(fixed + 6.0 * share)


def test_neither_part_is_negative_so_that_other_mixes_stay_plausible() -> None:
    assert 7.0 * 0.3 / 4 < beyond_s(0.3, 0.8, 10, 30, 30) < 7.0 * 0.8 / 8, "a share alone"
    assert 0.2 < beyond_s(0.6, 0.2, 10, 30, 30) < 0.6, "a fixed part alone"
    assert beyond_s(0.6, 0.2, 10, 30, 30) == pytest.approx(beyond_s(0.6, 0.2, 10, 20))


def test_a_batch_with_some_turned_members_is_a_mix() -> None:
    model = costs(*(together(1.5 * n**0.5, *[WIDE] * n) for n in (1, 2)), together(9.0, WIDE, turned(WIDE)))
    assert batch_s(model, turned(WIDE), WIDE) == 9.0
    assert batch_s(model, turned(WIDE), turned(WIDE)) == pytest.approx(1.5 * 2**0.5)


def test_one_more_member_costs_more_if_members_save_less_than_they_cost() -> None:
    model = costs(*UNIFORM)
    batches = [thin(*[10] * count) for count in range(1, 9)]
    assert all(batch_s(model, *few) < batch_s(model, *many) for few, many in pairwise(batches))


# Corrections.


def test_a_measured_batch_corrects_batches_of_as_many_pixels_and_members() -> None:
    model = costs(*UNIFORM)
    model.observe(STEP, (sized(10), sized(30)), 1, 1, ns_from_s(9.2))
    assert batch_s(model, *thin(10, 30)) == 9.2
    assert batch_s(model, *thin(30, 10)) == 9.2
    assert batch_s(model, *thin(20, 20)) == pytest.approx(9.2), "as many pixels"
    assert batch_s(model, *thin(10)) == 1.0
    before = batch_s(model, *thin(10, 10, 20))
    model.observe(STEP, (sized(10), sized(30)), 1, 1, ns_from_s(4.6))
    assert batch_s(model, *thin(10, 10, 20)) < before, (
        "as many pixels, but three members: corrected like recent batches"
    )
    assert batch_s(model, *thin(20, 20)) == batch_s(model, *thin(10, 30))


def test_an_unmeasured_batch_is_corrected_like_its_members() -> None:
    """Everything takes twice as long as in the table: this is known of a batch before it has run."""
    model = costs(row(100, 1.0), row(100, 1.2, batch=2))
    one, other = sized(100), sized(100)
    assert model.work_ns(STEP, (one, other), 1) == pytest.approx(1.2e9)
    model.observe(STEP, (one,), 1, 1, 2_000_000_000)
    assert model.work_ns(STEP, (one, other), 1) == pytest.approx(2.4e9)
    model.observe(STEP, (one, other), 1, 1, 3_600_000_000)
    assert model.work_ns(STEP, (one, other), 1) == pytest.approx(3.6e9), "its own measurement"
    assert model.correction(STEP, (one, other), 1) == pytest.approx(3.0)
    assert model.work_ns(STEP, (one,), 1) == pytest.approx(2e9)
    model.observe(STEP, (one,), 1, 1, 1_000_000_000)
    assert model.work_ns(STEP, (one, other), 1) == pytest.approx(3.6e9 * 1.9 / 2), "faster alone, faster together"


def test_the_savings_of_batches_have_a_correction_of_their_own() -> None:
    """In the table single requests take four times as long as they do; batches save nothing in fact."""
    model = costs(row(10, 1.0), row(20, 2.0), row(10, 1.0, batch=2))
    for _ in range(2):
        model.observe(STEP, (sized(10),), 1, 1, ns_from_s(0.25))
        model.observe(STEP, (sized(20),), 1, 1, ns_from_s(0.5))
    assert batch_s(model, *thin(10, 20)) == pytest.approx(0.5), (
        "by the table a batch takes half of its members one by one"
    )
    for _ in range(3):
        model.observe(STEP, (sized(10), sized(10)), 1, 1, ns_from_s(0.5))
    assert batch_s(model, *thin(10, 10)) == pytest.approx(0.5)
    assert batch_s(model, *thin(10, 20)) >= 0.75, "batches save nothing, so this one is predicted to save nothing"
    model.observe(STEP, (sized(10),), 1, 1, ns_from_s(0.25))
    assert batch_s(model, *thin(10, 20)) >= 0.75, "whatever single requests take"


def test_the_time_alone_is_known_after_three_runs_in_the_table_or_one_of_its_own() -> None:
    model = costs(
        row(10, 1.0, num_runs=3), row(20, 2.0, num_runs=2), row(40, 4.0), row(80, 8.0, batch=2), row(5, 1.0, num_runs=0)
    )
    known = [pixels for pixels in (5, 10, 15, 20, 40, 80) if model.knows(STEP, sized(pixels))]
    assert known == [10, 40], "published tables do not count runs"
    model.observe(STEP, (sized(20), sized(20)), 1, 1, NS_PER_S)
    assert not model.knows(STEP, sized(20))
    for pixels in (15, 20):
        model.observe(STEP, (sized(pixels),), 1, 1, NS_PER_S)
        assert model.knows(STEP, sized(pixels))
    assert not model.knows(STEP, sized(10, guided=False)), "tables are of guided steps"
    model.observe(STEP, (sized(10, guided=False),), 1, 1, NS_PER_S)
    assert model.knows(STEP, sized(10, guided=False))


def test_prediction_error_is_the_recent_error_of_batches() -> None:
    model, pair = costs(row(10, 1.0), row(10, 1.2, batch=2)), (sized(10), sized(10))
    assert model.prediction_error(STEP) == 0.0
    model.observe(STEP, pair, 1, 1, ns_from_s(1.8))
    assert model.prediction_error(STEP) == pytest.approx(0.1 * 0.5)
    model.observe(STEP, (sized(10),), 1, 1, ns_from_s(5.0))
    assert model.prediction_error(STEP) == pytest.approx(0.05), "single requests do not count"
    version = model.version
    model.observe(STEP, pair, 1, 1, model.work_ns(STEP, pair, 1))
    assert model.prediction_error(STEP) == pytest.approx(0.045)
    assert model.version == version + 1, "a policy's decision may depend on it"
