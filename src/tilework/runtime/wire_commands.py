"""Translates messages of the driver core into wire commands."""

from __future__ import annotations

from collections.abc import Mapping

from tilework.control.driver.state_registry import StateMove
from tilework.core.wire.commands import Execute, GroupRef, ImportState
from tilework.core.wire.spec import Spec
from tilework.core.work import Work


def run_command(work: Work, specs: Mapping[int, Spec], group: GroupRef | None) -> Execute:
    """Return the command that runs a work. `specs` are those of its jobs; `group` is None for one device."""
    members = tuple([(one.job_id, one.position) for one in work.members])
    return Execute(
        work_id=work.work_id,
        model=work.stage.pipeline,
        stage=work.stage.name,
        members=members,
        num_steps=work.num_steps,
        specs={job_id: specs[job_id] for job_id, position in members if not position},
        group=group,
        sliced=work.sliced,
        caches=work.stage.caches,
    )


def import_command(move: StateMove, model: str, spec: Spec) -> ImportState:
    """Return the command that imports the state that a resolved move delivers."""
    known = 0 not in move.stages
    return ImportState(
        job_id=move.job_id, model=model, spec=spec, position=move.position, states=move.states, known=known
    )
