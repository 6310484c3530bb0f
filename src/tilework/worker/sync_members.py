"""The check before a work begins: which of its jobs are present, and whether every rank of its group can start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilework.core.comm import Comm, GroupBroken
from tilework.core.wire.commands import Execute
from tilework.core.wire.reports import Absent
from tilework.worker.jobs import JobMissing, Jobs, WorkJob
from tilework.worker.synchronize import synchronize

_READY, _STOPPED, _ABSENT = range(3)


@dataclass(frozen=True, slots=True)
class MemberCheck:
    """The jobs that are `present`, each in the state in which the work begins; none if it was stopped in the queue."""

    present: tuple[WorkJob, ...] = ()
    absent: tuple[Absent, ...] = ()


def sync_members(
    jobs: Jobs, command: Execute, comm: Comm | None, device: torch.device, is_stopped: Callable[[], bool]
) -> MemberCheck:
    """Check the jobs of a work. Of several jobs, those whose state this worker lacks are absent.

    The ranks of a group learn of a stop at different times; rank 0 decides. The ranks wait for each other here, so that
    none waits inside the model.

    If a work is stopped before it begins, other ranks may lack the state: the work that was to write it was stopped,
    too, and nothing was moved. So a stop counts more than a missing state, and the ranks ask for it again if a state is
    missing and rank 0 has seen no stop.

    Raises:
        JobMissing: this worker does not have the state of the only job.
        GroupBroken: another rank does not have it, or is lost.
    """
    if comm is None:
        return MemberCheck() if is_stopped() else _check(jobs, command)
    assert len(command.members) == 1, f"work {command.work_id} of a group has {len(command.members)} jobs"
    missing: JobMissing | None = None
    check = MemberCheck()
    try:
        check = _check(jobs, command)
    except JobMissing as error:
        missing = error
    flags = _exchange(comm, device, _flag(missing, comm.rank == 0 and is_stopped()))
    if _ABSENT in flags and flags[0] != _STOPPED:
        flags = _exchange(comm, device, _flag(missing, comm.rank == 0 and is_stopped()))
    if flags[0] == _STOPPED:
        return MemberCheck()
    if missing:
        raise missing
    if _ABSENT in flags:
        raise GroupBroken(f"rank {flags.index(_ABSENT)} does not have the state of job {command.members[0][0]}")
    return check


def _flag(missing: JobMissing | None, decides_stop: bool) -> int:
    return _STOPPED if decides_stop else _ABSENT if missing else _READY


def _check(jobs: Jobs, command: Execute) -> MemberCheck:
    present: list[WorkJob] = []
    absent: list[Absent] = []
    for job_id, position in command.members:
        try:
            present.append(WorkJob(job_id, position, jobs.at(job_id, position)))
        except JobMissing as error:
            if len(command.members) == 1:
                raise
            absent.append(Absent(job_id, str(error), error.state_lost))
    return MemberCheck(tuple(present), tuple(absent))


def _exchange(comm: Comm, device: torch.device, flag: int) -> list[int]:
    flags = torch.empty(comm.size, dtype=torch.uint8, device=device)
    comm.all_gather(flags, torch.tensor([flag], dtype=torch.uint8, device=device))
    heard = [int(value) for value in flags.tolist()]
    synchronize(device, comm)
    return heard
