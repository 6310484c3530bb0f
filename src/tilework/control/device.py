"""A device inside the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from tilework.control.job import Job
from tilework.core.work import StageId, Work


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """What one device has been told to do, and when it is expected to be free; a `GpuView` to policies.

    `residents` are the jobs of which it keeps something, the one that was given to it last at the end.
    """

    gpu: int
    node: int
    stages: frozenset[StageId]
    works: list[Work] = field(default_factory=list)
    residents: dict[int, Job] = field(default_factory=dict)
    now_ns: int = 0
    free_ns: int = field(init=False)
    _predicted_ns: list[int] = field(default_factory=list)
    _ends_ns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free_ns = self.now_ns

    def at(self, now_ns: int) -> None:
        """Let time pass. The running work is expected to end now at the earliest, however late it already is."""
        self.now_ns = now_ns
        if not self.works:
            self.free_ns = now_ns
        elif self._ends_ns[0] < now_ns:
            self._foresee(now_ns)

    def end_ns(self, work: Work) -> int:
        return self._ends_ns[self.works.index(work)]

    def push(self, work: Work, end_ns: int) -> None:
        """Append a work that is predicted to end at `end_ns`, which includes waiting for the rest of its group."""
        self.works.append(work)
        self._predicted_ns.append(end_ns - self.free_ns)
        self._ends_ns.append(end_ns)
        self.free_ns = end_ns

    def pop(self, work: Work) -> None:
        index = self.works.index(work)
        head_ns = self._ends_ns[0]
        del self.works[index], self._predicted_ns[index]
        if not self.works:
            self._ends_ns, self.free_ns = [], self.now_ns
        else:
            self._foresee(self.now_ns + self._predicted_ns[0] if index == 0 else head_ns)

    def shorten(self, work: Work, run_ns: int) -> None:
        """Predict a work to end after `run_ns`, from now on if it is running, if that is sooner."""
        index = self.works.index(work)
        self._predicted_ns[index] = min(self._predicted_ns[index], run_ns)
        self._foresee(min(self._ends_ns[0], self.now_ns + run_ns) if index == 0 else self._ends_ns[0])

    def _foresee(self, head_ns: int) -> None:
        """Predict the ends of all works from that of the running one."""
        self._ends_ns = list(accumulate([head_ns, *self._predicted_ns[1:]]))
        self.free_ns = self._ends_ns[-1]
