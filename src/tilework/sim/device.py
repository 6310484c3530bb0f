"""One simulated device: its queue, what it runs, and what it has of jobs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tilework.core.work import Work
from tilework.sim.runs import Run, State


@dataclass(slots=True, kw_only=True, eq=False)
class StateTransfer:
    """The state of a job on its way to devices: it leaves at `left_ns`, when the sender has it (None: not yet).

    Without a state it is a message that nothing comes; `lost` says that what should have come is gone.
    """

    job_id: int
    move_ns: int
    left_ns: int | None = None
    state: State | None = None
    lost: bool = False

    def leave(self, state: State | None, now_ns: int, lost: bool = False) -> None:
        self.left_ns, self.state, self.lost = now_ns, state, lost


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """`transfers` have come ahead of a work that has not, `awaited` of one that is here, by its number.

    `forgets` are the jobs to let go when a work has ended.
    """

    queue: deque[Work] = field(default_factory=deque)
    run: Run | None = None
    hangs: bool = False
    states: dict[int, State] = field(default_factory=dict)
    transfers: dict[int, list[StateTransfer]] = field(default_factory=dict)
    awaited: dict[int, list[StateTransfer]] = field(default_factory=dict)
    forgets: dict[int, list[int]] = field(default_factory=dict)
