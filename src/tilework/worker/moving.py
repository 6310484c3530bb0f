"""Moves a job between workers: its conditioning and its state, as blobs."""

from __future__ import annotations

from collections.abc import Iterable

from tilework.core.wire import ImportState, StateBlob
from tilework.pipelines.family import Conditioning, Family
from tilework.worker.jobs import Job, JobMissing, Jobs
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.steps import WorkJob


def put_conditioning(family: Family, blobs: StateBlobs, conditioning: Conditioning) -> StateBlob:
    return blobs.put(family.export_conditioning(conditioning))


def put_states(family: Family, blobs: StateBlobs, members: Iterable[WorkJob]) -> dict[int, StateBlob]:
    """By job; of one that has not begun its first step there is none. All or none: an error leaves nothing behind."""
    put: dict[int, StateBlob] = {}
    try:
        for member in members:
            if member.job.state is not None:
                put[member.job_id] = blobs.put(family.export(member.job.state))
    except Exception:
        for blob in put.values():
            blobs.take_back(blob)
        raise
    return put


def take_job(family: Family, blobs: StateBlobs, jobs: Jobs, command: ImportState) -> Job:
    """Read what `command` names; without conditioning there, what `jobs` still has of it is used.

    Raises:
        JobMissing: neither has it.
        FileNotFoundError, TruncatedStateBlob: a blob is missing, for example if its job continued on other workers.
    """
    if command.conditioning is not None:
        conditioning = family.restore_conditioning(blobs.take(command.conditioning))
    elif command.job_id in jobs:
        conditioning = jobs.get(command.job_id).conditioning
    else:
        raise JobMissing(f"job {command.job_id} was moved without its conditioning to a worker that has none for it")
    state = None
    if command.state is not None:
        state = family.restore(blobs.take(command.state), command.spec, conditioning)
    return Job(spec=command.spec, conditioning=conditioning, state=state)
