"""A device as the controller records it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.control.cluster.job import Job
from tilework.core.component import Memory
from tilework.core.graph.stage import DeviceKind
from tilework.core.work import Work


@dataclass(slots=True)
class Now:
    """The time of the event that is being handled."""

    ns: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """The works of one device, and when it is expected to be free; a `DeviceView` to policies.

    `residents` are the jobs of which it keeps something, the most recently used last. The running work is expected to
    end now at the earliest, however late it is; `now` is shared by all devices. `memory` is as of the end of its works.
    `loads_ns` is how long loads before a work are predicted to take, by work id, while they have not ended; they are
    part of the work's time here. `loaded_ns` is when a load ahead of need is predicted to end, while no work waits for
    it; None without one.
    """

    device_id: int
    node: int
    pool: int
    kind: DeviceKind = DeviceKind.ACCELERATOR
    now: Now = field(default_factory=Now)
    memory: Memory = field(default_factory=Memory)
    works: list[Work] = field(default_factory=list)
    loads_ns: dict[int, int] = field(default_factory=dict)
    loaded_ns: int | None = None
    residents: dict[int, Job] = field(default_factory=dict)
    num_changes: int = 0
    _head_ns: int = 0  # Predicted end of the running work, as of the last change.
    _runs_ns: list[int] = field(default_factory=list)  # Predicted time of each work after the work before it.
    _queued_ns: int = 0  # The sum of `_runs_ns` without the running work.

    @property
    def is_loading(self) -> bool:
        return self.loaded_ns is not None

    @property
    def free_ns(self) -> int:
        if not self.works:
            return max(self.now.ns, self.loaded_ns or 0)
        return max(self._head_ns, self.now.ns) + self._queued_ns

    def has(self, work: Work) -> bool:
        return self._index(work) is not None

    def end_ns(self, work: Work) -> int:
        end_ns = max(self._head_ns, self.now.ns)
        for index, one in enumerate(self.works):
            if index:
                end_ns += self._runs_ns[index]
            if one is work:
                return end_ns
        return 0

    def push(self, work: Work, end_ns: int) -> None:
        """Append a work that is predicted to end at `end_ns`, which includes the wait for the others of its group."""
        run_ns = end_ns - self.free_ns
        if self.works:
            self._queued_ns += run_ns
        else:
            self._head_ns = end_ns
        self.works.append(work)
        self._runs_ns.append(run_ns)
        self.num_changes += 1

    def pop(self, work: Work) -> None:
        """Remove a work, if the device has it."""
        index = self._index(work)
        if index is None:
            return
        del self.works[index]
        self.loads_ns.pop(work.work_id, None)
        run_ns = self._runs_ns.pop(index)
        self.num_changes += 1
        if index:
            self._queued_ns -= run_ns
        elif self.works:
            self._head_ns = self.now.ns + self._runs_ns[0]
            self._queued_ns -= self._runs_ns[0]

    def shorten(self, work: Work, run_ns: int) -> None:
        """Lower the predicted time of a work to `run_ns`, counted from now if it is running; never raise it.

        The loads before a queued work are done even if it is revoked.
        """
        index = self._index(work)
        if index is None:
            return
        self.num_changes += 1
        if index and self.loads_ns:
            run_ns += self.loads_ns.get(work.work_id, 0)
        if index == 0:
            self._head_ns = min(max(self._head_ns, self.now.ns), self.now.ns + run_ns)
        elif run_ns < self._runs_ns[index]:
            self._queued_ns -= self._runs_ns[index] - run_ns
            self._runs_ns[index] = run_ns

    def _index(self, work: Work) -> int | None:
        """The index of a work, by identity: comparing works field by field took longer than all else here."""
        for index, one in enumerate(self.works):
            if one is work:
                return index
        return None
