"""A work on simulated devices from its beginning to its end, and the states that works bring about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tilework.core.work import Group, Work


class RunEnd(StrEnum):
    """How a run ends: as it was meant to, by a stop, with its group, by an error, before it began since a device lacks
    the state, or out of memory."""

    DONE = "done"
    STOPPED = "stopped"
    BROKEN = "broken"
    FAILED = "failed"
    REFUSED = "refused"
    OUT_OF_MEMORY = "out_of_memory"


FRUITLESS = (RunEnd.FAILED, RunEnd.REFUSED)  # Its devices have nothing of its jobs any more.


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A work that these devices have begun; it will end at `end_ns` after `steps` steps, unless it is stopped.

    If it `hangs` it never ends. `left_out` are members whose state the devices lack, each with whether what should have
    come of it is gone. Only a work that lacks all of them does not run.
    """

    work: Work
    devices: Group
    start_ns: int
    end_ns: int
    steps: int
    end: RunEnd = RunEnd.DONE
    left_out: Mapping[int, bool] = field(default_factory=dict)
    hangs: bool = False

    @property
    def members(self) -> list[tuple[int, int]]:
        """The jobs that take part, each with the steps that it had behind it."""
        members = self.work.members
        return [one for one in members if one[0] not in self.left_out] if self.left_out else list(members)

    def steps_by(self, now_ns: int) -> int:
        """Whole steps that it has made by now."""
        if self.hangs or not self.steps:
            return 0
        return min(self.steps, max(0, now_ns - self.start_ns) // self.step_ns)

    @property
    def step_ns(self) -> int:
        return max(1, (self.end_ns - self.start_ns) // self.steps)


@dataclass(frozen=True, slots=True)
class State:
    """A job's conditioning and its latents, after pieces of (first step, number of steps) in the order they ran in.

    `steps_done` are the steps of all pieces: every device asks for them before each work.
    """

    pieces: tuple[tuple[int, int], ...] = ()
    steps_done: int = field(default=0, repr=False)

    def after(self, first_step: int, num_steps: int) -> State:
        return State((*self.pieces, (first_step, num_steps)), self.steps_done + num_steps)
