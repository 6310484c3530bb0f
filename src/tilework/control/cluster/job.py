"""A request inside the controller."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.core.interfaces import Block, Demand, EtaPrediction
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.work import Group, StageId, Work

_NOTHING = Demand(width=1, run_ns=0)


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Mutable record of one accepted request; a `JobView` to policies.

    `done` is how far completed works brought it, and so where the state stands that was put down last; `done_devices`,
    of those that put it down, still have it. `works` are committed to devices and not ended, and will bring it to
    `committed`; `last_devices` will have its state then; `holders` are the devices that have seen its conditioning. A
    lost device or a failed work starts the next `attempt`, from `done`; `failures` counts those since the last
    progress. `has_advanced`: there was progress since its works were told to stop last. `demand` and `promised` are
    kept by the tracker, which knows policy and costs. `urgency_ns` includes `delay_ns`, for the sake of its tenant's
    others and of other tenants.
    """

    job_id: int
    request: Request
    urgency_ns: int
    eta_prediction: EtaPrediction
    done: Cursor
    attempt: int = 1
    failures: int = 0
    delay_ns: int = 0
    dropped_to_best_effort: bool = False
    demand: Demand = _NOTHING
    promised: Block | None = None
    is_stopping: bool = False
    has_advanced: bool = True
    works: list[Work] = field(default_factory=list)
    last_devices: Group = ()
    done_devices: Group = ()
    holders: set[int] = field(default_factory=set)
    committed: Cursor = field(init=False)

    def __post_init__(self) -> None:
        self._commit()

    def _commit(self) -> None:
        self.committed = self.done
        for work in self.works:
            self.committed = self.committed.advanced(work.num_steps)

    def begin(self, work: Work) -> None:
        """Commit a work to devices."""
        self.works.append(work)
        self.committed = self.committed.advanced(work.num_steps)

    def end(self, work: Work, steps_done: int) -> None:
        """Take over what its first work has done; one that was stopped may have done less than was committed."""
        self.works.remove(work)
        self.is_stopping = self.is_stopping and bool(self.works)
        if steps_done:
            self.done, self.done_devices, self.has_advanced = self.done.advanced(steps_done), work.devices, True
        if steps_done < work.num_steps:
            self._commit()

    @property
    def may_stop(self) -> bool:
        return self.promised is None and self.has_advanced and not self.is_stopping

    @property
    def may_share(self) -> bool:
        return self.failures == 0

    @property
    def stage(self) -> StageId | None:
        return self.committed.stage

    @property
    def num_steps_left(self) -> int:
        return self.committed.num_steps_left

    def leave(self, device_id: int) -> None:
        """A device has nothing of it any more."""
        self.holders.discard(device_id)
        self.last_devices = tuple(member for member in self.last_devices if member != device_id)
        self.done_devices = tuple(member for member in self.done_devices if member != device_id)

    def restart(self, from_start: bool) -> None:
        """Begin the next attempt where completed works have brought it, or anew; no device holds anything of it."""
        assert not self.holders
        if from_start:
            self.done = Cursor.start(self.request)
        self.attempt += 1
        self.is_stopping, self.done_devices = False, ()
        self.works.clear()
        self._commit()
