"""The starts of a plan: stages of one job, chunks of steps of one or several jobs, and the reason in words."""

from __future__ import annotations

from collections.abc import Iterator

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import Stage
from tilework.core.policy import JobView
from tilework.core.time import s_from_ns
from tilework.core.work import Group, Start


def steps_in_chunk(num_steps_left: int, step_ns: float, chunk_ns: int) -> int:
    """Return the number of steps that fit into a chunk: at least one, at most `num_steps_left`."""
    return max(1, min(num_steps_left, int(chunk_ns // max(1, step_ns))))


def start_stage(stage: Stage, job_ids: tuple[int, ...], group: Group, why: str) -> Start:
    """Return a stage without steps of one job on a group, or of several jobs together on one device."""
    return Start(stage=stage, job_ids=job_ids, devices=group, num_steps=1, why=why)


def start_at_once(left: Cursor, job_id: int, device_id: int, why: str) -> Iterator[Start]:
    """Yield the stages without steps that are next of what is left of a job, on one device."""
    for stage, _ in left.at_once():
        yield start_stage(stage, (job_id,), (device_id,), why)


def before_steps(left: Cursor) -> Cursor:
    """Return what is left after the stages without steps that are next."""
    for _, after in left.at_once():
        left = after
    return left


def start_steps(stage: Stage, job_ids: tuple[int, ...], group: Group, num_steps: int, why: str) -> Start:
    """Return steps of one job on a group, or of several jobs together on one device."""
    return Start(stage=stage, job_ids=job_ids, devices=group, num_steps=num_steps, why=why)


def explain(job: JobView, verb: str, now_ns: int) -> str:
    """Return the reason in words: `verb`, which says what happens to the job, and how urgent the job is."""
    if job.request.deadline_ns is None:
        return f"{verb}; no deadline"
    if job.dropped_to_best_effort:
        return f"{verb}; it cannot be on time any more"
    left_s = s_from_ns(job.request.deadline_ns - now_ns)
    due = f"due in {left_s:.2f} s" if left_s >= 0 else f"{-left_s:.2f} s late already"
    return f"{verb}; {due}, needs {needs(job.demand)}"


def needs(demand: Demand) -> str:
    return f"{s_from_ns(demand.run_ns):.2f} s on {devices_text(demand.width)}"


def devices_text(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"
