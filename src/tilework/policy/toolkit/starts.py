"""Makes the starts of a plan: stages of one job, and chunks of steps of one or several jobs."""

from __future__ import annotations

from collections.abc import Iterator

from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import Stage
from tilework.core.work import Group, Start


def steps_in_chunk(num_steps_left: int, step_ns: float, chunk_ns: int) -> int:
    """The number of steps that fit into a chunk: at least one, at most `num_steps_left`."""
    return max(1, min(num_steps_left, int(chunk_ns // max(1, step_ns))))


def start_stage(stage: Stage, job_ids: tuple[int, ...], group: Group, why: str) -> Start:
    """A stage without steps of one job on a group, or of several jobs together on one device."""
    return Start(stage=stage, job_ids=job_ids, devices=group, num_steps=1, why=why)


def start_at_once(left: Cursor, job_id: int, device_id: int, why: str) -> Iterator[Start]:
    """The stages without steps that are next of what is left of a job, on one device."""
    for stage, _ in left.at_once():
        yield start_stage(stage, (job_id,), (device_id,), why)


def before_steps(left: Cursor) -> Cursor:
    """What is left after the stages without steps that are next."""
    for _, after in left.at_once():
        left = after
    return left


def start_steps(stage: Stage, job_ids: tuple[int, ...], group: Group, num_steps: int, why: str) -> Start:
    """Steps of one job on a group, or of several jobs together on one device."""
    return Start(stage=stage, job_ids=job_ids, devices=group, num_steps=num_steps, why=why)
