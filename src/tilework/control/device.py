"""A device inside the controller."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    _head_ns: int = 0  # When the running work was expected to end, as of the last change,
    _runs_ns: list[int] = field(default_factory=list)  # and how long each work takes behind the one before it.

    @property
    def free_ns(self) -> int:
        return self._end_ns(len(self.works)) if self.works else self.now.ns

    def has(self, work: Work) -> bool:
        return self._index(work) is not None

    def end_ns(self, work: Work) -> int:
        index = self._index(work)
        assert index is not None, f"device {self.gpu} does not have the work {work.work_id}"
        return self._end_ns(index + 1)

    def _end_ns(self, num_works: int) -> int:
        """When so many works have ended; the time may have passed at which the first was expected to end."""
        head_ns = max(self._head_ns, self.now.ns)
        return head_ns if num_works == 1 else head_ns + sum(self._runs_ns[1:num_works])

    def _index(self, work: Work) -> int | None:
        """By identity: to compare works field by field took longer than all else here."""
        for index, one in enumerate(self.works):
            if one is work:
                return index
        return None

    def push(self, work: Work, end_ns: int) -> None:
        """Append a work that is predicted to end at `end_ns`, which includes waiting for the rest of its group."""
        self._runs_ns.append(end_ns - self.free_ns)
        if not self.works:
            self._head_ns = end_ns
        self.works.append(work)
        self.num_changes += 1

    def pop(self, work: Work) -> None:
        index = self._index(work)
        assert index is not None, f"device {self.gpu} does not have the work {work.work_id}"
        del self.works[index], self._runs_ns[index]
        self.num_changes += 1
        if index == 0 and self.works:
            self._head_ns = self.now.ns + self._runs_ns[0]

    def shorten(self, work: Work, run_ns: int) -> None:
        """Predict a work to end after `run_ns`, from now on if it is running, if that is sooner."""
        index = self._index(work)
        assert index is not None, f"device {self.gpu} does not have the work {work.work_id}"
        self.num_changes += 1
        if index == 0:
            self._head_ns = min(self._end_ns(1), self.now.ns + run_ns)
        else:
            self._runs_ns[index] = min(self._runs_ns[index], run_ns)
