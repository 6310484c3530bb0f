"""Earliest deadline first, preempting between chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tilework.core.interfaces import ClusterView, CostModel, GpuView, JobView
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, NS_PER_S, s_from_ns
from tilework.core.work import Plan
from tilework.policy.chunks import WORKS_PER_GPU, Choice, Slots, fill
from tilework.policy.registry import policy


@policy("edf")
@dataclass(frozen=True, slots=True, kw_only=True)
class EarliestDeadlineFirst:
    """Serve the earliest deadline first; a more urgent job takes a device over at the end of a chunk.

    Strict EDF serves doomed requests first and so dooms others. Here a job that cannot be on time any more, even if it
    ran alone from now on, is set aside: it is served as if its deadline were `late_patience_ns` after its arrival. A
    job without a deadline is served as if it had one after `patience_ns`. Deadlines of later arrivals pass these
    points in time, so nobody starves; under an overload that outlasts them, the late displace those that could be on
    time, which only refusing requests (`on_miss: reject`) prevents.
    """

    chunk_ns: int = 200 * NS_PER_MS
    patience_ns: int = 60 * NS_PER_S
    late_patience_ns: int = 600 * NS_PER_S

    def urgency_ns(self, request: Request, set_aside: bool) -> int:
        if request.deadline_ns is None:
            return request.arrival_ns + self.patience_ns
        return request.arrival_ns + self.late_patience_ns if set_aside else request.deadline_ns

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """Raises nothing; a plan that sets jobs aside starts nothing, and is asked for again in the new order."""
        doomed = tuple(job.job_id for job in self._candidates(view) if _is_doomed(job, now_ns))
        if doomed:
            return Plan(set_aside=doomed)
        slots = Slots(view, costs, self.chunk_ns)
        waiting = iter(view.waiting())
        head = next(waiting, None)

        def choose(gpu: GpuView) -> Choice | None:
            nonlocal head
            running = slots.continued(gpu)
            if running is not None and (head is None or _order(running) <= _order(head)):
                return running, _why(running, "continues")
            if head is None:
                return None
            job, head = head, next(waiting, None)
            return job, _why(job, "is most urgent" if running is None else f"goes before job {running.job_id}")

        fill(slots, choose)
        return Plan(starts=tuple(slots.starts))

    def _candidates(self, view: ClusterView) -> Iterator[JobView]:
        """Jobs that this plan might start: those with a device, and as many from the head of the queue as may fit.

        Each comes once: a job that was begun again waits while a remnant of its former attempt still has a device.
        """
        ids = {work.job_ids[0]: None for gpu in view.gpus for work in gpu.works}
        ids |= {job.job_id: None for job in islice(view.waiting(), WORKS_PER_GPU * len(view.gpus))}
        yield from (job for job_id in ids if (job := view.job(job_id)) is not None)


def _order(job: JobView) -> tuple[int, int]:
    return job.urgency_ns, job.job_id


def _is_doomed(job: JobView, now_ns: int) -> bool:
    deadline_ns = job.request.deadline_ns
    if job.set_aside or deadline_ns is None or job.stage is None:
        return False
    return now_ns + job.remaining_ns > deadline_ns


def _why(job: JobView, verb: str) -> str:
    if job.request.deadline_ns is None:
        return f"{verb}; no deadline"
    if job.set_aside:
        return f"{verb}; it cannot be on time any more"
    slack_s = s_from_ns(job.request.deadline_ns - job.request.arrival_ns)
    return f"{verb}; due {slack_s:.2f} s after arrival"
