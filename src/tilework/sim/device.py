"""Modelled devices: they execute works first in, first out, alone or in groups, in virtual time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tilework.core.work import DIFFUSE, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A work that its devices have begun; it will end at `end_ns` after `steps` steps, unless it is stopped."""

    work: Work
    start_ns: int
    end_ns: int
    steps: int
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class _Move:
    """The state of a job on its way: it leaves when the work `behind` has ended (None: at once) and takes `move_ns`."""

    behind: int | None
    asked_ns: int
    move_ns: int


@dataclass(slots=True, kw_only=True, eq=False)
class Fleet:
    """The queues and the running works of all devices.

    A work begins when it is first in the queue of each of its devices, all of them are idle and the state of its jobs
    has arrived at them; it occupies them all until its end. Its `dispatch_ns`, what is lost between two works, passes
    before its run starts and while its state is still on the way. Whoever drives the fleet asks `begin_next` after
    each change, and calls `end` when the virtual clock reaches a run's `end_ns`; a stop replaces a run by a shorter
    one, so a run that is not `is` the current one is out of date.

    The state of a job is put down at the end of each of its works, and travels to other devices from there.
    """

    _queues: defaultdict[int, deque[Work]] = field(default_factory=lambda: defaultdict(deque))
    _durations_ns: dict[int, int] = field(default_factory=dict)
    _dispatch_ns: dict[int, int] = field(default_factory=dict)
    _running: dict[int, Run] = field(default_factory=dict)
    _latest: dict[int, Work] = field(default_factory=dict)
    _ends_ns: dict[int, int] = field(default_factory=dict)
    _moves: dict[tuple[int, int], _Move] = field(default_factory=dict)
    _followers: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _revoked: set[int] = field(default_factory=set)

    def enqueue(self, work: Work, duration_ns: int, dispatch_ns: int = 0) -> None:
        self._durations_ns[work.work_id] = duration_ns
        self._dispatch_ns[work.work_id] = dispatch_ns
        for gpu in work.gpus:
            self._queues[gpu].append(work)
        for job_id in work.job_ids:
            self._latest[job_id] = work

    def running(self, gpu: int) -> Run | None:
        return self._running.get(gpu)

    def latest(self, job_id: int) -> Work | None:
        """The work of a job that was enqueued last: where its state is, or will be."""
        return self._latest.get(job_id)

    def move(self, job_id: int, target: int, move_ns: int, now_ns: int) -> None:
        """Send the state, as it will be after the works so far; the job's next work on `target` waits for it."""
        latest = self._latest.get(job_id)
        behind = None if latest is None or latest.work_id in self._ends_ns else latest.work_id
        self._moves[job_id, target] = _Move(behind, now_ns, move_ns)
        if behind is not None:
            self._followers[behind].append(target)

    def begin_next(self, gpus: Iterable[int], now_ns: int) -> list[Run]:
        """Begin the first works of these devices where that is possible; returns the runs that have begun."""
        heads = {queue[0].work_id: queue[0] for gpu in gpus if (queue := self._queues[gpu])}
        return [self._begin(work, now_ns) for work in heads.values() if self._may_begin(work)]

    def _may_begin(self, work: Work) -> bool:
        if any(gpu in self._running or self._queues[gpu][0] is not work for gpu in work.gpus):
            return False
        return work.work_id in self._revoked or all(
            move.behind is None or move.behind in self._ends_ns for _, move in self._moves_to(work)
        )

    def _moves_to(self, work: Work) -> list[tuple[tuple[int, int], _Move]]:
        places = [(job_id, gpu) for job_id in work.job_ids for gpu in work.gpus]
        return [(place, self._moves[place]) for place in places if place in self._moves]

    def _begin(self, work: Work, now_ns: int) -> Run:
        duration_ns, steps = self._durations_ns.pop(work.work_id), work.num_steps
        start_ns = now_ns + self._dispatch_ns.pop(work.work_id)
        is_revoked = work.work_id in self._revoked
        if is_revoked:
            self._revoked.remove(work.work_id)
            duration_ns, start_ns, steps = 0, now_ns, 0
        else:
            for place, move in self._moves_to(work):
                left_ns = move.asked_ns if move.behind is None else max(move.asked_ns, self._ends_ns[move.behind])
                start_ns = max(start_ns, left_ns + move.move_ns)
                del self._moves[place]
        run = Run(work=work, start_ns=start_ns, end_ns=start_ns + duration_ns, steps=steps, stopped=is_revoked)
        for gpu in work.gpus:
            self._queues[gpu].popleft()
            self._running[gpu] = run
        return run

    def stop(self, work: Work, now_ns: int) -> Run | None:
        """Stop a work at its next step boundary, or revoke it; returns the run that replaces the current one, if any.

        Stages without steps run to their end. A work that is not here any more is left alone.
        """
        run = self._running.get(work.gpus[0])
        if run is None or run.work is not work:
            if work.work_id in self._durations_ns:
                self._revoked.add(work.work_id)
            return None
        if work.stage.name != DIFFUSE or run.stopped:
            return None
        step_ns = max(1, (run.end_ns - run.start_ns) // run.steps)
        steps = min(run.steps, max(0, now_ns - run.start_ns) // step_ns + 1)
        end_ns = run.end_ns if steps == run.steps else run.start_ns + steps * step_ns
        shorter = Run(work=work, start_ns=run.start_ns, end_ns=end_ns, steps=steps, stopped=True)
        self._running.update(dict.fromkeys(work.gpus, shorter))
        return shorter

    def end(self, run: Run) -> list[int]:
        """Free the devices of a run; returns those on which something may begin now, none if it is out of date."""
        work = run.work
        if self._running.get(work.gpus[0]) is not run:
            return []
        for gpu in work.gpus:
            del self._running[gpu]
        self._ends_ns[work.work_id] = run.end_ns
        return [*work.gpus, *self._followers.pop(work.work_id, ())]
