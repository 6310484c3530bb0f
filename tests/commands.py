"""Commands for a worker of a latent diffusion pipeline, in steps that are done instead of positions."""

from __future__ import annotations

from collections.abc import Mapping

from stages import DECODE, DIFFUSE, ENCODE
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.commands import Execute, GroupRef, ImportState
from tilework.core.wire.spec import Spec

MODEL = "model"
Members = tuple[tuple[int, int], ...]
"""Each job of a work, and how many of its steps are done before it."""


def encode(work_id: int, job_id: int, spec: Spec, revoked: bool = False) -> Execute:
    return Execute(work_id, MODEL, ENCODE, ((job_id, 0),), specs={job_id: spec}, revoked=revoked)


def steps(work_id: int, members: Members, num_steps: int, group: GroupRef | None = None) -> Execute:
    return Execute(
        work_id, MODEL, DIFFUSE, tuple((job_id, 1 + done) for job_id, done in members), num_steps, group=group
    )


def decode(work_id: int, job_id: int, num_steps: int = 4, sliced: bool = False) -> Execute:
    """For a request of so many steps; 4 are those of `tiny.spec`."""
    return decode_all(work_id, {job_id: num_steps}, sliced=sliced)


def decode_all(work_id: int, steps_of: Mapping[int, int], *, sliced: bool = False) -> Execute:
    """For requests of so many steps, together."""
    return Execute(work_id, MODEL, DECODE, tuple((job, 1 + count) for job, count in steps_of.items()), sliced=sliced)


def import_state(
    job_id: int, spec: Spec, steps_done: int, conditioning: StateBlob | None, state: StateBlob | None
) -> ImportState:
    """After so many steps. Without `conditioning` the worker has it already; without `state` there is none yet."""
    states = [
        SavedState(index, position, blob)
        for index, (position, blob) in enumerate(((1, conditioning), (1 + steps_done, state)))
        if blob is not None
    ]
    return ImportState(job_id, MODEL, spec, 1 + steps_done, tuple(states), known=conditioning is None)
