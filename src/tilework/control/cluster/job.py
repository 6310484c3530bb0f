"""An accepted request as the controller records it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.admission.contract import EtaPrediction
from tilework.control.cluster.life import TRANSITIONS, JobEvent, JobState
from tilework.core.block import Block, Demand
from tilework.core.graph.itinerary import Itinerary
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind
from tilework.core.request import Request
from tilework.core.work import Group, Work


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A mutable record of one accepted request; a `JobView` to policies.

    Attributes:
        state: where it is in its life (see `life`); only `change` sets it.
        done: its progress by works that have ended, which is the position of its latest serialized state.
        done_devices: devices of the work that reached `done` that still have the state.
        works: works that are committed to devices and have not ended.
        committed: its progress when these have ended, as predicted if they were told to stop; `left` is the leg of it
            that a policy sees, at its end while the job is on a CPU slot.
        last_devices: devices that will have its state when these works have ended.
        holders: devices that keep something of it, each with the number of stages whose outputs it has, if needed.
        attempt: number of the attempt; a lost device or a failed work starts the next one, from `done`.
        failures: the number of attempts without progress.
        last_error: the error of the model in the last of these, if the job was alone in its work.
        has_advanced: True if it made progress since its works were last told to stop, or to run on for a promise.
        is_held_back: True if a start of it was held back for a promise since it last started a work.
        stops_at: the position at which its works that were told to stop are predicted to end; None if none were.
        demand, promised: its remaining work and its reservation, kept up to date by the tracker.
        urgency_ns: its place in the order of service, which includes `delay_ns`, its fair delay (see `load`).
    """

    job_id: int
    request: Request
    urgency_ns: int
    eta_prediction: EtaPrediction
    demand: Demand
    done: Cursor
    attempt: int = 1
    failures: int = 0
    last_error: str = ""
    delay_ns: int = 0
    dropped_to_best_effort: bool = False
    promised: Block | None = None
    stops_at: int | None = None
    has_advanced: bool = True
    is_held_back: bool = False
    state: JobState = JobState.WAITING
    works: list[Work] = field(default_factory=list)
    last_devices: Group = ()
    done_devices: Group = ()
    holders: dict[int, int] = field(default_factory=dict)
    committed: Cursor = field(init=False)
    left: Cursor = field(init=False)

    def __post_init__(self) -> None:
        self._commit()

    def change(self, event: JobEvent) -> None:
        """Enter the state that follows this event."""
        following = TRANSITIONS[self.state]
        assert event in following, f"job {self.job_id} is {self.state}: '{event}' cannot happen to it"
        self.state = following[event]

    def _commit(self) -> None:
        """Compute `committed` anew. If the first work failed, others are revoked; till then any position will do."""
        position = self.done.position + sum(work.num_steps for work in self.works)
        if self.stops_at is not None:
            position = min(position, max(self.stops_at, self.done.position))
        itinerary = self.done.itinerary
        self._set_committed(itinerary.at[min(position, itinerary.length)])

    def _set_committed(self, cursor: Cursor) -> None:
        """Set `committed` and what follows from it: policies read these far more often than they change."""
        is_on_slot = bool(self.works) and self.works[-1].stage.kind is DeviceKind.CPU
        self.committed = cursor
        self.left = cursor.itinerary.at[cursor.itinerary.length] if is_on_slot else cursor.leg

    def begin(self, work: Work) -> None:
        """Commit a work to devices."""
        self.change(JobEvent.START)
        self.works.append(work)
        self.is_held_back = False
        self._set_committed(self.committed.advanced(work.num_steps))

    def end(self, work: Work, steps_done: int) -> None:
        """Remove its first work and count its steps; a stopped work may have done fewer than were committed."""
        was_stopping = self.is_stopping
        self.works.remove(work)
        if not self.works:
            self.stops_at = None
        if steps_done:
            self.done = self.done.advanced(steps_done)
            self.has_advanced = True
            self.done_devices = tuple(device_id for device_id in work.devices if device_id in self.holders)
        if steps_done < work.num_steps or was_stopping or work.stage.kind is DeviceKind.CPU:
            self._commit()
        if steps_done < work.num_steps:
            for device_id in self.holders.keys() & set(work.devices):
                self.holders[device_id] = min(self.holders[device_id], self.done.num_done)
        has_ended = JobEvent.COMPLETED if self.done.stage is None else JobEvent.LAST_WORK_ENDED
        self.change(JobEvent.WORK_ENDED if self.works else has_ended)

    @property
    def is_stopping(self) -> bool:
        return self.state is JobState.STOPPING

    def stop_at(self, position: int) -> None:
        """Note that its works were told to stop, and are predicted to end at this position."""
        self.change(JobEvent.STOP)
        self.stops_at = position
        self.has_advanced = False
        self._commit()

    @property
    def may_use_cache(self) -> bool:
        """True if it has a spare cache, and steps for it that are not committed."""
        return self.request.spare_cache is not None and self.committed.num_steps > 0

    def use_cache(self, itinerary: Itinerary) -> None:
        """Use its spare cache after its committed works, on this way, which differs only in the cache."""
        self.request = self.request.with_spare_cache
        self.done = itinerary.at[self.done.position]
        self._commit()

    @property
    def may_stop(self) -> bool:
        return self.has_advanced and not self.is_stopping

    @property
    def may_share(self) -> bool:
        return self.failures == 0 and not self.request.exact and self.request.passes == 1

    def remove_device(self, device_id: int) -> None:
        """Note that a device keeps nothing of the job any more."""
        self.holders.pop(device_id, None)
        self.last_devices = tuple(member for member in self.last_devices if member != device_id)
        self.done_devices = tuple(member for member in self.done_devices if member != device_id)

    def restart(self, position: int | None) -> None:
        """Begin the next attempt, from `done` or from this earlier position. No device holds anything of the job."""
        assert not self.holders
        self.change(JobEvent.RETRY)
        if position is not None:
            assert position <= self.done.position, f"job {self.job_id} goes forward to {position}"
            self.done = self.done.itinerary.at[position]
        self.attempt += 1
        self.stops_at = None
        self.done_devices = ()
        self.works.clear()
        self._commit()
