"""The blobs of jobs: which are adopted, what a move delivers and when, which are superseded."""

from __future__ import annotations

from typing import Any

import pytest

from builders import request
from control.driver.rig import STEPS, Rig, blob, brought_by, checkpoint, ended
from stages import DECODE
from tilework.control.driver.effects import in_turn
from tilework.control.driver.state_registry import StateMove, StateRegistry
from tilework.core.actions import MoveState
from tilework.core.checkpoint import Checkpoint
from tilework.core.events import DeviceLost, LeftOut, Stopped, WorkFailed, WorkFinished
from tilework.core.graph.graph import Graph
from tilework.core.graph.itinerary import Itinerary
from tilework.core.graph.stage import StageSpec, StepShare
from tilework.core.wire.blobs import SavedState
from tilework.core.wire.reports import Absent, Ending, Failed

LONG = Graph(
    "toy",
    (
        StageSpec(name="text", outputs=("words",)),
        StageSpec(name="image", outputs=("reference",)),
        StageSpec(name="base", inputs=("words", "reference"), outputs=("latents",), steps=StepShare(last=0.8)),
        StageSpec(name="refine", inputs=("latents", "words"), outputs=("refined",), steps=StepShare(first=0.8)),
        StageSpec(name="decode", inputs=("refined",), outputs=("picture",)),
    ),
)


def after_four() -> Rig:
    """A job with four steps done and the state "four"."""
    rig = Rig()
    assert rig.report(0, ended(rig.run(0), state="four")) == [WorkFinished(1, 5)]
    return rig


def test_a_move_of_an_idle_job_delivers_its_latest_state() -> None:
    rig = after_four()
    known, new = rig.move(1, 1), rig.move(1, 2, conditioning=True)
    assert (known.is_resolved, known.delivers, known.source) == (True, True, (0,))
    assert brought_by(known) == (None, blob("four"))
    assert brought_by(new) == (blob("text1"), blob("four"))


def test_a_move_of_a_job_without_steps_delivers_only_its_conditioning() -> None:
    move = Rig().move(1, 2, conditioning=True)
    assert (move.delivers, brought_by(move), move.source) == (True, (blob("text1"), None), ())


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({"state": "eight"}, [("move", (1,), "eight"), WorkFinished(2, 5), ("discard", {"four"})]),
        (
            {"steps": 2, "state": "six", "ending": Ending.STOPPED},
            [("move", (1,), "nothing"), Stopped(2, 2), ("discard", {"four"})],
        ),
        ({"steps": 0, "ending": Ending.STOPPED}, [("move", (1,), "nothing"), Stopped(2, 0)]),
    ],
)
def test_a_move_waits_for_the_end_of_the_latest_work(report: dict[str, Any], expected: list[Any]) -> None:
    """It is resolved before the controller handles the end; superseded states are discarded only afterwards."""
    rig = after_four()
    work = rig.run(0, first_step=4)
    move = rig.move(1, 1)
    assert not move.is_resolved
    assert rig.report(0, ended(work, **report)) == expected
    assert move.is_resolved


@pytest.mark.parametrize("failure", ["lost", "failed", "cancelled"])
def test_a_move_after_a_work_without_result_delivers_nothing(failure: str) -> None:
    rig = after_four()
    work = rig.run(0, first_step=4)
    move = rig.move(1, 1)
    if failure == "lost":
        assert rig.lose(0) == [DeviceLost(0, "killed"), ("move", (1,), "nothing"), "lost"], (
            "so later works can be revoked"
        )
    elif failure == "failed":
        assert rig.report(0, Failed(2, "a bug")) == [("move", (1,), "nothing"), WorkFailed(2, "a bug")]
    else:
        del rig.tracker.jobs[1]
        rig.core.end_job(1)
        assert set(rig.core.states.end(1)) == {blob("text1"), blob("four")}
        stopped = ended(work, 1, "five", ending=Ending.STOPPED)
        assert rig.report(0, stopped) == [("move", (1,), "nothing"), Stopped(2, 1), ("discard", {"five"})]
        assert rig.core.is_idle
    assert not move.delivers


def test_a_restarted_job_ignores_the_state_of_its_former_attempt() -> None:
    rig = after_four()
    work = rig.run(0, first_step=4)
    rig.tracker.jobs[1].attempt += 1
    move = rig.move(1, 1)
    assert (move.is_resolved, brought_by(move)[1]) == (True, blob("four"))
    assert rig.report(0, ended(work, state="eight")) == [WorkFinished(2, 5), ("discard", {"eight"})]
    assert brought_by(rig.move(1, 1))[1] == blob("four")


# Reports of one job from different devices may overtake each other.


def overtaken() -> tuple[Rig, Any]:
    """Steps 4 to 8 are in flight on devices 0 and 1; steps 8 to 12 were reported by device 1."""
    rig = after_four()
    first = rig.run(0, 1, first_step=4)
    second = rig.run(1, first_step=8)
    assert rig.report(1, ended(second, state="twelve"), late=True) == [WorkFinished(3, 5)], "nothing is discarded yet"
    return rig, first


def test_a_report_supersedes_nothing_until_the_earlier_one_has_arrived() -> None:
    rig, first = overtaken()
    assert brought_by(rig.move(1, 2))[1] == blob("twelve"), "the next work begins there"
    rig.report(0, ended(first, state="eight"))
    rig.tracker.jobs[1].steps_done = 12
    del rig.tracker.works[3]
    assert brought_by(rig.move(1, 2))[1] == blob("twelve"), "the earlier state does not replace it"


def test_when_the_earlier_work_is_lost_the_job_resumes_from_the_state_before_it() -> None:
    rig, _ = overtaken()
    rig.tracker.jobs[1].attempt += 1
    rig.lose(0)
    rig.lose(1)
    assert brought_by(rig.move(1, 2))[1] == blob("four")


def test_superseded_states_are_discarded_when_the_controller_counts_both_works() -> None:
    rig, first = overtaken()
    effects = in_turn(rig.core.on_report(0, ended(first, state="eight")))
    next(effects)
    rig.tracker.jobs[1].steps_done = 12
    assert [set(effect.blobs) for effect in effects] == [{blob("four"), blob("eight")}]  # type: ignore[union-attr]


def test_the_checkpoint_is_the_latest_state() -> None:
    rig, _ = overtaken()
    assert rig.core.states.checkpoint(1) == checkpoint("text1", "twelve", 12)


def test_what_a_decode_has_serialized_is_discarded() -> None:
    """Nothing continues from it. The driver takes the picture when it learns of the end, before that."""
    rig = after_four()
    assert rig.report(0, ended(rig.run(0, first_step=4, num_steps=STEPS - 4), STEPS - 4, "all"))
    rig.tracker.jobs[1].steps_done = STEPS
    decode = rig.run(0, first_step=STEPS, num_steps=1, stage=DECODE)
    assert rig.report(0, ended(decode, 1, "picture")) == [WorkFinished(3, 5), ("discard", {"picture"})]
    assert rig.core.states.checkpoint(1) == checkpoint("text1", "all", STEPS)


def test_a_decode_elsewhere_needs_the_outputs_of_the_steps_alone() -> None:
    rig = after_four()
    assert rig.report(0, ended(rig.run(0, first_step=4, num_steps=STEPS - 4), STEPS - 4, "all"))
    ((_, move),) = rig.core.perform(MoveState(1, (3,), (1,)))
    assert isinstance(move, StateMove)
    assert brought_by(move) == (None, blob("all"))


# Works of several members.


def test_members_each_take_their_own_state() -> None:
    rig = Rig(1, 2)
    work = rig.run(0, jobs=(1, 2))
    rig.report(0, ended(work, blobs={1: blob("one"), 2: blob("two")}))
    assert [brought_by(rig.move(job_id, 1))[1] for job_id in (1, 2)] == [blob("one"), blob("two")]


@pytest.mark.parametrize("state_lost", [False, True])
def test_a_member_that_was_left_out_gets_nothing_and_the_others_their_states(state_lost: bool) -> None:
    rig = Rig(1, 2)
    work = rig.run(0, jobs=(1, 2))
    moves = rig.move(1, 1), rig.move(2, 1)
    effects = rig.core.on_report(0, ended(work, blobs={2: blob("two")}, absent=(Absent(1, "gone", state_lost),)))
    seen = []
    for effect in in_turn(effects):
        seen.append(effect)
        if getattr(effect, "event", None) == LeftOut(1, 1, "gone", state_lost):
            assert rig.core.work(1) is not None, "a move made now still waits for this work"
            rig.tracker.jobs[1].attempt += 1
    assert [move.delivers for move in moves] == [False, True]
    assert brought_by(moves[1])[1] == blob("two")
    assert rig.core.states.checkpoint(1) == (Checkpoint() if state_lost else checkpoint("text1"))


# Pipelines with other stages.


def long_way() -> tuple[StateRegistry, Itinerary]:
    """Of a job with two encoders, ten steps in two stages, and a decoder: all is done up to the sixth step."""
    states, way = StateRegistry(), LONG.itinerary(10)
    states.begin(1, way, Checkpoint())
    for position in (1, 2, 6, 8):
        assert states.adopt(1, blob(f"p{position}"), position) == ()
    assert states.advance(1, 8) == (blob("p6"),)
    return states, way


def named(states: tuple[SavedState, ...]) -> list[tuple[int, int, str]]:
    return [(state.index, state.position, state.blob.name) for state in states]


def test_outputs_of_stages_stay_and_states_between_steps_are_superseded() -> None:
    states, way = long_way()
    assert named(states.checkpoint(1).states) == [(0, 1, "p1"), (1, 2, "p2"), (2, 8, "p8")]
    for position, superseded in ((10, (blob("p8"),)), (11, ()), (12, (blob("p11"),))):
        assert states.adopt(1, blob(f"p{position}"), position) == ()
        assert states.advance(1, position) == superseded
    assert named(states.checkpoint(1).states) == [(0, 1, "p1"), (1, 2, "p2"), (2, 10, "p10"), (3, 12, "p12")]
    assert states.adopt(1, blob("result"), way.length) == (blob("result"),)
    assert set(states.end(1)) == {blob(name) for name in ("p1", "p2", "p10", "p12")}


@pytest.mark.parametrize(
    ("stages", "position", "delivered"),
    [
        ((0, 1), 8, [(0, 1, "p1"), (1, 2, "p2"), (2, 8, "p8")]),
        ((), 8, [(2, 8, "p8")]),
        ((1,), 2, [(1, 2, "p2")]),
        ((0, 2), 10, [(0, 1, "p1"), (2, 10, "p10")]),
        ((2,), 11, [(2, 10, "p10"), (3, 11, "p11")]),
        ((), 10, []),
    ],
)
def test_a_move_delivers_the_stages_that_are_asked_for_and_the_state_between_steps(
    stages: tuple[int, ...], position: int, delivered: list[tuple[int, int, str]]
) -> None:
    states, _ = long_way()
    for later in (10, 11):
        states.adopt(1, blob(f"p{later}"), later)
    move = states.resolve(StateMove(job_id=1, targets=(3,), source=(0,), stages=stages), position)
    assert (move.delivers, move.position, named(move.states)) == (True, position, delivered)


def test_a_checkpoint_is_usable_up_to_the_first_blob_that_is_gone() -> None:
    states, _ = long_way()
    kept = states.checkpoint(1)
    there = set(kept.blobs)
    assert kept.among(there) == kept
    assert [kept.among(there - {blob(name)}).position for name in ("p8", "p2", "p1")] == [2, 1, 0]
    assert (kept.position, Checkpoint().position) == (8, 0)
    states.begin(2, LONG.itinerary(10), kept)
    assert states.checkpoint(2) == kept


# Jobs begin and end.


def test_a_restored_job_resumes_from_its_checkpoint() -> None:
    rig = Rig()
    rig.tracker.jobs[1].steps_done = 6
    rig.core.begin_job(1, request("1", steps=STEPS), checkpoint("text", "six", 6))
    move = rig.move(1, 0, conditioning=True)
    assert brought_by(move) == (blob("text"), blob("six"))
    assert rig.core.states.num_bytes == 2


def test_held_blobs_stay_until_they_are_released() -> None:
    rig = after_four()
    rig.core.end_job(1)
    rig.core.states.hold(1, "uid")
    assert not rig.core.is_idle
    work = rig.run(0)
    late = ended(work, state="four")
    del rig.tracker.jobs[1]
    rig.lose(0)
    assert rig.report(0, late) == [], "a copy of the held blob"
    assert set(rig.core.states.release("uid")) == {blob("text1"), blob("four")}
    assert rig.core.states.release("uid") == ()
