"""Writes and reads the states of jobs as blobs."""

from __future__ import annotations

from collections.abc import Iterable

from tilework.core.wire import ImportState, StateBlob
from tilework.pipelines import serialization
from tilework.pipelines.family import LIVE, Family, Values
from tilework.worker.jobs import Job, JobMissing, Jobs, outputs_read
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.steps import WorkJob


def write_states(family: Family, blobs: StateBlobs, members: Iterable[WorkJob]) -> dict[int, StateBlob]:
    """Write what a work has made of its jobs; returns blobs by job, none for a job of which nothing is done.

    After an error no blob remains.
    """
    written: dict[int, StateBlob] = {}
    try:
        for member in members:
            if member.job.position:
                written[member.job_id] = blobs.write(serialization.serialize(member.job.written(family)))
    except Exception:
        for blob in written.values():
            blobs.remove(blob)
        raise
    return written


def import_job(family: Family, blobs: StateBlobs, jobs: Jobs, command: ImportState) -> Job:
    """Read the blobs of an import, in addition to what the worker has of the job if it is `known`.

    Raises:
        JobMissing: an output that the remaining stages read is neither here nor in the blobs.
        FileNotFoundError, TruncatedStateBlob: a blob is missing, for example if its job continued on other workers.
        BadState: a blob is damaged.
    """
    itinerary = family.info.graph.itinerary(command.spec.steps, result=command.spec.result)
    num_done = itinerary.at[command.position].num_done
    values = dict(jobs.get(command.job_id).values) if command.known and command.job_id in jobs else {}
    exported: Values | None = None
    for saved in command.states:
        contents = serialization.deserialize(blobs.read(saved.blob), family.device)
        if saved.position == itinerary.ends[saved.index]:
            values.update(contents)
        else:
            exported = contents
    read = outputs_read(itinerary, num_done)
    if missing := read - values.keys():
        raise JobMissing(f"job {command.job_id} was moved without its {min(missing)} to a worker that has none of it")
    job = Job(spec=command.spec, itinerary=itinerary, begun_at=itinerary.ends[num_done - 1] if num_done else 0)
    job.values = {name: value for name, value in values.items() if name in read or name == LIVE}
    if exported is not None:
        job.state = family.restore(job.stage.name, command.spec, job.values, exported)
    return job
