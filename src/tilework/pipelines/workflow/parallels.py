"""The groups of several families, of which one runs at a time, as one."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.core.comm import Comm
from tilework.pipelines.parallel import Parallel


class Parallels(Parallel):
    """The group of whichever family runs, as a worker sees it; the worker need not know which of the `members` runs.

    All members join, and all leave. In a group only the one that runs has agreed on anything.
    """

    def __init__(self, members: Sequence[Parallel]) -> None:
        self._members = tuple(members)
        super().__init__()

    @property
    def wants_stop(self) -> bool:
        return self._wants_stop

    @wants_stop.setter
    def wants_stop(self, value: bool) -> None:
        self._wants_stop = value
        for one in self._members:
            one.wants_stop = value

    @property
    def stop_agreed(self) -> bool:
        return any(one.stop_agreed for one in self._members)

    def join(self, comm: Comm, guided: bool) -> None:
        super().join(comm, guided)
        for one in self._members:
            one.join(comm, guided)

    def leave(self) -> None:
        super().leave()
        for one in self._members:
            one.leave()
