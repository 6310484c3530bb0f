"""The previews of one running work."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from tilework.core.wire import Preview, Report
from tilework.pipelines.family import Family, StepState
from tilework.worker.jobs import Job

_log = logging.getLogger(__name__)


class Previews:
    """Draws and emits a preview after every `every` steps of a member, but not after its last one; 0: never.

    The picture comes first: if a preview fails, for example for lack of memory, the work continues without previews.
    """

    def __init__(
        self, family: Family, work_id: int, job_id: int, job: Job, every: int, emit: Callable[[Report], None]
    ) -> None:
        self._family = family
        self._work_id = work_id
        self._job_id = job_id
        self._first_step = job.position - job.begun_at
        self._num_steps = job.itinerary.steps
        self._num_before = self._num_steps - job.itinerary.at[job.begun_at].num_steps_left
        self._every = every
        self._emit = emit

    def show(self, state: StepState, prediction: Tensor) -> None:
        """Call before each `advance`: a preview of the step, if its last iteration comes next and it is due."""
        if not self._every or not self._is_due(state):
            return
        try:
            image = self._family.preview(state, prediction)
        except Exception:
            _log.warning(
                "work %d continues without previews of job %d: one failed", self._work_id, self._job_id, exc_info=True
            )
            self._every = 0
            return
        self._emit(Preview(self._work_id, self._job_id, state.steps_done_next - self._first_step, image))

    def _is_due(self, state: StepState) -> bool:
        steps_done = state.steps_done_next
        num_done = self._num_before + steps_done  # Of all stages with steps.
        return state.steps_done < steps_done and num_done < self._num_steps and num_done % self._every == 0
