"""The cost of requests: corrections by measurements, steps without guidance, previews."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import PIPELINE, costs, request, row, sized, table
from stages import DECODE, DIFFUSE, ENCODE, STAGES, stage_of
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.work import Member, Work
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, table_json

STEP = stage_of(PIPELINE, DIFFUSE)


def a_step() -> Work:
    return Work(
        work_id=0,
        stage=STEP,
        members=(Member(0, 1, 1, 0),),
        devices=(0,),
        num_steps=1,
        why="",
    )


def step_s(model: TableCosts, pixels: int, **more: Any) -> float:
    return model.run_ns(STEP, (Shape(1, pixels),), **({"degree": 1} | more)) / NS_PER_S


# Corrections.


def observe(model: TableCosts, pixels: int, factor: float, times: int = 1, num_steps: int = 1) -> None:
    base_ns = TableCosts(model.table).run_ns(STEP, (Shape(1, pixels),), 1, num_steps)
    for _ in range(times):
        model.observe(STEP, (sized(pixels),), 1, num_steps, round(base_ns * factor))


@given(factor=st.floats(0.3, 3.9), start=st.floats(0.3, 3.9), num_steps=st.integers(1, 9))
def test_the_correction_converges_to_the_measured_ratio(factor: float, start: float, num_steps: int) -> None:
    model = costs(row(100, 1.0), row(200, 2.0))
    observe(model, 100, start)
    observe(model, 100, factor, times=80, num_steps=num_steps)
    assert step_s(model, 100) == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize(("factor", "expected"), [(3.0, 3.0), (1.3, 1.0)])
def test_a_table_that_is_off_by_more_than_half_is_so_for_what_was_not_measured(factor: float, expected: float) -> None:
    model = costs(row(100, 1.0), row(200, 2.0), row(300, 3.0), row(400, 4.0))
    before = model.version_of(sized(400))
    for pixels in (100, 200, 300):
        assert step_s(model, 400) == pytest.approx(4.0)
        observe(model, pixels, factor)
    assert step_s(model, 400) == pytest.approx(4.0 * expected)
    assert step_s(model, 400, guided=False) == pytest.approx(2.0 * expected)
    assert (model.version_of(sized(400)) > before) == (expected != 1.0)


def test_the_first_measurement_counts_in_full_and_later_ones_by_their_weight() -> None:
    model = costs(row(100, 1.0), weight=0.25)
    observe(model, 100, 2.0)
    assert step_s(model, 100) == 2.0
    observe(model, 100, 3.0)
    assert step_s(model, 100) == 2.25


@pytest.mark.parametrize(("factor", "held"), [(1000.0, 4.0), (0.001, 0.25)])
def test_an_outlier_is_held_within_a_factor_of_four(factor: float, held: float) -> None:
    model = costs(row(100, 1.0))
    observe(model, 100, factor)
    assert step_s(model, 100) == held


@given(factor=st.floats(0.3, 3.9))
def test_a_corrected_table_can_be_written_and_read(factor: float) -> None:
    model = costs(row(100, 1.0, p99_seconds=1.5), row(200, 2.0, p99_seconds=2.0), row(300, 4.0))
    observe(model, 100, factor)
    observe(model, 200, factor)
    read = parse_table(table_json(model.corrected_table()))
    assert [one.seconds for one in read.rows] == pytest.approx([factor, 2 * factor, 4.0], rel=1e-6)
    assert [one.p99_seconds for one in read.rows[:2]] == pytest.approx([1.5 * factor, 2 * factor], rel=1e-6)
    assert read.rows[2].p99_seconds is None


@pytest.mark.parametrize("run_ns", [0, -5])
def test_nothing_is_learned_from_a_measurement_of_no_time(run_ns: int) -> None:
    model = costs(row(100, 1.0))
    model.observe(STEP, (sized(100),), 1, 1, run_ns)
    assert (step_s(model, 100), model.version) == (1.0, 0)


def test_the_version_changes_with_the_answers() -> None:
    model = costs(row(100, 1.0))
    seen = [(model.version, step_s(model, 100))]
    for factor in (1.5, 1.5, 2.0, 1.9):  # The second measurement changes nothing.
        observe(model, 100, factor)
        seen.append((model.version, step_s(model, 100)))
    assert [version for version, _ in seen] == [0, 1, 1, 2, 3]
    assert len({seconds for _, seconds in seen}) == 4


KINDS = [request(f"{side}", side=side, preview_every=previews) for side in (64, 256, 512) for previews in (0, 2)]


def answers(model: TableCosts, asked: Request) -> list[object]:
    stages = [stage_of(PIPELINE, stage) for stage in STAGES]
    alone = [model.work_ns(stage, (asked,), degree) for stage in stages for degree in (1, 2)]
    together = [model.work_ns(STEP, (asked, asked), 1), model.fits_together(STEP, (asked.shape, asked.shape))]
    return [*alone, *together, model.knows(STEP, asked), model.fits(STEP, asked.shape, 1)]


@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(KINDS), st.sampled_from(STAGES), st.integers(1, 2), st.sampled_from([0.5, 1.0, 3.0, inf])
        )
    )
)
def test_the_version_of_a_request_changes_with_the_answers_about_it(
    events: list[tuple[Request, str, int, float]],
) -> None:
    """An event is a measurement of one or two requests, or a work that did not fit."""
    model = TableCosts(table())
    for measured, stage, number, seconds in events:
        before = [(model.version_of(asked), answers(model, asked)) for asked in KINDS]
        group = (measured,) * number
        if seconds < inf:
            model.observe(stage_of(PIPELINE, stage), group, 1, 1, round(seconds * NS_PER_S))
        else:
            model.observe_memory(a_step(), [asked.shape for asked in group], fitted=False, now_ns=0)
        for asked, (version, known) in zip(KINDS, before, strict=True):
            assert model.version_of(asked) != version or answers(model, asked) == known


def test_a_measurement_leaves_the_versions_of_other_sizes() -> None:
    model, small, large = TableCosts(table()), request("small", side=64), request("large", side=128)
    model.observe(STEP, (small,), 1, 1, NS_PER_S)
    assert (model.version_of(small), model.version_of(large)) == (1, 0)
    model.observe(STEP, (small, small), 1, 1, NS_PER_S)
    assert (model.version_of(small), model.version_of(large)) == (2, 2)


def test_a_measurement_changes_no_other_key() -> None:
    rows = [
        row(p, p / 100, stage=s, degree=d, batch=b) for p in (100, 200) for s in STAGES for d in (1, 2) for b in (1, 2)
    ]
    model, fresh = costs(*rows), costs(*rows)
    keys = [
        (stage_of(PIPELINE, stage), (Shape(1, pixels),) * batch, degree)
        for pixels in (100, 200)
        for stage in STAGES
        for degree in (1, 2)
        for batch in (1, 2)
    ]
    before = [model.run_ns(*key) for key in keys]
    assert before == [fresh.run_ns(*key) for key in keys]
    # 200 pixels in two of 100: neither the single of 200 nor the one of 100 may follow.
    observed = (STEP, (Shape(1, 100),) * 2, 1)
    model.observe(STEP, (sized(100),) * 2, 1, 1, 2 * fresh.run_ns(*observed))
    changed = [key for key, old in zip(keys, before, strict=True) if model.run_ns(*key) != old]
    other = (STEP, (Shape(1, 200),) * 2, 1)
    assert changed == [observed, other], "and the batch that has not been measured"
    for _ in range(100):
        model.observe(STEP, (sized(200),) * 2, 1, 1, fresh.run_ns(*other))
    assert model.run_ns(*other) == pytest.approx(fresh.run_ns(*other), rel=0.001)
    assert model.run_ns(*observed) == 2 * fresh.run_ns(*observed)
    assert model.run_ns(*observed) == 2 * fresh.run_ns(*observed)


def test_a_shape_on_its_side_follows_the_correction_also_when_it_was_asked_for_before() -> None:
    model = costs(row(100, 1.0))
    tall, wide = (Shape(20, 5),), (Shape(5, 20),)
    assert model.run_ns(STEP, tall, 1) == model.run_ns(STEP, wide, 1) == NS_PER_S
    model.observe(STEP, (sized(100, height=20),), 1, 1, 3 * NS_PER_S)
    assert model.run_ns(STEP, tall, 1) == model.run_ns(STEP, wide, 1) == 3 * NS_PER_S


# Guidance.


def test_a_step_without_guidance_costs_half_until_it_has_been_measured() -> None:
    model, bare = costs(row(100, 1.0)), sized(100, guided=False)
    assert model.work_ns(STEP, (bare,), 1, 4) == 2 * NS_PER_S
    model.observe(STEP, (bare,), 1, 1, ns_from_s(0.7))
    assert model.work_ns(STEP, (bare,), 1) == ns_from_s(0.7)
    assert model.work_ns(STEP, (sized(100),), 1) == NS_PER_S, "guided steps are not affected"


def test_nothing_is_learned_of_unguided_steps_from_guided_ones() -> None:
    model = costs(row(100, 1.0))
    model.observe(STEP, (sized(100),), 1, 1, ns_from_s(1.5))
    assert model.work_ns(STEP, (sized(100),), 1) == ns_from_s(1.5)
    assert model.work_ns(STEP, (sized(100, guided=False),), 1) == ns_from_s(0.5)


def test_a_work_of_guided_and_unguided_steps_saves_as_much_as_if_all_were_guided() -> None:
    guided, bare = sized(100), sized(100, guided=False)
    assert costs(row(100, 1.0)).work_ns(STEP, (guided, bare), 1, 2) == 3 * NS_PER_S, "nothing is saved"
    model = costs(row(100, 1.0), row(100, 1.6, batch=2), row(100, 2.4, batch=3))
    assert model.work_ns(STEP, (guided, bare), 1) == ns_from_s(0.8 * 1.5)
    assert model.work_ns(STEP, (bare, guided, bare), 1) == ns_from_s(0.8 * 2)
    assert model.work_ns(STEP, (bare, bare), 1) == ns_from_s(0.8)
    model.observe(STEP, (bare,), 1, 1, ns_from_s(0.75))
    assert model.work_ns(STEP, (guided, bare), 1) == ns_from_s(0.8 * 1.75), "what is known of each alone counts"
    model.observe(STEP, (guided, bare), 1, 1, ns_from_s(1.5))
    assert model.work_ns(STEP, (bare, guided), 1) == ns_from_s(1.5)
    assert model.work_ns(STEP, (guided,), 1) == NS_PER_S, "nothing is learned of single requests"


@pytest.mark.parametrize("stage", [ENCODE, DECODE])
def test_guidance_concerns_steps_only(stage: str) -> None:
    model, place = costs(row(100, 1.0, stage=stage), row(100, 1.0)), stage_of(PIPELINE, stage)
    assert model.work_ns(place, (sized(100, guided=False),), 1) == NS_PER_S
    model.observe(place, (sized(100, guided=False),), 1, 1, 2 * NS_PER_S)
    assert model.work_ns(place, (sized(100),), 1) == 2 * NS_PER_S


# Previews.


@pytest.mark.parametrize(("every", "num_steps", "preview_s"), [(0, 10, 0), (1, 10, 0.5), (2, 10, 0.25), (4, 2, 0.025)])
def test_previews_are_spread_evenly_over_the_steps(every: int, num_steps: int, preview_s: float) -> None:
    """A picture of 128 px is its own preview; to decode it takes 50 ms."""
    asked = request("a", preview_every=every)
    model = TableCosts(table())
    assert model.work_ns(STEP, (asked,), 1, num_steps) == ns_from_s(0.1 * num_steps + preview_s)
    assert model.run_ns(STEP, (asked.shape,), 1, num_steps) == ns_from_s(0.1 * num_steps), "the steps alone"
    assert model.work_ns(stage_of(PIPELINE, DECODE), (asked,), 1) == ns_from_s(0.05), "the last decode shows itself"


def test_the_preview_of_a_large_picture_is_small() -> None:
    """Of one of 1024 x 512 px, 256 x 128 are decoded: a quarter of 256 x 512, which takes a second."""
    model = costs(row(131072, 1.0), row(131072, 1.0, stage=DECODE))
    asked = replace(request("a", preview_every=1), shape=Shape(512, 1024))
    assert model.work_ns(STEP, (asked,), 1) == ns_from_s(4.0 + 0.25)


def test_nothing_is_learned_from_a_work_with_previews() -> None:
    model = costs(row(100, 1.0), row(100, 1.0, stage=DECODE))
    model.observe(STEP, (sized(100, preview_every=3),), 1, 6, 9 * NS_PER_S)
    assert model.version == 0


def test_passes_that_arguments_add_are_priced_and_teach_nothing_about_other_requests() -> None:
    model = costs(row(100, 1.0))
    plain, longer = sized(100), replace(sized(100), passes=2.0)
    assert model.work_ns(STEP, [longer], 1, 3) == 2 * model.work_ns(STEP, [plain], 1, 3)
    decode = stage_of(PIPELINE, DECODE)
    assert model.work_ns(decode, [longer], 1) == model.work_ns(decode, [plain], 1)
    version = model.version
    model.observe(STEP, [longer], 1, 1, 5 * NS_PER_S)
    assert model.version == version
