"""Translates messages of the driver core into wire commands."""

from __future__ import annotations

from tilework.control.driver.state_registry import StateMove
from tilework.core.wire import Decode, Denoise, Encode, GroupRef, ImportState, Spec
from tilework.core.work import DIFFUSE, ENCODE, Work


def run_command(work: Work, spec: Spec, group: GroupRef | None) -> Encode | Denoise | Decode:
    """The command that runs a work. `spec` is that of its first job; `group` is None for one device."""
    match work.stage.name:
        case stage if stage == ENCODE:
            return Encode(work.work_id, work.job_ids[0], spec)
        case stage if stage == DIFFUSE:
            return Denoise(work.work_id, work.members, work.num_steps, group)
        case _:
            return Decode(work.work_id, work.job_ids[0], work.sliced)


def import_command(move: StateMove, spec: Spec) -> ImportState:
    """The command that imports the state that a resolved move delivers."""
    return ImportState(move.job_id, spec, move.conditioning, move.state)
