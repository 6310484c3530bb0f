"""Makes the starts of a plan: stages of one job, and chunks of steps of one or several jobs."""

from __future__ import annotations

from tilework.core.work import Group, StageId, Start, stages_of


def steps_in_chunk(num_steps_left: int, step_ns: float, chunk_ns: int) -> int:
    """The number of steps that fit into a chunk: at least one, at most `num_steps_left`."""
    return max(1, min(num_steps_left, int(chunk_ns // max(1, step_ns))))


def start_stage(stage: StageId, job_id: int, device_id: int, why: str) -> Start:
    """The encode or decode of one job; these run on one device."""
    return Start(stage=stage, job_ids=(job_id,), devices=(device_id,), num_steps=1, why=why)


def start_steps(pipeline: str, job_ids: tuple[int, ...], group: Group, num_steps: int, why: str) -> Start:
    """Steps of one job on a group, or of several jobs together on one device."""
    _, diffuse, _ = stages_of(pipeline)
    return Start(stage=diffuse, job_ids=job_ids, devices=group, num_steps=num_steps, why=why)
