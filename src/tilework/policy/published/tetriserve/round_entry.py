"""A task in a round, with the degrees at which it can make progress in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.core.time import s_from_ns
from tilework.core.work import Group
from tilework.cost.demand import Segment, Speed
from tilework.policy.published.tetriserve.round import Round
from tilework.policy.toolkit.tasks import NO_STEPS, Task
from tilework.policy.toolkit.wording import explain


@dataclass(slots=True, eq=False)
class Entry:
    """A task in a round. `speeds` are those at which it makes progress in it; `parts` is its minimal allocation.

    `guests` are the tasks that make their steps with its own, in one batch on its one device.
    """

    task: Task
    speeds: dict[int, Speed]
    parts: tuple[Segment, ...]
    group: Group = ()
    why: str = ""
    guests: list[Task] = field(default_factory=list)

    @staticmethod
    def of(task: Task, this_round: Round) -> Entry | None:
        """None if the task can make no progress: it still runs, on devices that take no part in the round."""
        if task.ready_ns > this_round.now_ns + this_round.margin_ns:
            return None
        parts = this_round.minimal_allocation(task)
        useful = {speed.degree: speed for speed in task.speeds if this_round.num_steps(task, speed, task.ready_ns)}
        preferred = parts[0].degree if parts else min(useful, default=1)
        is_only_decode = not task.num_steps
        has_no_room_after_encode = task.head_ns > 0 and preferred not in useful
        if is_only_decode or (has_no_room_after_encode and (this_round.can_wait(task) or not useful)):
            return Entry(task, {1: NO_STEPS}, (Segment(0, 1),))
        return Entry(task, useful, parts) if useful else None

    @property
    def degree(self) -> int:
        return len(self.group)

    @property
    def makes_steps_alone(self) -> bool:
        """Whether it makes steps on one device, and not only its encode or decode."""
        return self.speeds.get(1, NO_STEPS) is not NO_STEPS

    @property
    def batch(self) -> list[Task]:
        return [self.task, *self.guests]

    def cheapest_degrees(self) -> list[int]:
        """The degrees of the minimal allocation at which it makes progress."""
        return [part.degree for part in self.parts if part.degree in self.speeds]

    def degrees_to_try(self) -> list[int]:
        """The cheapest degrees; then narrower ones, which are better than none."""
        degrees = self.cheapest_degrees() or [min(self.speeds)]
        return degrees + [degree for degree in reversed(self.speeds) if degree < min(degrees)]

    def reason(self, this_round: Round) -> str:
        """Why it runs, and when it would finish at the next lower degree, or if it waited for the next round."""
        task, degree = self.task, self.degree
        text = explain(task.job, self.why, this_round.now_ns)
        if task.job.request.deadline_ns is None or task.job.dropped_to_best_effort or not task.num_steps:
            return text
        below = next((speed for speed in reversed(task.speeds) if speed.degree < degree), None)
        if below is None:
            start_ns, step_ns, instead = this_round.end_ns, task.fastest.step_ns, "if it waited a round, it"
        else:
            start_ns, step_ns, instead = task.ready_ns, below.step_ns, f"with {below.degree} it"
        finish_ns = start_ns + task.head_ns + task.num_steps * step_ns + task.tail_ns
        spare_s = s_from_ns(task.due_ns - finish_ns)
        return f"{text}; {instead} would finish {abs(spare_s):.2f} s {'late' if spare_s < 0 else 'early'}"
