"""A modelled device: executes works first in, first out, in virtual time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tilework.core.work import DIFFUSE, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A work that the device has begun; it will end at `end_ns` after `steps` steps, unless it is stopped."""

    work: Work
    start_ns: int
    end_ns: int
    steps: int
    stopped: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class ModelledGpu:
    """The queue and the running work of one device.

    A work begins when the former one has ended and the state of its jobs has arrived. Whoever drives it asks
    `begin_next` after each change, and calls `end` when the virtual clock reaches the run's `end_ns`; a stop replaces
    the run by a shorter one, so a run that is not `is` the current one is out of date.
    """

    gpu: int
    running: Run | None = None
    _queue: deque[tuple[Work, int]] = field(default_factory=deque)
    _arrivals_ns: dict[int, int] = field(default_factory=dict)
    _revoked: set[int] = field(default_factory=set)

    def enqueue(self, work: Work, duration_ns: int) -> None:
        self._queue.append((work, duration_ns))

    def expect_state(self, job_id: int, arrival_ns: int) -> None:
        """The state of this job is under way; its next work here cannot begin before it arrives."""
        self._arrivals_ns[job_id] = arrival_ns

    def state_ready_ns(self, job_id: int, now_ns: int) -> int:
        """When the state of a job can leave this device: after its own work, or between two steps of another's."""
        assert all(job_id not in work.job_ids for work, _ in self._queue), "a job leaves before its own queued work"
        run = self.running
        if run is None:
            return now_ns
        if run.stopped or job_id in run.work.job_ids:  # A stopped run has one step left to end, or none.
            return run.end_ns
        return min(run.end_ns, run.start_ns + self._steps_begun(run, now_ns) * self._step_ns(run))

    def begin_next(self, now_ns: int) -> Run | None:
        """Begin the next work if the device is idle; returns the run that has begun."""
        if self.running is not None or not self._queue:
            return None
        work, duration_ns = self._queue.popleft()
        arrival_ns = max(self._arrivals_ns.pop(job_id, 0) for job_id in work.job_ids)
        if work.work_id in self._revoked:
            self._revoked.remove(work.work_id)
            self.running = Run(work=work, start_ns=now_ns, end_ns=now_ns, steps=0, stopped=True)
        else:
            start_ns = max(now_ns, arrival_ns)
            self.running = Run(work=work, start_ns=start_ns, end_ns=start_ns + duration_ns, steps=work.num_steps)
        return self.running

    def stop(self, work_id: int, now_ns: int) -> Run | None:
        """Stop a work at its next step boundary, or revoke it; returns the run that replaces the current one, if any.

        Stages without steps run to their end. A work that is not here any more is left alone.
        """
        run = self.running
        if run is None or run.work.work_id != work_id:
            if any(work.work_id == work_id for work, _ in self._queue):
                self._revoked.add(work_id)
            return None
        if run.work.stage.name != DIFFUSE or run.stopped:
            return None
        steps = self._steps_begun(run, now_ns)
        end_ns = run.end_ns if steps == run.steps else run.start_ns + steps * self._step_ns(run)
        self.running = Run(work=run.work, start_ns=run.start_ns, end_ns=end_ns, steps=steps, stopped=True)
        return self.running

    @staticmethod
    def _step_ns(run: Run) -> int:
        return max(1, (run.end_ns - run.start_ns) // run.steps)

    def _steps_begun(self, run: Run, now_ns: int) -> int:
        """Steps of the run that have begun by now; the first has, even if the run still waits for its state."""
        return min(run.steps, max(0, now_ns - run.start_ns) // self._step_ns(run) + 1)

    def end(self) -> None:
        assert self.running is not None
        self.running = None
