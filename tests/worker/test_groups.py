"""One member of a group, in this process: what it does when the others stop, fail or are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from commands import MODEL, decode, encode, steps
from tilework.core.comm import GroupBroken
from tilework.core.model import ModelSource
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Command, Execute, GroupRef
from tilework.core.wire.reports import Ended, Ending, Failed, Progress, Report
from tilework.pipelines import serialization
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.worker.models.models import Models
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.worker import Worker
from tilework.worker.works import OpenWorks

JOB = 5
GROUP = GroupRef(9, (0, 1))
MUSTER, STEP = 1, 1
READY, STOPPED, ABSENT = 0, 1, 2


class EchoComm:
    """A group of two in which the other member says whatever this one says, until `calls_left` is used up.

    After `right_calls` the group is broken off while messages are under way: they are wrong, and no call says so.
    """

    def __init__(self, rank: int, calls_left: int, other_flag: int | None, right_calls: int | None) -> None:
        self.rank, self.size = rank, 2
        self.right_calls, self.has_aborted_calls = right_calls, False
        self.calls_left = calls_left
        self.other_flag = other_flag

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        if self.calls_left == 0:
            raise GroupBroken("the other member is gone")
        self.calls_left -= 1
        output.view(self.size, -1)[:] = source
        if self.right_calls is not None:
            self.right_calls -= 1
            self.has_aborted_calls = self.right_calls < 0
            if self.has_aborted_calls:
                output.view(torch.uint8).fill_(255)
        if self.other_flag is not None and source.dtype is torch.uint8:
            output[1 - self.rank] = self.other_flag

    def all_to_all(self, output: Tensor, source: Tensor, *_: Any) -> None:
        self.all_gather(torch.empty(2 * source.numel()), source)
        output[:] = source


class EchoGroups:
    """Opens one group; remembers which were broken off."""

    def __init__(
        self,
        rank: int = 0,
        calls_left: int = 100,
        other_flag: int | None = None,
        right_calls: int | None = None,
    ) -> None:
        self.comm = EchoComm(rank, calls_left, other_flag, right_calls)
        self.broken: list[int] = []

    def open(self, ref: GroupRef) -> EchoComm:
        assert ref == GROUP
        return self.comm

    def break_off(self, group_id: int) -> None:
        self.broken.append(group_id)

    def rest(self) -> None: ...


class Member:
    def __init__(self, family: Family, directory: Path) -> None:
        self.family = family
        self.works = OpenWorks()
        self.reports: list[Report] = []
        self.on_report: Callable[[Report], object] = lambda report: None
        self.blobs = StateBlobs(directory, 0)
        self.groups = EchoGroups()
        self.worker = Worker(
            Models({MODEL: family}, torch.device("cpu")), self.works, self.groups, self.blobs, self._emit
        )  # type: ignore[arg-type]
        self.run(encode(1, JOB, tiny.spec()))

    def run(self, command: Command, **group: Any) -> list[Report]:
        self.worker._groups = self.groups = EchoGroups(**group)  # type: ignore[assignment]
        known = len(self.reports)
        assert isinstance(command, Execute)
        self.works.open(command.work_id, dict(command.members))
        self.worker.execute(command)
        return self.reports[known:]

    def steps_in(self, blob: StateBlob) -> int:
        """How many steps the state in a blob has behind it."""
        contents = serialization.deserialize(self.blobs.read(blob), torch.device("cpu"))
        steps_done: int = contents["iteration_index"]
        return steps_done

    def _emit(self, report: Report) -> None:
        self.reports.append(report)
        self.on_report(report)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory)
    return load(ModelSource(path=str(directory)))


@pytest.fixture
def member(family: Family, tmp_path: Path) -> Iterator[Member]:
    yield Member(family, tmp_path)
    assert family.parallel.degree == 1, "a work left the model at its group's degree"


def test_the_leader_reports_and_serializes_for_its_group(member: Member) -> None:
    *progress, ended = member.run(steps(2, ((JOB, 0),), 3, GROUP))
    assert progress == [Progress(2, 1), Progress(2, 2)]
    assert isinstance(ended, Ended)
    assert (ended.steps_done, ended.ending) == (3, Ending.DONE)
    assert member.steps_in(ended.blobs[JOB]) == 3


def test_a_follower_keeps_quiet(member: Member) -> None:
    (ended,) = member.run(steps(2, ((JOB, 0),), 3, GROUP), rank=1)
    assert isinstance(ended, Ended)
    assert (ended.steps_done, ended.blobs) == (3, {})


def test_a_survivor_serializes_a_state_that_can_be_resumed(member: Member) -> None:
    for rank, work_id, first_step in ((1, 2, 0), (0, 3, 1)):
        *_, ended = member.run(steps(work_id, ((JOB, first_step),), 3, GROUP), rank=rank, calls_left=MUSTER + STEP)
        assert isinstance(ended, Ended)
        assert (ended.steps_done, ended.ending) == (1, Ending.BROKEN)
        assert member.steps_in(ended.blobs[JOB]) == first_step + 1
    alone = member.run(steps(4, ((JOB, 2),), 2))[-1]
    assert isinstance(alone, Ended)
    assert alone.steps_done == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_of_messages_that_never_came_are_not_kept(member: Member, rank: int) -> None:
    """No call raises: what the device has is known to be wrong only when it is done."""
    member.run(steps(2, ((JOB, 0),), 1, GROUP))
    *_, ended = member.run(steps(3, ((JOB, 1),), 3, GROUP), rank=rank, right_calls=MUSTER + STEP)
    assert isinstance(ended, Ended)
    assert (ended.steps_done, ended.ending, ended.blobs) == (0, Ending.BROKEN, {})
    (failed,) = member.run(steps(4, ((JOB, 1),), 2))
    assert isinstance(failed, Failed), "the state is gone"
    again = member.run(steps(5, ((JOB, 0),), 3))[-1]
    assert isinstance(again, Ended)
    assert member.steps_in(again.blobs[JOB]) == 3
    latents = serialization.deserialize(member.blobs.read(again.blobs[JOB]), torch.device("cpu"))["latents"]
    assert latents.isfinite().all()


def test_what_is_heard_wrong_of_the_other_member_is_not_believed(member: Member) -> None:
    (ended,) = member.run(steps(2, ((JOB, 0),), 3, GROUP), right_calls=0)
    assert isinstance(ended, Ended)
    assert (ended.steps_done, ended.ending) == (0, Ending.BROKEN)


@pytest.mark.parametrize("right_steps", [0, 1])
def test_an_error_that_follows_from_wrong_messages_is_none_of_the_model(
    member: Member, monkeypatch: pytest.MonkeyPatch, right_steps: int
) -> None:
    predict = member.family.predict  # type: ignore[attr-defined]

    def fail(*args: Any) -> list[Tensor]:
        predictions: list[Tensor] = predict(*args)
        if any(one.isnan().any() for one in predictions):
            raise IndexError("no such expert")
        return predictions

    monkeypatch.setattr(member.family, "predict", fail)
    *_, ended = member.run(steps(2, ((JOB, 0),), 3, GROUP), right_calls=MUSTER + right_steps * STEP)
    assert isinstance(ended, Ended)
    assert (ended.steps_done, ended.ending, ended.blobs) == (0, Ending.BROKEN, {})


def test_a_group_that_breaks_before_the_first_step_leaves_nothing(member: Member) -> None:
    (ended,) = member.run(steps(2, ((JOB, 0),), 3, GROUP), calls_left=0)
    assert isinstance(ended, Ended)
    assert (ended.steps_done, ended.ending, ended.blobs) == (0, Ending.BROKEN, {})
    assert len(member.works) == 0


def test_a_work_that_breaks_off_before_it_begins_has_done_no_steps(member: Member) -> None:
    """The worker has the job, but from a later step than the work begins at."""
    member.run(steps(2, ((JOB, 0),), 3, GROUP))
    (ended,) = member.run(steps(3, ((JOB, 1),), 1, GROUP), calls_left=0)
    assert isinstance(ended, Ended)
    assert (ended.ending, ended.steps_done, ended.blobs) == (Ending.BROKEN, 0, {})


def test_no_member_begins_if_one_lacks_the_state(member: Member) -> None:
    (ended,) = member.run(steps(2, ((JOB, 0),), 3, GROUP), other_flag=ABSENT)
    assert isinstance(ended, Ended)
    assert (ended.steps_done, ended.ending) == (0, Ending.BROKEN)


def test_a_member_that_lacks_the_state_informs_the_group_and_reports_why(member: Member) -> None:
    (failed,) = member.run(steps(2, ((JOB, 2),), 1, GROUP))
    assert isinstance(failed, Failed)
    assert "is at position 1, not 3" in failed.reason
    assert member.groups.comm.calls_left == 98, "the others were left waiting"
    assert not member.groups.broken


def test_a_member_that_lacks_the_state_of_a_work_that_is_stopped_revokes_it(member: Member) -> None:
    """What was to write the state was stopped, too."""
    (revoked,) = member.run(steps(2, ((JOB, 2),), 1, GROUP), rank=1, other_flag=STOPPED)
    assert isinstance(revoked, Ended)
    assert (revoked.steps_done, revoked.ending) == (0, Ending.STOPPED)


def test_the_leader_looks_again_for_a_stop_when_a_member_lacks_the_state(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has just read that there is none, while the other was told of nothing."""
    gather = EchoComm.all_gather

    def stop_meanwhile(comm: EchoComm, output: Tensor, source: Tensor) -> None:
        gather(comm, output, source)
        member.works.stop(2)

    monkeypatch.setattr(EchoComm, "all_gather", stop_meanwhile)
    (revoked,) = member.run(steps(2, ((JOB, 0),), 3, GROUP), other_flag=ABSENT)
    assert isinstance(revoked, Ended)
    assert (revoked.steps_done, revoked.ending) == (0, Ending.STOPPED)


def test_a_queued_work_is_revoked_if_the_leader_knows_of_it(member: Member) -> None:
    (revoked,) = member.run(steps(2, ((JOB, 0),), 3, GROUP), rank=1, other_flag=STOPPED)
    assert isinstance(revoked, Ended)
    assert (revoked.steps_done, revoked.ending) == (0, Ending.STOPPED)
    member.works.open(3, (JOB,))
    member.works.stop(3)
    member.works.open = lambda *_: None  # type: ignore[method-assign]  # It is open, and stopped.
    (run,) = member.run(steps(3, ((JOB, 0),), 3, GROUP), rank=1, other_flag=READY)
    assert isinstance(run, Ended)
    assert run.steps_done == 1, "the leader began, so this one does, too; the echo then agrees to stop"


def test_a_running_group_stops_where_its_leader_wants_to(member: Member) -> None:
    member.on_report = lambda report: member.works.stop(2) if report == Progress(2, 1) else None
    *_, ended = member.run(steps(2, ((JOB, 0),), 4, GROUP))
    assert isinstance(ended, Ended)
    assert (ended.steps_done, ended.ending) == (2, Ending.STOPPED)
    assert member.steps_in(ended.blobs[JOB]) == 2


def decode_together(work_id: int) -> Execute:
    return replace(decode(work_id, JOB), group=GROUP)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_decode_runs_in_a_group_whose_leader_reports(member: Member, rank: int) -> None:
    member.run(steps(2, ((JOB, 0),), 4))
    (ended,) = member.run(decode_together(3), rank=rank)
    assert isinstance(ended, Ended)
    assert (ended.steps_done, ended.ending, len(ended.images)) == (1, Ending.DONE, 1 - rank)
    assert member.groups.comm.calls_left < 90, "it was shared"


def test_a_decode_whose_group_breaks_is_not_done_and_can_be_done_again(member: Member) -> None:
    member.run(steps(2, ((JOB, 0),), 4))
    (ended,) = member.run(decode_together(3), calls_left=MUSTER + 3)
    assert isinstance(ended, Ended)
    assert (ended.steps_done, ended.ending, ended.images) == (0, Ending.BROKEN, {})
    (alone,) = member.run(decode(4, JOB))
    assert isinstance(alone, Ended)
    assert len(alone.images) == 1


def test_a_decode_of_messages_that_never_came_is_not_done_and_can_be_done_again(member: Member) -> None:
    member.run(steps(2, ((JOB, 0),), 4))
    (ended,) = member.run(decode_together(3), right_calls=MUSTER + 3)
    assert isinstance(ended, Ended)
    assert (ended.steps_done, ended.ending, ended.images) == (0, Ending.BROKEN, {})
    (alone,) = member.run(decode(4, JOB))
    assert isinstance(alone, Ended)
    assert len(alone.images) == 1


def test_a_decode_that_fails_breaks_its_group_off(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    member.run(steps(2, ((JOB, 0),), 4))
    monkeypatch.setattr(member.family.modules["vae"].decoder, "forward", lambda *_: 1 / 0)
    (failed,) = member.run(decode_together(3))
    assert isinstance(failed, Failed)
    assert member.groups.broken == [GROUP.group_id], "the others wait for one who has given up"


def test_an_error_in_the_model_breaks_the_group_off(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(*_: Any) -> list[Tensor]:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(member.family, "predict", predict)
    (failed,) = member.run(steps(2, ((JOB, 0),), 3, GROUP))
    assert isinstance(failed, Failed)
    assert failed.reason == "RuntimeError: out of luck"
    assert member.groups.broken == [GROUP.group_id], "the others wait for one who has given up"


def test_a_member_that_runs_out_of_memory_breaks_its_group_off_and_keeps_its_steps(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Member(family, tmp_path)

    def predict(states: list[Any], *_: Any) -> list[Tensor]:
        if states[0].steps_done == 2:
            raise MemoryError
        return type(family).predict(family, states)

    monkeypatch.setattr(family, "predict", predict)
    ended = member.run(steps(2, ((JOB, 0),), 4, GROUP))[-1]
    assert isinstance(ended, Ended)
    assert (ended.ending, ended.steps_done) == (Ending.OUT_OF_MEMORY, 2)
    assert member.steps_in(ended.blobs[JOB]) == 2
    assert GROUP.group_id in member.groups.broken
    assert family.parallel.degree == 1
