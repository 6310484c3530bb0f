"""What a start of a server measures and keeps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.fake_measurer import INFO, KEY, PACKING, SHAPES, SMALL, FakeMeasurer
from stages import DECODE, DIFFUSE, STAGES
from tilework.core.cost_row import CostRow
from tilework.core.model import ModelInfo, ModelSource
from tilework.core.request import Shape
from tilework.core.wire.reports import LoadedModel
from tilework.cost.profile import Profile, ProfileKey, ProfileOrigin
from tilework.cost.profiles import Profiles
from tilework.cost.table import CostTable
from tilework.runtime.executor import CannotRun
from tilework.runtime.models.costs import (
    CostCache,
    calibration_batches,
    profile_key,
    warm_up,
)
from tilework.runtime.models.model_costs import ModelCosts


def test_a_start_reports_how_much_it_has_measured() -> None:
    left: list[int] = []
    costs = ModelCosts.of(FakeMeasurer(), INFO, (1, 2), None, with_batches=True)
    asyncio.run(costs.measure(FakeMeasurer(), costs.missing, lambda: left.append(len(costs.missing))))
    assert left == [*range(costs.num_all)][::-1] != []


async def start_costs(
    measurer: FakeMeasurer, info: ModelInfo, degrees: Sequence[int], cache: CostCache | None, **options: Any
) -> CostTable | None:
    """The costs of a model when all that is missing has been measured."""
    costs = ModelCosts.of(measurer, info, degrees, cache, **{"with_batches": True} | options)
    await costs.measure(measurer, costs.missing)
    return costs.table()


async def start(
    measurer: FakeMeasurer, degrees: Sequence[int], cache: CostCache | None
) -> dict[tuple[Any, ...], float]:
    """The seconds of the table that a start comes to."""
    table = await start_costs(measurer, measurer.info, degrees, cache)
    assert table is not None
    assert table.hardware == measurer.profile_key.hardware
    rows = {(row.stage, Shape(row.height, row.width), row.degree): row.seconds for row in table.rows}
    assert len(rows) == len(table.rows)
    return rows


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    return CostCache(Profiles(tmp_path / "costs.sqlite"))


def test_a_first_start_measures_and_the_next_one_does_not(cache: CostCache) -> None:
    first = FakeMeasurer()
    rows = asyncio.run(start(first, (1, 2), cache))
    assert first.asked == [((shape,), degree, None) for shape in SHAPES for degree in (1, 2)]
    assert set(rows) == {(stage, shape, 1) for stage in STAGES for shape in SHAPES} | {
        (DIFFUSE, shape, 2) for shape in SHAPES
    }
    assert rows[DIFFUSE, SMALL, 1] == pytest.approx(0.004096 + 0.0001), "the mean of two groups"
    second = FakeMeasurer()
    assert asyncio.run(start(second, (1, 2), cache)) == rows
    assert second.asked == []
    assert [entry.origin for entry in cache.profiles.entries()] == [ProfileOrigin.CALIBRATION]


def test_a_start_measures_a_few_batches_where_requests_can_share_a_pass(cache: CostCache) -> None:
    assert calibration_batches(INFO) == ()
    mixes = (SHAPES[:2], (*[SHAPES[0]] * 3, *[SHAPES[1]] * 2, SHAPES[2]))
    assert calibration_batches(PACKING) == ((SMALL,) * 2, (SMALL,) * 4, *mixes)
    assert calibration_batches(replace(PACKING, max_side=64)) == ((SMALL,) * 2, (SMALL,) * 4), "no two sizes"
    one_shape = replace(PACKING, stages=tuple(replace(one, one_shape=True) for one in PACKING.stages))
    assert calibration_batches(one_shape) == ((SMALL,) * 2, (SMALL,) * 4)
    asyncio.run(start(FakeMeasurer(), (1, 2), cache))
    first, second = FakeMeasurer(info=PACKING), FakeMeasurer(info=PACKING)
    table = asyncio.run(start_costs(first, PACKING, (1, 2), cache))
    assert table is not None
    assert first.asked == [(batch, 1, None) for batch in calibration_batches(PACKING)]
    assert [(row.stage, row.batch, row.degree) for row in table.rows if row.batch != 1] == [
        *((stage, size, 1) for size in (2, 4) for stage in (DIFFUSE, DECODE)),
        *((DIFFUSE, mix, 1) for mix in mixes),
    ]
    again = asyncio.run(start_costs(second, PACKING, (1, 2), cache))
    assert again is not None
    assert set(again.rows) == set(table.rows)
    assert second.asked == []


def test_a_start_of_a_server_whose_requests_are_all_exact_measures_no_batches(cache: CostCache) -> None:
    measurer = FakeMeasurer(info=PACKING)
    assert asyncio.run(start_costs(measurer, PACKING, (1,), cache, with_batches=False)) is not None
    assert {(len(batch), degree) for batch, degree, _ in measurer.asked} == {(1, 1)}


def test_a_model_is_warmed_up_at_the_smallest_size_that_runs() -> None:
    measurer = FakeMeasurer()
    measurer.too_large = {SHAPES[0]}
    asyncio.run(warm_up(measurer, INFO))
    assert measurer.asked == [(SHAPES[:1], 1, 0), (SHAPES[1:2], 1, 0)]
    measurer.too_large = set(SHAPES)
    with pytest.raises(CannotRun, match=f"^{SHAPES[0]} cannot run here"):
        asyncio.run(warm_up(measurer, INFO))


def test_a_start_at_more_degrees_measures_those_only(cache: CostCache) -> None:
    asyncio.run(start(FakeMeasurer(), (1,), cache))
    more = FakeMeasurer()
    rows = asyncio.run(start(more, (1, 2, 4), cache))
    assert more.asked == [((shape,), degree, None) for shape in SHAPES for degree in (2, 4)]
    assert {degree for _, _, degree in rows} == {1, 2, 4}
    assert asyncio.run(start(FakeMeasurer(), (1, 2, 4), cache)) == rows


def test_a_thorough_profile_is_used_with_all_its_sizes(cache: CostCache) -> None:
    rows = tuple(
        CostRow(pipeline="toy", stage=stage, height=shape.height, width=shape.width, seconds=0.5)
        for shape in (*SHAPES, Shape(160, 160))
        for stage in STAGES
    )
    cache.profiles.save(Profile(key=KEY, origin=ProfileOrigin.PROFILE, rows=rows, tilework="0", created_unix_ns=1))
    measurer = FakeMeasurer()
    table = asyncio.run(start(measurer, (1,), cache))
    assert measurer.asked == []
    assert set(table.values()) == {0.5}
    assert (DIFFUSE, Shape(160, 160), 1) in table


def test_a_profile_of_some_stages_keeps_its_rows_when_the_others_are_measured(cache: CostCache) -> None:
    rows = tuple(CostRow(pipeline="toy", stage=DIFFUSE, height=s.height, width=s.width, seconds=0.5) for s in SHAPES)
    cache.profiles.save(Profile(key=KEY, origin=ProfileOrigin.PROFILE, rows=rows, tilework="0", created_unix_ns=1))
    first = asyncio.run(start(FakeMeasurer(), (1,), cache))
    assert {first[DIFFUSE, shape, 1] for shape in SHAPES} == {0.5}
    assert {stage for stage, _, _ in first} == set(STAGES)
    again = FakeMeasurer()
    assert asyncio.run(start(again, (1,), cache)) == first
    assert again.asked == []


def test_what_was_measured_of_a_model_is_known_of_another_of_its_architecture(cache: CostCache) -> None:
    asyncio.run(start(FakeMeasurer(), (1,), cache))
    tuned = FakeMeasurer(key=replace(KEY, model="anime@2"))
    assert asyncio.run(start(tuned, (1,), cache))
    assert tuned.asked == []


def test_under_other_circumstances_everything_is_measured_again(cache: CostCache) -> None:
    asyncio.run(start(FakeMeasurer(), (1,), cache))
    other = FakeMeasurer(key=replace(KEY, libraries="torch 3"))
    asyncio.run(start(other, (1,), cache))
    assert len(other.asked) == len(SHAPES)


def test_a_refresh_measures_again_and_its_rows_count_from_then_on(cache: CostCache) -> None:
    asyncio.run(start(FakeMeasurer(), (1,), cache))
    slow = FakeMeasurer()
    original = slow.calibrate

    async def slower(*arguments: Any, **others: Any) -> tuple[CostRow, ...]:
        return tuple(replace(row, seconds=9.0, p99_seconds=None) for row in await original(*arguments, **others))

    slow.calibrate = slower  # type: ignore[method-assign]
    assert set(asyncio.run(start(slow, (1,), replace(cache, refresh=True))).values()) == {9.0}
    assert set(asyncio.run(start(FakeMeasurer(), (1,), cache)).values()) == {9.0}


class Disturbed(FakeMeasurer):
    """Runs on one device take five times as long until it was asked `num_busy` times."""

    def __init__(self, num_busy: int) -> None:
        super().__init__()
        self.num_busy = num_busy

    async def calibrate(self, *arguments: Any, **others: Any) -> tuple[CostRow, ...]:
        rows = await super().calibrate(*arguments, **others)
        factor = 5 if len(self.asked) <= self.num_busy else 1
        return tuple(
            replace(row, seconds=row.seconds * factor, p99_seconds=None) if row.degree == 1 else row for row in rows
        )


def test_degrees_that_are_implausible_are_measured_again_in_turns(cache: CostCache) -> None:
    measurer = Disturbed(num_busy=2)
    rows = asyncio.run(start(measurer, (1, 2), cache))
    assert [degree for batch, degree, _ in measurer.asked if batch == (SHAPES[0],)] == [1, 2, 1, 2]
    assert [degree for batch, degree, _ in measurer.asked if batch == (SHAPES[1],)] == [1, 2]
    assert rows == asyncio.run(start(FakeMeasurer(), (1, 2), None))


def test_what_remains_implausible_is_said_and_measured_again_at_the_next_start(
    cache: CostCache, caplog: pytest.LogCaptureFixture
) -> None:
    measurer = Disturbed(num_busy=6)
    with caplog.at_level(logging.WARNING, "tilework"):
        asyncio.run(start(measurer, (1, 2), cache))
    assert [degree for batch, degree, _ in measurer.asked if batch == (SHAPES[0],)] == [1, 2] * 3
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"{SHAPES[0]}: ")
    assert "--recalibrate" in said
    again = FakeMeasurer()
    asyncio.run(start(again, (1, 2), cache))
    assert again.asked == [((SHAPES[0],), degree, None) for degree in (1, 2)]


class Unsteady(FakeMeasurer):
    """The longest run of a decode on one device takes twice as long as the median, until it was asked `num_busy` times.

    Its median is a millisecond longer then."""

    def __init__(self, num_busy: int) -> None:
        super().__init__()
        self.num_busy = num_busy

    async def calibrate(self, *arguments: Any, **others: Any) -> tuple[CostRow, ...]:
        rows = await super().calibrate(*arguments, **others)
        if len(self.asked) > self.num_busy:
            return rows
        return tuple(
            replace(row, seconds=row.seconds + 0.001, p99_seconds=2 * row.seconds)
            if (row.stage, row.degree) == (DECODE, 1)
            else row
            for row in rows
        )


def test_what_varies_between_runs_is_measured_again_alone_and_its_quickest_round_counts(
    cache: CostCache, caplog: pytest.LogCaptureFixture
) -> None:
    measurer = Unsteady(num_busy=3)
    rows = asyncio.run(start(measurer, (1, 2), cache))
    assert [degree for batch, degree, _ in measurer.asked] == [1, 2, 1, 1] + [1, 2] * 2
    again = frozenset(STAGES) - {DECODE}
    assert measurer.known == [frozenset(), frozenset(), again, again, *[frozenset()] * 4]
    assert rows == asyncio.run(start(FakeMeasurer(), (1, 2), None))
    assert not caplog.records


def test_what_still_varies_is_said_in_one_line_and_kept(cache: CostCache, caplog: pytest.LogCaptureFixture) -> None:
    measurer = Unsteady(num_busy=8)
    rows = asyncio.run(start(measurer, (1, 2), cache))
    assert [degree for batch, degree, _ in measurer.asked] == [1, 2, 1, 1] * 2 + [1, 2]
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("toy: 2 of 12 times vary by more than 20% between runs, also when measured again; ")
    assert f"that of {DECODE} of {SHAPES[1]} on 1 device by 95%." in said
    assert "--recalibrate" in said
    again = FakeMeasurer()
    assert asyncio.run(start(again, (1, 2), cache)) == rows
    assert again.asked == []


def test_sizes_that_cannot_run_are_left_out_with_a_line_each_and_none_at_all_is_an_error(
    cache: CostCache, caplog: pytest.LogCaptureFixture
) -> None:
    some, none = FakeMeasurer(), FakeMeasurer(key=replace(KEY, architecture="Other@1"))
    some.too_large, none.too_large = {SHAPES[-1]}, set(SHAPES)
    assert {shape for _, shape, _ in asyncio.run(start(some, (1, 2), cache))} == set(SHAPES[:-1])
    (said,) = (record.getMessage() for record in caplog.records)
    reason = f"{SHAPES[-1]} cannot run here (MemoryError: no memory)"
    assert said == f"toy: {reason}; its measurements on 1, 2 devices leave it out"
    assert asyncio.run(start_costs(none, INFO, (1, 2), cache)) is None
    assert len(cache.profiles.entries()) == 1


@pytest.mark.parametrize(
    ("place", "warnings"),
    [(None, []), ("file/costs.sqlite", ["measure again"]), ("directory", ["cannot be used", "measure again"])],
)
def test_a_start_needs_no_cache(
    tmp_path: Path, place: str | None, warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    cache = None if place is None else CostCache(Profiles(tmp_path / place))
    with caplog.at_level(logging.WARNING, "tilework"):
        assert asyncio.run(start(FakeMeasurer(), (1,), cache))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == len(warnings)
    assert all(expected in message for expected, message in zip(warnings, said, strict=True))


def test_devices_do_not_slow_each_other_down_but_cores_do() -> None:
    loaded = LoadedModel(info=INFO, identity="toy@1", architecture="Toy@1")
    cpu = profile_key(ModelSource(path="toy", threads=3), 4, "a thing", loaded)
    assert cpu == ProfileKey(
        hardware="a thing",
        architecture="Toy@1",
        model="toy@1",
        dtype="float32",
        threads=3,
        workers=4,
        libraries="torch 2",
    )
    assert profile_key(ModelSource(path="toy", device="cuda"), 4, "a thing", loaded).workers == 1
