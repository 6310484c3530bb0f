"""What the answers of workers to one measurement come to, when some or all of them could not run it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from unittest.mock import Mock

import pytest

from builders import row
from tilework.core.cost_row import CostRow
from tilework.core.wire.commands import GroupRef
from tilework.core.wire.reports import Calibrated
from tilework.core.work import Group
from tilework.runtime.executor import CannotRun, WorkerStartFailed
from tilework.runtime.models.calibration import Calibration

NO_MEMORY = "64x64 cannot run here (MemoryError: no memory)"
ROW = row(64, 1.0)
ALONE: dict[Group, GroupRef | None] = {(0,): None, (1,): None}
GROUPS: dict[Group, GroupRef | None] = {(0, 1): GroupRef(1, (0, 1)), (2, 3): GroupRef(2, (2, 3))}


def rows_of(
    groups: Mapping[Group, GroupRef | None], answers: Mapping[int, Calibrated], lost: str = ""
) -> tuple[CostRow, ...]:
    """What it comes to when workers have answered so, in this order; then the others are lost."""

    async def measure() -> tuple[CostRow, ...]:
        calibration = Calibration(groups, 60.0, Mock(), Mock())
        for device_id, answer in answers.items():
            calibration.answered(device_id, answer)
        if lost:
            calibration.fail(WorkerStartFailed(lost))
        return await calibration.rows()

    return asyncio.run(measure())


def test_what_no_worker_can_run_is_refused_with_the_first_reason(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CannotRun, match=r"^64x64 cannot run here \(MemoryError: no memory\)$"):
        rows_of(ALONE, {0: Calibrated((), NO_MEMORY), 1: Calibrated((), "something else")})
    broken = {one: Calibrated((), NO_MEMORY if one in (1, 3) else "broken off") for one in (1, 0, 3, 2)}
    with pytest.raises(CannotRun, match="no memory"):
        rows_of(GROUPS, broken)
    assert not caplog.records, "the caller says it"


def test_nothing_measured_is_no_refusal() -> None:
    assert rows_of(ALONE, {0: Calibrated(()), 1: Calibrated(())}) == ()
    assert rows_of({}, {}) == ()


@pytest.mark.parametrize(
    ("groups", "answers", "said"),
    [
        (ALONE, {0: Calibrated((ROW,)), 1: Calibrated((), NO_MEMORY)}, f"{NO_MEMORY}; it is left out on device 1"),
        (
            ALONE,
            {0: Calibrated((ROW,), NO_MEMORY), 1: Calibrated((ROW,), NO_MEMORY)},
            f"{NO_MEMORY}; it is left out on device 0, 1",
        ),
        (
            GROUPS,
            {0: Calibrated((ROW,)), 1: Calibrated(()), 2: Calibrated((), NO_MEMORY), 3: Calibrated((), "broken off")},
            f"devices 2, 3 are not measured together: {NO_MEMORY}",
        ),
    ],
    ids=["alone", "a later stage", "in groups"],
)
def test_what_some_can_run_is_measured_on_those(
    groups: dict[Group, GroupRef | None], answers: dict[int, Calibrated], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(rows_of(groups, answers)) == {ROW}
    assert [record.getMessage() for record in caplog.records] == [said]


def test_why_a_group_could_not_measure_is_said_also_if_a_worker_is_lost_then(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(WorkerStartFailed, match="gone"):
        rows_of(GROUPS, {2: Calibrated((), NO_MEMORY)}, lost="gone")
    assert [record.getMessage() for record in caplog.records] == [
        f"devices 2, 3 are not measured together: {NO_MEMORY}"
    ]
