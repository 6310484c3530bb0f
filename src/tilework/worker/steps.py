"""The step loop of one running work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from tilework.core.wire import Progress, Report
from tilework.patches.layout import pack
from tilework.pipelines.family import Family, StepState
from tilework.worker.jobs import Job
from tilework.worker.previews import Previews
from tilework.worker.synchronize import synchronize
from tilework.worker.works import OpenWorks


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A job that takes part in a work, which begins when `first_step` of its steps are done."""

    job_id: int
    first_step: int
    job: Job

    @property
    def num_steps_left(self) -> int:
        """When the work begins."""
        return self.job.spec.steps - self.first_step


class Steps:
    """Steps of the `members`, which share forward passes if they are several; a group has one, in lockstep.

    Whoever `leads` its group tells of progress and previews.
    """

    def __init__(
        self,
        family: Family,
        members: Sequence[Member],
        work_id: int,
        leads: bool,
        works: OpenWorks,
        emit: Callable[[Report], None],
    ) -> None:
        self._family = family
        self._members = members
        self._work_id = work_id
        self._leads = leads
        self._works = works
        self._emit = emit
        self._pack = pack if len(members) > 1 else None
        self._previews = {
            member.job_id: Previews(family, work_id, member.job_id, member.first_step, _every(member, leads), emit)
            for member in members
        }

    def run(self, most: int) -> int:
        """Returns how many steps were done: so many, or fewer if a stop came before the last of them."""
        members = [(member, self._begun(member.job)) for member in self._members]
        parallel = self._family.parallel
        for steps_done in count(1):
            self._step(members)
            if steps_done == most:
                break
            synchronize(self._family.device)
            parallel.wants_stop = self._works.is_stopped(self._work_id)  # Alone, this is what counts.
            if parallel.stop_agreed:
                break
            if self._leads:
                self._emit(Progress(self._work_id, steps_done))
        return steps_done

    def _begun(self, job: Job) -> StepState:
        state = job.state = job.state or self._family.begin(job.spec, job.conditioning)
        return state

    def _step(self, members: Sequence[tuple[Member, StepState]]) -> None:
        """One step of each, which may take several iterations; those who need fewer than others wait."""
        before = [state.steps_done for _, state in members]
        while True:
            pairs = zip(members, before, strict=True)
            behind = [member for member, steps_done in pairs if member[1].steps_done == steps_done]
            if not behind:
                return
            self._family.parallel.wants_stop = self._works.is_stopped(self._work_id)
            predictions = self._family.predict([state for _, state in behind], self._pack)
            for (member, state), prediction in zip(behind, predictions, strict=True):
                self._previews[member.job_id].show(state, prediction)
                # A step that fails half way leaves no state: the job goes on from what was put down.
                member.job.state = None
                self._family.advance(state, prediction)
                member.job.state = state


def _every(member: Member, leads: bool) -> int:
    return member.job.spec.preview_every if leads else 0
