"""The previews of one running work."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tilework.core.wire.reports import Preview, Report
from tilework.core.wire.spec import Image
from tilework.pipelines.family import StepState
from tilework.worker.jobs import HeldJob

_log = logging.getLogger(__name__)


class Previews:
    """Draws and emits a preview after every `every` steps of a member, but not after its last one; 0: never.

    The image takes precedence: if a preview fails, for example for lack of memory, the work continues without previews.
    """

    def __init__(self, work_id: int, job_id: int, job: HeldJob, every: int, emit: Callable[[Report], None]) -> None:
        self._work_id = work_id
        self._job_id = job_id
        self._first_step = job.position - job.begun_at
        self._num_steps = job.itinerary.steps
        self._num_before = self._num_steps - job.itinerary.at[job.begun_at].num_steps_left
        self._every = every
        self._emit = emit

    def show(self, state: StepState, draw: Callable[[], Image]) -> None:
        """Emit a preview of the step that is about to end, if one is due."""
        if not self._every or not self._is_due(state):
            return
        try:
            image = draw()
        except Exception:
            _log.warning(
                "work %d continues without previews of job %d: one failed", self._work_id, self._job_id, exc_info=True
            )
            self._every = 0
            return
        self._emit(Preview(self._work_id, self._job_id, state.steps_done + 1 - self._first_step, image))

    def _is_due(self, state: StepState) -> bool:
        num_done = self._num_before + state.steps_done + 1  # Counts all stages with steps.
        return num_done < self._num_steps and num_done % self._every == 0
