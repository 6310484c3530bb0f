"""A device inside the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from tilework.control.job import Job
from tilework.core.work import StageId, Work


@dataclass(slots=True)
class Now:
    """The time of the event that is being handled."""

    ns: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """What one device has been told to do, and when it is expected to be free; a `GpuView` to policies.

    `residents` are the jobs of which it keeps something, the one that was given to it last at the end. The running work
    is expected to end now at the earliest, however late it already is; `now` is shared by all devices.
    """

    gpu: int
    node: int
    stages: frozenset[StageId]
    now: Now = field(default_factory=Now)
    works: list[Work] = field(default_factory=list)
    residents: dict[int, Job] = field(default_factory=dict)
    num_changes: int = 0
    _predicted_ns: list[int] = field(default_factory=list)
    _ends_ns: list[int] = field(default_factory=list)

    @property
    def free_ns(self) -> int:
        ends_ns = self._current_ends_ns()
        return ends_ns[-1] if ends_ns else self.now.ns

    def end_ns(self, work: Work) -> int:
        return self._current_ends_ns()[self.works.index(work)]

    def _current_ends_ns(self) -> list[int]:
        """Of its works; the time may have passed at which the first was expected to end."""
        if self._ends_ns and self._ends_ns[0] < self.now.ns:
            self._foresee(self.now.ns)
        return self._ends_ns

    def push(self, work: Work, end_ns: int) -> None:
        """Append a work that is predicted to end at `end_ns`, which includes waiting for the rest of its group."""
        self._predicted_ns.append(end_ns - self.free_ns)
        self.works.append(work)
        self._ends_ns.append(end_ns)
        self.num_changes += 1

    def pop(self, work: Work) -> None:
        index = self.works.index(work)
        head_ns = self._current_ends_ns()[0]
        del self.works[index], self._predicted_ns[index]
        self.num_changes += 1
        if self.works:
            self._foresee(self.now.ns + self._predicted_ns[0] if index == 0 else head_ns)
        else:
            self._ends_ns = []

    def shorten(self, work: Work, run_ns: int) -> None:
        """Predict a work to end after `run_ns`, from now on if it is running, if that is sooner."""
        index = self.works.index(work)
        head_ns = self._current_ends_ns()[0]
        self._predicted_ns[index] = min(self._predicted_ns[index], run_ns)
        self.num_changes += 1
        self._foresee(min(head_ns, self.now.ns + run_ns) if index == 0 else head_ns)

    def _foresee(self, head_ns: int) -> None:
        """Predict the ends of all works from that of the running one."""
        self._ends_ns = list(accumulate([head_ns, *self._predicted_ns[1:]]))
