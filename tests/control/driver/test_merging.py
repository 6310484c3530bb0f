"""The reports of a group's members are merged into one end, which the controller handles once."""

from __future__ import annotations

from typing import Any

import pytest

from control.driver.rig import Rig, ended
from tilework.core.events import Broken, DeviceLost, OutOfMemory, Stopped, WorkFailed, WorkFinished
from tilework.core.wire.reports import Ending, Failed

LOST = DeviceLost(0, "killed")


@pytest.mark.parametrize(
    ("fields", "event"),
    [
        ({}, WorkFinished(1, 5)),
        ({"ending": Ending.STOPPED, "steps": 2}, Stopped(1, 2)),
        ({"ending": Ending.OUT_OF_MEMORY, "steps": 3, "state": "s"}, OutOfMemory(1, 3)),
        ({"ending": Ending.OUT_OF_MEMORY, "steps": 3}, OutOfMemory(1, 0)),
    ],
)
def test_the_report_of_a_single_device_counts(fields: dict[str, Any], event: object) -> None:
    rig = Rig()
    work = rig.run(0)
    assert rig.report(0, ended(work, **fields))[0] == event
    assert not rig.core.work_ids


def test_the_report_of_the_leader_counts_for_its_group() -> None:
    rig = Rig()
    work = rig.run(0, 1, 2)
    assert rig.report(1, ended(work)) == []
    assert rig.report(0, ended(work, state="s")) == [WorkFinished(1, 5)]
    assert rig.report(2, ended(work)) == [], "a follower's report after its leader's"
    assert rig.core.states.checkpoint(1).position == 1 + 4


# What each device reports: steps, whether it wrote a blob, whether it ran out of memory. None: it is lost.
@pytest.mark.parametrize(
    ("devices", "event", "kept"),
    [
        ([None, (2, True, False), (3, True, False)], Broken(1, 3), "state2"),
        ([None, (3, True, False), (2, True, False)], Broken(1, 3), "state1"),
        ([None, (3, True, False), (3, True, False)], Broken(1, 3), "state1"),
        ([None, (4, False, False), (3, True, False)], Broken(1, 3), "state2"),
        ([None, (4, False, False), (4, False, False)], Broken(1, 0), None),
        ([(2, True, False), None, (1, True, False)], Broken(1, 2), "state0"),
        ([(1, True, True), (2, True, False), (0, False, False)], OutOfMemory(1, 2), "state1"),
        ([(0, False, True), (0, False, True), (0, False, True)], OutOfMemory(1, 0), None),
    ],
)
def test_of_a_group_that_is_cut_off_the_farthest_survivor_counts(
    devices: list[tuple[int, bool, bool] | None], event: object, kept: str | None
) -> None:
    rig = Rig()
    work = rig.run(0, 1, 2)
    seen: list[Any] = []
    for device_id, said in enumerate(devices):
        if said is None:
            seen += rig.lose(device_id)
        else:
            steps, has_state, no_memory = said
            state = f"state{device_id}" if has_state else ""
            # A device that has done all steps when the leader is lost does not know of the loss.
            ending = Ending.OUT_OF_MEMORY if no_memory else Ending.BROKEN if steps < 4 else Ending.DONE
            report = ended(work, steps, state, ending=ending)
            seen += rig.report(device_id, report)
    assert [one for one in seen if isinstance(one, Broken | OutOfMemory)] == [event]
    assert seen.count(("break off", 1)) == 1
    spare = {f"state{device_id}" for device_id, said in enumerate(devices) if said and said[1]} - {kept}
    assert [one for one in seen if one == ("discard", spare)] == ([("discard", spare)] if spare else [])
    _, *states = rig.core.states.checkpoint(1).states
    assert [one.blob.name for one in states] == ([kept] if kept else [])


def test_blobs_of_other_members_are_discarded_when_the_leader_is_done() -> None:
    """A group is broken off by a false alarm just when its leader is done."""
    rig = Rig()
    work = rig.run(0, 1)
    assert rig.report(1, ended(work, 3, "behind", ending=Ending.BROKEN)) == [("break off", 1)]
    assert rig.report(0, ended(work, 4, "done")) == [WorkFinished(1, 5), ("discard", {"behind"})]


def test_a_work_is_lost_with_the_last_of_its_devices() -> None:
    rig = Rig()
    work = rig.run(0, 1)
    assert rig.report(1, ended(work, 2, "state", ending=Ending.BROKEN)) == [("break off", 1)]
    assert rig.lose(1) == [DeviceLost(1, "killed")], "its report counts, and device 0 may have done more steps"
    assert rig.lose(0) == [LOST, "lost", ("discard", {"state"})]
    assert not rig.core.work_ids


def test_a_loss_ends_works_whose_other_devices_have_reported() -> None:
    rig = Rig()
    work = rig.run(0, 1)
    rig.report(1, ended(work, 2, "state", ending=Ending.BROKEN))
    assert rig.lose(0) == [LOST, Broken(1, 2)]


@pytest.mark.parametrize("device_id", [0, 1])
def test_a_work_fails_by_any_of_its_devices(device_id: int) -> None:
    rig = Rig()
    work = rig.run(0, 1)
    seen = rig.report(device_id, Failed(1, "a bug"))
    assert seen == [("break off", 1), WorkFailed(1, "a bug")]
    assert rig.report(1 - device_id, ended(work, 2, "state", ending=Ending.BROKEN)) == [("discard", {"state"})]


def test_all_blobs_of_a_job_are_discarded_when_its_state_is_lost() -> None:
    rig = Rig()
    rig.report(0, ended(rig.run(0), state="four"))
    rig.run(0, first_step=4)
    assert rig.report(0, Failed(2, "gone", state_lost=True)) == [
        ("discard", {"text1", "four"}),
        WorkFailed(2, "gone", True),
    ]


# Reports that change nothing.


def test_a_repeated_report_changes_nothing_and_its_blob_stays() -> None:
    rig = Rig()
    work = rig.run(0, 1)
    broken = ended(work, 3, "state", ending=Ending.BROKEN)
    rig.report(1, broken)
    assert rig.report(1, broken) == []
    rig.lose(0)
    assert rig.report(1, broken) == []
    assert rig.core.states.checkpoint(1).position == 1 + 3


def test_a_report_from_a_lost_device_changes_nothing() -> None:
    rig = Rig()
    work = rig.run(0, 1)
    rig.lose(0)
    assert rig.report(0, ended(work, 4, "late")) == [("discard", {"late"})]
    assert rig.report(1, ended(work, 2, "state", ending=Ending.BROKEN)) == [Broken(1, 2)]
    assert rig.report(0, ended(work, 4, "late")) == [("discard", {"late"})]
