"""Checks of pictures and runs after a simulation, and what they raise."""

from __future__ import annotations

from itertools import pairwise

from tilework.sim.runs import Run, State


class Violation(AssertionError):
    """An invariant does not hold. The message says which, where and when."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


def check_image(uid: str, image: State | None, length: int) -> None:
    """Every stage and step ran exactly once, in order, in one lineage of states: `length` positions."""
    require(image is not None, f"{uid} is done without a picture")
    assert image is not None
    done = 0
    for position, num_steps in image.pieces:
        require(position == done and num_steps > 0, f"the picture of {uid} is made of the steps {image.pieces}")
        done += num_steps
    require(done == length, f"the picture of {uid} is made of {done} steps, not {length}")


def check_no_overlap(device_id: int, runs: list[Run]) -> None:
    ordered = sorted((run.start_ns, run.end_ns, run.work.work_id) for run in runs)
    for before, after in pairwise(ordered):
        require(before[1] <= after[0], f"device {device_id} runs works {before[2]} and {after[2]} at the same time")
