"""Runs of works on simulated devices, and the states that they produce."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tilework.core.actions import LoadComponents
from tilework.core.component import Component, LoadSource, num_bytes
from tilework.core.work import Group, Member, Work


class RunEnd(StrEnum):
    """End of a run. `BROKEN`: its group was broken off. `REFUSED`: it did not begin, as a device lacks the state."""

    DONE = "done"
    STOPPED = "stopped"
    BROKEN = "broken"
    FAILED = "failed"
    REFUSED = "refused"
    OUT_OF_MEMORY = "out_of_memory"


DROPS_STATES = (RunEnd.FAILED, RunEnd.REFUSED)  # After these the devices drop the states of the run's jobs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A work that devices have begun. It ends at `end_ns` after `steps` steps, unless it is stopped.

    A run that `hangs` never ends. `left_out` are the members whose state a device lacks; the value is whether a fault
    has lost that state. A work that lacks the states of all its members does not run.
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
    def members(self) -> Sequence[Member]:
        """Members that take part."""
        members = self.work.members
        return [one for one in members if one.job_id not in self.left_out] if self.left_out else members

    def steps_by(self, now_ns: int) -> int:
        """Return the number of whole steps done by now."""
        if self.hangs or not self.steps:
            return 0
        return min(self.steps, max(0, now_ns - self.start_ns) // self.step_ns)

    @property
    def step_ns(self) -> int:
        return max(1, (self.end_ns - self.start_ns) // self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """Load of a device from `source`, until `end_ns`, unless the device does something else meanwhile.

    Of a load that has ended, `start_ns` is when it would have begun without a pause. What was `dropped` before it was
    there is never loaded.
    """

    load: LoadComponents
    source: LoadSource
    start_ns: int
    end_ns: int
    dropped: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class OpenLoad:
    """A load that has not ended: what is left of it, how long that takes, and how long it took so far.

    `source` is None before it begins.
    """

    load: LoadComponents
    left: tuple[Component, ...]
    source: LoadSource | None = None
    left_ns: int = 0
    run_ns: int = 0
    dropped: tuple[str, ...] = ()

    def drop(self, digests: Collection[str]) -> None:
        """Leave these out."""
        before = num_bytes(self.left)
        self.dropped += tuple(one.digest for one in self.left if one.digest in digests)
        self.left = tuple(one for one in self.left if one.digest not in digests)
        self.left_ns = self.left_ns * num_bytes(self.left) // max(1, before)

    def pause(self, run: LoadRun, now_ns: int) -> None:
        """Take what a run of it has done so far off what is left. It may have waited for its host first."""
        done_ns = min(self.left_ns, max(0, now_ns - (run.end_ns - self.left_ns)))
        self.left_ns -= done_ns
        self.run_ns += now_ns - run.start_ns


@dataclass(frozen=True, slots=True)
class State:
    """State of a job as its stages have written it: the pieces (position, number of steps) that it ran, in order.

    `position` is the sum over all pieces, kept since devices ask for it before each work.
    """

    pieces: tuple[tuple[int, int], ...] = ()
    position: int = field(default=0, repr=False)

    def after(self, position: int, num_steps: int) -> State:
        return State((*self.pieces, (position, num_steps)), self.position + num_steps)
