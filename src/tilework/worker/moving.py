"""A job in a parcel: how its state goes from one worker to another."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from tilework.core.wire import Spec
from tilework.pipelines.family import Family
from tilework.worker.jobs import Job, JobMissing, Jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parcel:
    spec: Spec
    conditioning: bytes | None
    state: bytes | None


def export_job(family: Family, job: Job, conditioning: bool) -> bytes:
    """Pack a job, with its conditioning if asked for. The caller must not run it any more."""
    parcel = _Parcel(
        spec=job.spec,
        conditioning=family.export_conditioning(job.conditioning) if conditioning else None,
        state=None if job.state is None else family.export(job.state),
    )
    return pickle.dumps(parcel)


def import_job(family: Family, jobs: Jobs, job_id: int, blob: bytes) -> Job:
    """Unpack a job. A parcel without conditioning refers to what `jobs` still knows of it.

    Raises JobMissing if that is nothing.
    """
    parcel: _Parcel = pickle.loads(blob)
    if parcel.conditioning is not None:
        conditioning = family.restore_conditioning(parcel.conditioning)
    elif job_id in jobs:
        conditioning = jobs.get(job_id).conditioning
    else:
        raise JobMissing(f"job {job_id} was moved without its conditioning to a worker that has none for it")
    state = None if parcel.state is None else family.restore(parcel.state, parcel.spec, conditioning)
    return Job(spec=parcel.spec, conditioning=conditioning, state=state)
