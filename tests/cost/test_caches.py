"""Rows of steps with a cache: their file format, and what they say of single requests, batches and other caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import PIPELINE, batched, request, row, table
from cost.test_batch_latency import batch_model
from stages import DECODE, DIFFUSE, stage_of
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.cost_row import CostRow
from tilework.core.graph.stage import Stage
from tilework.core.request import Shape
from tilework.cost.profile import Profile, ProfileKey, ProfileOrigin
from tilework.cost.profiles import Profiles
from tilework.cost.rows import merge_rows, missing_batches
from tilework.cost.table import BadCostTable, CostTable, in_cells
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, table_json

LOW, MIDDLE, HIGH = (CacheChoice(CacheKind.PATCH, threshold) for threshold in (0.001, 0.003, 0.01))


def cached(side: int, time: float, choice: CacheChoice = MIDDLE, **more: Any) -> CostRow:
    """A row beside that of `batched` of one output, or of several of one side."""
    place = DIFFUSE, side, more.get("batch", 1), 1
    (one,) = [one for one in batched().rows if (one.stage, one.height, one.batch, one.degree) == place]
    return replace(one, seconds=time * one.seconds, **{"cache": choice, "skipped": 0.4, "skipped_std": 0.1} | more)


def with_rows(*rows: CostRow) -> CostTable:
    plain = [one for one in batched().rows if one.seconds]
    return replace(batched(), rows=(*plain, *rows))


def step(choice: CacheChoice | None) -> Stage:
    return replace(stage_of(PIPELINE, DIFFUSE), caches=() if choice is None else (choice,))


def time_share(costs: TableCosts, *sides: int, choice: CacheChoice = MIDDLE, degree: int = 1) -> float:
    """What steps take with a cache over what they take without."""
    shapes = [Shape(side, side) for side in sides]
    return costs.run_ns(step(choice), shapes, degree) / costs.run_ns(step(None), shapes, degree)


def test_rows_with_a_cache_survive_file_and_database(tmp_path: Path) -> None:
    full = with_rows(cached(64, 0.5), cached(128, 0.7))
    assert parse_table(table_json(full)) == full
    key = ProfileKey(
        hardware="a", architecture="M@1", model="m@1", dtype="float32", threads=1, workers=1, libraries="torch"
    )
    store = Profiles(tmp_path / "profiles.sqlite3")
    profile = Profile(key=key, origin=ProfileOrigin.PROFILE, rows=full.rows, tilework="1", created_unix_ns=1)
    store.save(profile)
    known = store.latest(key, PIPELINE)
    assert known is not None
    assert set(known.rows) == set(full.rows), "a row with a cache replaces none without"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"cache": "patch"}, r"rows\[0\].cache is 'patch'; expected a kind and its threshold, as in \"patch=0.003\""),
        ({"cache": "page=0.1"}, r"rows\[0\].cache is 'page=0.1'; expected a kind"),
        ({"cache": "patch=0.1", "skipped": 1.5}, r"rows\[0\].skipped is 1.5; expected a share from 0 to 1"),
        ({"skipped": 0.5}, r"rows\[0\].skipped is 0.5, and the row has no cache; give cache, too"),
        ({"cached": "patch=0.1"}, r"rows\[0\].cached is not a field; rename it to cache"),
        ({"cache": "patch=0.1", "degree": 2}, r"rows\[0\].cache is 'patch=0.1', and no row has .* at degree 2 without"),
        ({"cache": "patch=0.1", "stage": DECODE}, r"rows\[0\].cache is 'patch=0.1', and decode of .* has no steps"),
    ],
)
def test_a_wrong_field_is_named_with_its_remedy(fields: dict[str, Any], complaint: str) -> None:
    good = {"pipeline": PIPELINE, "stage": DIFFUSE, "height": 64, "width": 64, "seconds": 0.5}
    with pytest.raises(BadCostTable, match=complaint):
        parse_table({"rows": [good | fields, good]})


def test_steps_with_a_cache_take_the_measured_share_from_the_first_request_on() -> None:
    costs = TableCosts(with_rows(cached(64, 0.5), cached(128, 0.7)))
    assert time_share(costs, 64) == pytest.approx(0.5)
    assert time_share(costs, 128) == pytest.approx(0.7)
    assert 0.5 < time_share(costs, 96) < 0.7, "between"
    assert time_share(costs, 256) == pytest.approx(0.7), "beyond"
    asked = request("a", cache=MIDDLE)
    plain = replace(asked, cache=None)
    total_ns = sum(costs.work_ns(stage, [asked], 1, steps) for stage, steps in costs.start(asked).pieces)
    whole_ns = sum(costs.work_ns(stage, [plain], 1, steps) for stage, steps in costs.start(plain).pieces)
    assert total_ns == pytest.approx(0.7 * whole_ns, rel=0.01)


def test_other_caches_and_degrees_are_as_without_rows() -> None:
    costs = TableCosts(with_rows(cached(128, 0.6, LOW), cached(128, 0.4, MIDDLE)))
    assert time_share(costs, 128, choice=HIGH) == pytest.approx(0.4), "a larger threshold skips no less"
    assert time_share(costs, 128, choice=CacheChoice(CacheKind.PATCH, 0.002)) == pytest.approx(0.6)
    assert time_share(costs, 128, choice=CacheChoice(CacheKind.PATCH, 0.0005)) == 1
    assert time_share(costs, 128, choice=CacheChoice(CacheKind.IMAGE, 0.5)) == 1
    assert time_share(costs, 128, degree=4) == 1
    assert time_share(costs, 128, degree=2) == 1, "a degree without rows, which is as fast as 1 without a cache"


def test_a_batch_saves_what_its_requests_save_or_what_was_measured() -> None:
    singles = cached(64, 0.5), cached(128, 0.7)
    costs = TableCosts(with_rows(*singles))
    assert time_share(costs, 64, 64) == pytest.approx(0.5)
    alone = costs.run_ns(step(None), [Shape(64, 64)], 1), costs.run_ns(step(None), [Shape(128, 128)], 1)
    assert time_share(costs, 64, 128) == pytest.approx((0.5 * alone[0] + 0.7 * alone[1]) / sum(alone))
    measured = TableCosts(with_rows(*singles, cached(64, 0.9, batch=2)))
    assert time_share(measured, 64, 64) == pytest.approx(0.9)
    assert time_share(measured, 64, 64, 64) == pytest.approx(0.5)


def test_the_batch_model_counts_the_patches_that_are_computed() -> None:
    """Its logarithm grows by 0.1 with each patch, of which a pair has two; half of them are skipped."""
    small = Shape(512, 512)
    alone = CostRow(pipeline=PIPELINE, stage=DIFFUSE, height=512, width=512, seconds=1.0)
    rows = alone, replace(alone, seconds=0.8, cache=MIDDLE, skipped=0.5)
    shares = []
    for max_skipped in (0.0, 0.5):
        model = batch_model((0.0, 0.0, 0.0, 0.1), max_skipped=max_skipped)
        costs = TableCosts(CostTable(hardware="toy", rows=rows, batch_models={PIPELINE: model}))
        shares.append(costs.run_ns(step(MIDDLE), [small] * 2, 1) / costs.run_ns(step(None), [small] * 2, 1))
        assert type(model).parse(model.to_json()) == model
    assert shares[0] == pytest.approx(0.8), "it has not learned from caches"
    assert shares[1] == pytest.approx(2.718281828 ** (0.1 - 0.2))


def test_measurements_correct_the_rows() -> None:
    costs = TableCosts(with_rows(cached(128, 0.6)))
    asked, other = request("a", cache=MIDDLE), request("b")
    before_ns = costs.work_ns(step(None), [other], 1)
    for _ in range(60):
        costs.observe(step(MIDDLE), [asked], 1, 1, round(0.3 * before_ns))
    assert time_share(costs, 128) == pytest.approx(0.3, rel=0.01)
    assert costs.work_ns(step(None), [other], 1) == before_ns
    for _ in range(60):
        costs.observe(step(None), [other], 1, 1, 2 * before_ns)
    assert time_share(costs, 128) == pytest.approx(0.3, rel=0.01), "slower steps are slower with a cache, too"


def test_rows_of_groups_are_merged_and_hide_no_missing_batch() -> None:
    first, second = cached(64, 0.5), cached(64, 0.7, skipped=0.2)
    (one,) = merge_rows([first, second])
    assert one.skipped == pytest.approx(0.3)
    assert one.cache == MIDDLE
    graph, batches = table().graph(PIPELINE), ((Shape(64, 64),),)
    assert (
        missing_batches([replace(one, stage=name) for name in ("encode", DIFFUSE, DECODE)], graph, batches, 1)
        == batches
    )


def test_a_cell_of_several_devices_saves_nothing() -> None:
    two = row(64 * 64, 0.1, stage=DIFFUSE, degree=2)
    cells = in_cells(with_rows(cached(64, 0.5), two), 2)
    assert all(one.cache is None for one in cells.rows)
