"""Writes and reads the states of jobs as blobs."""

from __future__ import annotations

from collections.abc import Iterable

from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.commands import ImportState
from tilework.pipelines import serialization
from tilework.pipelines.family import LIVE, Family, Values
from tilework.worker.jobs import HeldJob, JobMissing, Jobs, outputs_read
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.steps import WorkJob


def write_states(family: Family, blobs: StateBlobs, members: Iterable[WorkJob]) -> dict[int, StateBlob]:
    """Write the results of a work for its jobs, which then know their blobs; return the blobs by job.

    A job of which nothing is done has no blob. After an error no blob remains.
    """
    written: dict[int, StateBlob] = {}
    begun = [member for member in members if member.job.position]
    try:
        for member in begun:
            written[member.job_id] = blobs.write(serialization.serialize(member.job.written(family), blobs.copies))
    except Exception:
        for blob in written.values():
            blobs.remove(blob)
        raise
    for member in begun:
        member.job.note_written(written[member.job_id])
    return written


def import_job(family: Family, blobs: StateBlobs, jobs: Jobs, command: ImportState) -> HeldJob:
    """Read the blobs of an import, in addition to what the worker has of the job if it is `known`.

    The outputs of a job that was spilled here are read from its blobs, too.

    Raises:
        JobMissing: an output that the remaining stages read is neither here nor in the blobs.
        FileNotFoundError, TruncatedStateBlob: a blob is missing, for example if its job continued on other workers.
        BadState: a blob is damaged.
    """
    itinerary = family.info.graph.itinerary(command.spec.steps, result=command.spec.result)
    num_done = itinerary.at[command.position].num_done
    here = jobs.find(command.job_id) if command.known else None
    values = {} if here is None else dict(here.values)
    states = (*_outputs_spilled(here, num_done, command), *command.states)
    exported: Values | None = None
    for saved in states:
        contents = serialization.deserialize(blobs.read(saved.blob), family.device, blobs.copies)
        if saved.position == itinerary.ends[saved.index]:
            values.update(contents)
        else:
            exported = contents
    read = outputs_read(itinerary, num_done)
    if missing := read - values.keys():
        raise JobMissing(f"job {command.job_id} was moved without its {min(missing)} to a worker that has none of it")
    job = HeldJob(spec=command.spec, itinerary=itinerary, begun_at=itinerary.ends[num_done - 1] if num_done else 0)
    job.values = {name: value for name, value in values.items() if name in read or name == LIVE}
    job.saved = {} if here is None else dict(here.saved)
    for saved in states:
        job.note(saved)
    if exported is not None:
        job.state = family.restore(job.stage.name, command.spec, job.values, exported)
    return job


def _outputs_spilled(here: HeldJob | None, num_done: int, command: ImportState) -> list[SavedState]:
    """Return blobs of a spilled job with outputs that later stages need and that the import does not name."""
    if here is None or not here.is_spilled:
        return []
    ends, named = here.itinerary.ends, {one.index for one in command.states}
    return [
        here.saved[ends[index]]
        for index in here.itinerary.needed_from[num_done]
        if index not in named and ends[index] in here.saved
    ]
