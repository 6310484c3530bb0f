"""What simulated devices report, in the words of real ones, and where they put states down."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tilework.control.driver.state_registry import StateMove
from tilework.core.wire import Absent, Ended, Failed, StateBlob
from tilework.sim.runs import Run, RunEnd, State

_WHY = "it went wrong"
_WHY_ABSENT = "its device does not have its state"
CUT_OFF = (RunEnd.BROKEN, RunEnd.OUT_OF_MEMORY)
"""Endings of which every device of a group reports, not only its leader."""


class BlobStore:
    """The states that devices have put down, by blob. What a fault has lost has a blob, and no state."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, blob: StateBlob | None) -> bool:
        return blob is not None and blob.name in self._states

    def __getitem__(self, blob: StateBlob) -> State:
        return self._states[blob.name]

    def put(self, state: State) -> StateBlob:
        self._next += 1
        blob = StateBlob(str(self._next), 1)
        self._states[blob.name] = state
        return blob

    def discard(self, blobs: Collection[StateBlob]) -> None:
        for blob in blobs:
            self._states.pop(blob.name, None)

    def keep_only(self, blobs: Collection[StateBlob]) -> None:
        """Remove all others, as the next server does at its start."""
        names = {blob.name for blob in blobs}
        self._states = {name: state for name, state in self._states.items() if name in names}

    def brought_by(self, move: StateMove) -> tuple[State | None, bool]:
        """The state that a resolved move brings, None for nothing, and whether it is lost.

        A simulated state holds its conditioning. Without either blob the target has the conditioning already.
        """
        blob = move.state or move.conditioning
        if not move.delivers:
            return None, False
        if blob is None:
            return State(), False
        return self._states.get(blob.name), blob not in self


def report_of(run: Run, blobs: Mapping[int, StateBlob]) -> Ended | Failed:
    """What a device says of a run that has ended, for which it has put these blobs down."""
    work_id = run.work.work_id
    if run.end is RunEnd.DONE and not run.left_out:
        return Ended(work_id, run.start_ns, run.end_ns, run.steps, blobs=blobs)
    if run.end is RunEnd.FAILED:
        return Failed(work_id, _WHY)
    if run.end is RunEnd.REFUSED and len(run.work.job_ids) == 1:
        return Failed(work_id, _WHY, any(run.left_out.values()))
    return Ended(
        work_id,
        run.start_ns,
        run.end_ns,
        run.steps,
        stopped=run.end in (RunEnd.STOPPED, RunEnd.REFUSED),
        broken=run.end is RunEnd.BROKEN,
        out_of_memory=run.end is RunEnd.OUT_OF_MEMORY,
        blobs=blobs,
        absent=tuple(Absent(job_id, _WHY_ABSENT, is_lost) for job_id, is_lost in run.left_out.items()),
    )
