"""A job's way from one worker to another: its conditioning and its state, as parcels."""

from __future__ import annotations

from collections.abc import Iterable

from tilework.core.wire import ImportState, Parcel
from tilework.pipelines.family import Conditioning, Family
from tilework.worker.jobs import Job, JobMissing, Jobs
from tilework.worker.parcels import Parcels
from tilework.worker.steps import Member


def put_conditioning(family: Family, parcels: Parcels, conditioning: Conditioning) -> Parcel:
    return parcels.put(family.export_conditioning(conditioning))


def put_states(family: Family, parcels: Parcels, members: Iterable[Member]) -> dict[int, Parcel]:
    """By job; of one that has not begun its first step there is none. All or none: an error leaves nothing behind."""
    put: dict[int, Parcel] = {}
    try:
        for member in members:
            if member.job.state is not None:
                put[member.job_id] = parcels.put(family.export(member.job.state))
    except Exception:
        for parcel in put.values():
            parcels.take_back(parcel)
        raise
    return put


def take_job(family: Family, parcels: Parcels, jobs: Jobs, command: ImportState) -> Job:
    """Read what `command` names; without conditioning there, what `jobs` still has of it is used.

    Raises:
        JobMissing: neither has it.
        FileNotFoundError, TruncatedParcel: a parcel is gone, for instance since its job went on without this worker.
    """
    if command.conditioning is not None:
        conditioning = family.restore_conditioning(parcels.take(command.conditioning))
    elif command.job_id in jobs:
        conditioning = jobs.get(command.job_id).conditioning
    else:
        raise JobMissing(f"job {command.job_id} was moved without its conditioning to a worker that has none for it")
    state = None
    if command.state is not None:
        state = family.restore(parcels.take(command.state), command.spec, conditioning)
    return Job(spec=command.spec, conditioning=conditioning, state=state)
