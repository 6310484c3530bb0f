"""A device inside the controller."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.core.work import StageId, Work


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """What one device has been told to do, and when it is expected to be free; a `GpuView` to policies."""

    gpu: int
    node: int
    stages: frozenset[StageId]
    works: list[Work] = field(default_factory=list)
    now_ns: int = 0
    _predicted_ns: list[int] = field(default_factory=list)
    _head_start_ns: int = 0

    @property
    def free_ns(self) -> int:
        """The running work is expected to end now at the earliest, however late it already is."""
        return self.end_ns(self.works[-1]) if self.works else self.now_ns

    def end_ns(self, work: Work) -> int:
        head_end_ns = max(self.now_ns, self._head_start_ns + self._predicted_ns[0])
        return head_end_ns + sum(self._predicted_ns[1 : self.works.index(work) + 1])

    def push(self, work: Work, end_ns: int) -> None:
        """Append a work that is predicted to end at `end_ns`, which includes waiting for the rest of its group."""
        predicted_ns = end_ns - self.free_ns
        if not self.works:
            self._head_start_ns = self.now_ns
        self.works.append(work)
        self._predicted_ns.append(predicted_ns)

    def pop(self, work: Work) -> None:
        index = self.works.index(work)
        del self.works[index], self._predicted_ns[index]
        if index == 0:
            self._head_start_ns = self.now_ns
