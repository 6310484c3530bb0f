"""Writes and reads the conditioning and state of jobs as blobs."""

from __future__ import annotations

from collections.abc import Iterable

from tilework.core.wire import ImportState, StateBlob
from tilework.pipelines.family import Conditioning, Family
from tilework.worker.jobs import Job, JobMissing, Jobs
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.steps import WorkJob


def write_conditioning(family: Family, blobs: StateBlobs, conditioning: Conditioning) -> StateBlob:
    return blobs.write(family.export_conditioning(conditioning))


def write_states(family: Family, blobs: StateBlobs, members: Iterable[WorkJob]) -> dict[int, StateBlob]:
    """Write the states of jobs; returns blobs by job, none for a job without steps. After an error no blob remains."""
    written: dict[int, StateBlob] = {}
    try:
        for member in members:
            if member.job.state is not None:
                written[member.job_id] = blobs.write(family.export(member.job.state))
    except Exception:
        for blob in written.values():
            blobs.remove(blob)
        raise
    return written


def import_job(family: Family, blobs: StateBlobs, jobs: Jobs, command: ImportState) -> Job:
    """Read the blobs of an import. Without a blob of the conditioning, that of the job in `jobs` is used.

    Raises:
        JobMissing: neither has it.
        FileNotFoundError, TruncatedStateBlob: a blob is missing, for example if its job continued on other workers.
    """
    if command.conditioning is not None:
        conditioning = family.restore_conditioning(blobs.read(command.conditioning))
    elif command.job_id in jobs:
        conditioning = jobs.get(command.job_id).conditioning
    else:
        raise JobMissing(f"job {command.job_id} was moved without its conditioning to a worker that has none for it")
    state = None
    if command.state is not None:
        state = family.restore(blobs.read(command.state), command.spec, conditioning)
    return Job(spec=command.spec, conditioning=conditioning, state=state)
