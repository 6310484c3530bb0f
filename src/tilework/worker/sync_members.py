"""Before a work begins: which jobs take part in it, and whether every worker of its group can, and is to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilework.core.comm import Comm, GroupBroken
from tilework.core.wire import Absent, Denoise
from tilework.worker.jobs import JobMissing, Jobs
from tilework.worker.steps import Member

_READY, _STOPPED, _ABSENT = range(3)


@dataclass(frozen=True, slots=True)
class MemberCheck:
    """Who is `present` at a work, each in the state in which it begins. Nobody is if it was stopped in the queue."""

    present: tuple[Member, ...] = ()
    absent: tuple[Absent, ...] = ()


def sync_members(jobs: Jobs, command: Denoise, comm: Comm | None, device: torch.device, stopped: bool) -> MemberCheck:
    """Call the members of a work. Of several, those are absent of which this worker does not have the state.

    The workers of a group hear of a stop at different times: what the first of them knows counts. They wait here for
    each other, so that nobody waits inside the model.

    Raises:
        JobMissing: this worker does not have the state of the only member.
        GroupBroken: another worker does not have it, or is lost.
    """
    if comm is None:
        return MemberCheck() if stopped else _call(jobs, command)
    assert len(command.members) == 1, f"work {command.work_id} of a group has {len(command.members)} members"
    missing: JobMissing | None = None
    check = MemberCheck()
    try:
        check = _call(jobs, command)
    except JobMissing as error:
        missing = error
    flags = _exchange(comm, device, _ABSENT if missing else _STOPPED if stopped else _READY)
    if missing:
        raise missing
    if _ABSENT in flags:
        raise GroupBroken(f"rank {flags.index(_ABSENT)} does not have the state of job {command.members[0][0]}")
    return MemberCheck() if flags[0] == _STOPPED else check


def _call(jobs: Jobs, command: Denoise) -> MemberCheck:
    present: list[Member] = []
    absent: list[Absent] = []
    for job_id, first_step in command.members:
        try:
            present.append(Member(job_id, first_step, jobs.at_step(job_id, first_step)))
        except JobMissing as error:
            if len(command.members) == 1:
                raise
            absent.append(Absent(job_id, str(error), error.state_lost))
    return MemberCheck(tuple(present), tuple(absent))


def _exchange(comm: Comm, device: torch.device, flag: int) -> list[int]:
    flags = torch.empty(comm.size, dtype=torch.uint8, device=device)
    comm.all_gather(flags, torch.tensor([flag], dtype=torch.uint8, device=device))
    return [int(value) for value in flags.tolist()]
