"""A node is lost with its states, or leaves: where jobs go on, and which devices get works."""

from __future__ import annotations

import pytest

from builders import controller, request
from control.driver.rig import Rig, blob, brought_by, ended
from control.driver.test_states import LONG, after_four
from tilework.control.driver.state_registry import StateRegistry
from tilework.core.actions import Accept, DropState, Finish, MoveState, Reject, RunWork, Stop
from tilework.core.checkpoint import Checkpoint
from tilework.core.events import DeviceJoined, NodeCordoned, NodeLost, NodesSilent, Submitted, WorkFinished
from tilework.core.request import OnMiss, RefusalCode, Request
from tilework.core.time import ns_from_s, s_from_ns
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.work import Work


def lost(*positions: tuple[int, int], devices: tuple[int, ...] = (0,)) -> NodeLost:
    return NodeLost(0, devices, "no power", positions)


def test_a_job_goes_back_to_the_newest_position_of_which_all_is_there() -> None:
    """The state after four steps was on the node alone; what was encoded is elsewhere, too."""
    rig = after_four()
    assert rig.lose_node((0,), "four") == [lost((1, 1))]
    rig.tracker.jobs[1].steps_done = 0
    assert brought_by(rig.move(1, 1, conditioning=True)) == (blob("text1"), None)


def test_a_state_without_what_was_encoded_is_worth_nothing() -> None:
    """So the job begins anew, and the state is discarded."""
    rig = after_four()
    assert rig.lose_node((0,), "text1") == [lost((1, 0)), ("discard", {"four"})]


def test_a_job_whose_states_are_elsewhere_stays_where_it_is() -> None:
    rig = after_four()
    assert rig.lose_node((0,), "another") == [lost()]
    assert brought_by(rig.move(1, 1)) == (None, blob("four"))


def test_works_of_all_its_devices_are_lost_in_one_event() -> None:
    rig = Rig(1, 2)
    rig.run(0, 1, jobs=(1,))
    rig.run(2, jobs=(2,))
    assert rig.lose_node((0, 1, 2)) == [lost(devices=(0, 1, 2)), "lost", "lost"]


def test_a_report_of_a_later_work_that_came_early_is_lost_with_the_state_before_it() -> None:
    """The first of two works was not reported; the node had what both wrote, but for the second state."""
    rig = Rig()
    first, second = rig.run(0), rig.run(1, first_step=4)
    assert rig.report(1, ended(second, state="eight"), late=True) == [WorkFinished(2, 5)]
    assert rig.lose_node((0,), "text1") == [lost((1, 0)), "lost", ("discard", {"eight"})]
    assert first.work_id not in rig.core.work_ids


@pytest.mark.parametrize(
    ("gone", "expected"),
    [({"reference"}, 1), ({"words"}, 0), ({"seven"}, 2), ({"seven", "reference"}, 1), ({"words", "seven"}, 0)],
)
def test_what_later_stages_read_must_be_there(gone: set[str], expected: int) -> None:
    """Two stages were encoded, and five steps of twenty are made."""
    names = {1: "words", 2: "reference", 7: "seven"}
    states = StateRegistry()
    states.begin(1, LONG.itinerary(20), Checkpoint(tuple(SavedState(0, at, blob(name)) for at, name in names.items())))
    back, outdated = states.lose([blob(name) for name in gone], {1: 7})
    assert back == {1: expected}
    assert {one.name for one in outdated} == {names[at] for at in names if at > expected} - gone


def test_what_no_later_stage_reads_may_be_gone() -> None:
    itinerary = LONG.itinerary(20)
    base = itinerary.ends[3]
    states = StateRegistry()
    states.begin(1, itinerary, Checkpoint((SavedState(0, 1, blob("words")), SavedState(3, base, blob("refined")))))
    assert states.lose([StateBlob("words", 1)], {1: base}) == ({}, ())


def test_the_controller_takes_all_its_devices_before_it_plans() -> None:
    """A job of the lost node begins again on the other node, from where it has to, after one interruption."""
    control = controller(num_devices=0)
    for device_id in range(4):
        control.handle(DeviceJoined(device_id, node=device_id // 2), 0)
    works: list[Work] = [
        one.work for one in control.handle(Submitted(request("a", steps=20)), 1) if isinstance(one, RunWork)
    ]
    encode = works[0]
    assert encode.devices == (0,)
    control.handle(WorkFinished(encode.work_id, 5), 2)
    actions = control.handle(NodeLost(0, (0, 1), "no power", ((encode.job_ids[0], 0),)), 3)
    again, *_ = (one.work for one in actions if isinstance(one, RunWork))
    assert again.stage == encode.stage, "what was encoded is gone"
    assert again.devices[0] in (2, 3)
    assert again.members[0].attempt == 2
    assert not any(isinstance(one, Finish | MoveState | DropState) for one in actions)


def test_a_node_that_leaves_ends_its_works_and_gets_no_others() -> None:
    """What comes after them is done on the other node, from where they were, without an interruption."""
    control = controller(num_devices=0)
    for device_id in range(4):
        control.handle(DeviceJoined(device_id, node=device_id // 2), 0)
    begun = [one.work for one in control.handle(Submitted(request("a", steps=20)), 1) if isinstance(one, RunWork)]
    assert {device_id for work in begun for device_id in work.devices} <= {0, 1}
    assert not any(isinstance(one, Stop) for one in control.handle(NodeCordoned(0, (0, 1), "told to"), 2))
    later, left = list[Work](), list(begun)
    while left:
        ended = left.pop(0)
        actions = control.handle(WorkFinished(ended.work_id, 5), 3)
        later += (new := [one.work for one in actions if isinstance(one, RunWork)])
        left += new
        if ended is begun[-1]:
            assert control.handle(NodeLost(0, (0, 1), "left"), 3) == ()
    assert later
    assert {device_id for work in later for device_id in work.devices} <= {2, 3}
    assert {one.attempt for work in later for one in work.members} == {1}
    assert not control.tracker.jobs


def test_works_of_a_leaving_node_that_is_lost_are_lost() -> None:
    control = controller(num_devices=0)
    control.handle(DeviceJoined(0, node=0), 0)
    control.handle(Submitted(request("a", steps=20)), 1)
    control.handle(NodeCordoned(0, (0,), "told to"), 2)
    control.handle(NodeLost(0, (0,), "no power"), 3)
    assert not control.tracker.works
    (job,) = control.tracker.jobs.values()
    assert job.attempt == 2


def promise(uid: str, slo_s: float = 60.0) -> Request:
    return request(uid, steps=20, slo_s=slo_s, on_miss=OnMiss.REJECT)


def test_no_promise_counts_on_devices_whose_node_is_silent() -> None:
    """Neither is it made on them, nor brought to them; other requests are accepted as before."""
    control = controller(num_devices=0)
    for device_id in range(2):
        control.handle(DeviceJoined(device_id, node=device_id), 0)
    control.handle(NodesSilent((0, 1)), 1)
    (refused,) = control.handle(Submitted(promise("none")), 2)
    assert isinstance(refused, Reject)
    assert refused.code is RefusalCode.NO_DEVICE
    assert "silent for a second" in refused.reason
    assert any(isinstance(one, Accept) for one in control.handle(Submitted(request("any")), 2))
    control.handle(NodesSilent((0,)), 3)
    for number in range(4):
        control.handle(Submitted(promise(f"heard {number}")), 4)
    jobs = [control.tracker.jobs[control.tracker.job_ids[f"heard {number}"]] for number in range(4)]
    assert all(job.promised is not None and job.promised.devices == (1,) for job in jobs)
    assert {device_id for job in jobs for work in job.works for device_id in work.devices} <= {1}
    control.handle(NodesSilent(()), 5)
    control.handle(Submitted(promise("again")), 6)
    again = control.tracker.jobs[control.tracker.job_ids["again"]].promised
    assert again is not None
    assert again.devices == (0,), "it is free first, and has spoken"


def test_a_refused_promise_says_when_the_devices_that_were_heard_of_are_free() -> None:
    control = controller(num_devices=0)
    for device_id in range(2):
        control.handle(DeviceJoined(device_id, node=device_id), 0)
    control.handle(NodesSilent((0,)), 1)
    due_s = 0.001
    for uid in ("first", "second"):
        (refused,) = control.handle(Submitted(promise(f"sooner than {uid}", due_s)), 2)
        assert isinstance(refused, Reject)
        assert refused.earliest_ns is not None
        assert refused.earliest_ns > ns_from_s(due_s), "another deadline than that of the first on another device"
        due_s = s_from_ns(refused.earliest_ns)
        assert any(isinstance(one, Accept) for one in control.handle(Submitted(promise(uid, due_s)), 2))
    assert len({job.promised.devices for job in control.tracker.jobs.values() if job.promised is not None}) == 1
