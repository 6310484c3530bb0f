"""The reports of simulated devices, as wire messages of real ones."""

from __future__ import annotations

from collections.abc import Mapping

from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.reports import Absent, Ended, Ending, Failed
from tilework.sim.fleet import Fleet
from tilework.sim.nodes.nodes import SimNodes
from tilework.sim.runs import DROPS_STATES, Run, RunEnd

_ENDINGS = {
    RunEnd.DONE: Ending.DONE,
    RunEnd.STOPPED: Ending.STOPPED,
    RunEnd.REFUSED: Ending.STOPPED,
    RunEnd.BROKEN: Ending.BROKEN,
    RunEnd.OUT_OF_MEMORY: Ending.OUT_OF_MEMORY,
}
_REASON = "a simulated error"
_REASON_ABSENT = "its device does not have its state"
CUT_OFF = (RunEnd.BROKEN, RunEnd.OUT_OF_MEMORY)
"""Ends that every device of a group reports, not only its leader."""


def serialize(device_id: int, run: Run, fleet: Fleet, nodes: SimNodes, node: int) -> dict[int, StateBlob]:
    """Return the blobs that a device of a node writes at the end of a run, by job.

    The leader does, and all of a group that was cut off.

    None without a step: the device may have another state of a job than that at which the work was to begin.
    """
    blobs: dict[int, StateBlob] = {}
    if not run.steps or run.end in DROPS_STATES or (device_id != run.work.devices[0] and run.end not in CUT_OFF):
        return blobs
    for job_id in run.work.job_ids:
        state = fleet.state(device_id, job_id)
        if state is not None and job_id not in run.left_out:
            blobs[job_id] = nodes.put(state, node)
    return blobs


def report_of(run: Run, blobs: Mapping[int, StateBlob]) -> Ended | Failed:
    """Return a device's report of a run that has ended. `blobs` are those that it has written for the run."""
    work_id = run.work.work_id
    if run.end is RunEnd.DONE and not run.left_out:
        return Ended(work_id, run.start_ns, run.end_ns, run.steps, blobs=blobs)
    if run.end is RunEnd.FAILED:
        return Failed(work_id, _REASON)
    if run.end is RunEnd.REFUSED and len(run.work.job_ids) == 1:
        return Failed(work_id, _REASON, any(run.left_out.values()))
    return Ended(
        work_id,
        run.start_ns,
        run.end_ns,
        run.steps,
        _ENDINGS[run.end],
        blobs=blobs,
        absent=tuple(Absent(job_id, _REASON_ABSENT, is_lost) for job_id, is_lost in run.left_out.items()),
    )
