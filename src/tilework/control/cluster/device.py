"""A device inside the controller."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.control.cluster.job import Job
from tilework.core.work import StageId, Work


@dataclass(slots=True)
class Now:
    """The time of the event that is being handled."""

    ns: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """What one device has been told to do, and when it is expected to be free; a `DeviceView` to policies.

    `residents` are the jobs of which it keeps something, the one that was given to it last at the end. The running work
    is expected to end now at the earliest, however late it already is; `now` is shared by all devices.
    """

    device_id: int
    node: int
    stages: frozenset[StageId]
    now: Now = field(default_factory=Now)
    works: list[Work] = field(default_factory=list)
    residents: dict[int, Job] = field(default_factory=dict)
    num_changes: int = 0
    _head_ns: int = 0  # When the running work was expected to end, as of the last change,
    _runs_ns: list[int] = field(default_factory=list)  # how long each work takes behind the one before it,
    _rest_ns: int = 0  # and all queued ones together.

    @property
    def free_ns(self) -> int:
        if not self.works:
            return self.now.ns
        return max(self._head_ns, self.now.ns) + self._rest_ns

    def has(self, work: Work) -> bool:
        return self._index(work) is not None

    def end_ns(self, work: Work) -> int:
        end_ns = max(self._head_ns, self.now.ns)
        for one, run_ns in zip(self.works, self._runs_ns, strict=True):
            if one is not self.works[0]:
                end_ns += run_ns
            if one is work:
                return end_ns
        return 0

    def push(self, work: Work, end_ns: int) -> None:
        """Append a work that is predicted to end at `end_ns`, which includes waiting for the rest of its group."""
        run_ns = end_ns - self.free_ns
        if self.works:
            self._rest_ns += run_ns
        else:
            self._head_ns = end_ns
        self.works.append(work)
        self._runs_ns.append(run_ns)
        self.num_changes += 1

    def pop(self, work: Work) -> None:
        """Remove a work, if it has it."""
        index = self._index(work)
        if index is None:
            return
        del self.works[index]
        run_ns = self._runs_ns.pop(index)
        self.num_changes += 1
        if index:
            self._rest_ns -= run_ns
        elif self.works:
            self._head_ns = self.now.ns + self._runs_ns[0]
            self._rest_ns -= self._runs_ns[0]

    def shorten(self, work: Work, run_ns: int) -> None:
        """Predict a work, if it has it, to end after `run_ns`, from now on if it is running, if that is sooner."""
        index = self._index(work)
        if index is None:
            return
        self.num_changes += 1
        if index == 0:
            self._head_ns = min(max(self._head_ns, self.now.ns), self.now.ns + run_ns)
        elif run_ns < self._runs_ns[index]:
            self._rest_ns -= self._runs_ns[index] - run_ns
            self._runs_ns[index] = run_ns

    def _index(self, work: Work) -> int | None:
        """By identity: to compare works field by field took longer than all else here."""
        for index, one in enumerate(self.works):
            if one is work:
                return index
        return None
