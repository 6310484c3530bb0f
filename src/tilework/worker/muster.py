"""Before a work begins: whether every member of its group can, and is to."""

from __future__ import annotations

import torch

from tilework.core.comm import Comm, GroupBroken
from tilework.core.wire import Denoise
from tilework.worker.jobs import Job, JobMissing, Jobs

_READY, _STOPPED, _ABSENT = range(3)


def muster(jobs: Jobs, command: Denoise, comm: Comm | None, device: torch.device, stopped: bool) -> Job | None:
    """The job, in the state in which the work begins; None if the work was stopped in the queue.

    Members hear of a stop at different times: what the first of them knows counts. They wait here for each other, so
    that nobody waits inside the model.

    Raises:
        JobMissing: this worker does not have the state.
        GroupBroken: another member does not have it, or is lost.
    """
    if comm is None:
        return None if stopped else jobs.at_step(command.job_id, command.first_step)
    missing: JobMissing | None = None
    try:
        job = jobs.at_step(command.job_id, command.first_step)
    except JobMissing as error:
        missing = error
    flags = _exchange(comm, device, _ABSENT if missing else _STOPPED if stopped else _READY)
    if missing:
        raise missing
    if _ABSENT in flags:
        raise GroupBroken(f"rank {flags.index(_ABSENT)} does not have the state of job {command.job_id}")
    return None if flags[0] == _STOPPED else job


def _exchange(comm: Comm, device: torch.device, flag: int) -> list[int]:
    flags = torch.empty(comm.size, dtype=torch.uint8, device=device)
    comm.all_gather(flags, torch.tensor([flag], dtype=torch.uint8, device=device))
    return [int(value) for value in flags.tolist()]
