"""Where the states of jobs lie, and which devices' queues wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tilework.core.checkpoint import Checkpoint
from tilework.core.wire import Command, ImportState, Spec, StateBlob
from tilework.core.work import ENCODE, Work
from tilework.runtime.executor import Executor


@dataclass(slots=True, kw_only=True, eq=False)
class _Load:
    """What a job's works have put down last."""

    spec: Spec
    conditioning: StateBlob | None = None
    state: StateBlob | None = None

    @property
    def blobs(self) -> tuple[StateBlob, ...]:
        return tuple(blob for blob in (self.conditioning, self.state) if blob is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """What devices' queues wait for: the state of a job, as a work that is still in in_flight_work will leave it."""

    job_id: int
    conditioning: bool
    command: asyncio.Future[Command | None]


class StateRegistry:
    """The blobs of all jobs. Each is discarded when a newer one takes its place, or when its job ends.

    Those of a job that has ended may be `held`, by its uid, until its picture is safe.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._loads: dict[int, _Load] = {}
        self._arrivals: dict[int, list[_Arrival]] = {}
        self._held: dict[str, _Load] = {}

    @property
    def num_bytes(self) -> int:
        """What the blobs of all jobs take."""
        loads = (*self._loads.values(), *self._held.values())
        return sum(blob.num_bytes for load in loads for blob in load.blobs)

    def begin(self, job_id: int, spec: Spec, kept: Checkpoint) -> None:
        """Take a job in, of which so much is there already."""
        self._loads[job_id] = _Load(spec=spec, conditioning=kept.conditioning, state=kept.state)

    def end(self, job_id: int) -> None:
        self.discard(self._loads.pop(job_id).blobs)

    def hold(self, job_id: int, uid: str) -> None:
        """A job has ended, but somebody may have to make its picture again."""
        self._held[uid] = self._loads.pop(job_id)

    def release(self, uid: str) -> None:
        """Nobody needs what is held of this job any more, if anything is."""
        if (load := self._held.pop(uid, None)) is not None:
            self.discard(load.blobs)

    def lose(self, job_id: int) -> None:
        """What has been put down of a job is gone or of no use: it begins anew."""
        load = self._loads[job_id]
        self.discard(load.blobs)
        load.conditioning = load.state = None

    def adopt(self, job_id: int, stage: str, blob: StateBlob) -> None:
        """Keep what a work of the job has put down."""
        load = self._loads[job_id]
        if stage == ENCODE:
            old, load.conditioning = load.conditioning, blob
        else:
            old, load.state = load.state, blob
        self.discard((old,))

    def discard(self, blobs: Iterable[StateBlob | None]) -> None:
        for blob in blobs:
            if blob is not None:
                self._executor.discard(blob)

    def move(self, job_id: int, targets: tuple[int, ...], conditioning: bool, behind: Work | None) -> None:
        """Let the targets take a job over, when the work `behind`, if there is one, has ended."""
        command: Command | asyncio.Future[Command | None]
        if behind is None:
            command = self._import(job_id, conditioning)
        else:
            command = asyncio.get_running_loop().create_future()
            arrival = _Arrival(job_id=job_id, conditioning=conditioning, command=command)
            self._arrivals.setdefault(behind.work_id, []).append(arrival)
        for device_id in targets:
            self._executor.send(device_id, command)

    def arrive(self, work: Work, usable: Collection[int]) -> None:
        """A work has ended; of its jobs, `usable` are as they were meant to be. For the others nothing comes.

        What was to follow has been revoked, or does without them. What a device had of one before may still be of use.
        """
        for arrival in self._arrivals.pop(work.work_id, ()):
            if arrival.job_id in usable:
                arrival.command.set_result(self._import(arrival.job_id, arrival.conditioning))
            else:
                arrival.command.set_result(None)

    def _import(self, job_id: int, conditioning: bool) -> ImportState:
        load = self._loads[job_id]
        return ImportState(job_id, load.spec, load.conditioning if conditioning else None, load.state)
