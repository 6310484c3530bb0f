"""The result of a simulation: what ran and how requests ended; and checks of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tilework.core.request import Request, Status
from tilework.sim.runs import LoadRun, Run, State


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEnding:
    """End of one request.

    `job_id` and `eta_ns`, the finish predicted at admission, are None if the request was rejected. `image` is the state
    that the delivered image was decoded from.
    """

    request: Request
    status: Status
    finish_ns: int
    job_id: int | None
    eta_ns: int | None
    reason: str
    image: State | None = None

    @property
    def on_time(self) -> bool:
        """True if the request was done by its deadline; without a deadline, if it was done."""
        deadline_ns = self.request.deadline_ns
        return self.status is Status.DONE and (deadline_ns is None or self.finish_ns <= deadline_ns)

    @property
    def was_promised(self) -> bool:
        """True if the request was accepted as a promise, which no client took back."""
        return self.request.is_promise and self.job_id is not None and self.status is not Status.CANCELLED

    @property
    def latency_ns(self) -> int:
        return self.finish_ns - self.request.arrival_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The runs and loads of a simulation in order of their ends, and the endings in order of the requests given.

    `num_reads` counts what devices and hosts have read from the disk, one per load or read ahead.
    """

    runs: tuple[Run, ...]
    endings: tuple[TraceEnding, ...]
    num_events: int
    loads: tuple[LoadRun, ...] = ()
    num_reads: int = 0


class Violation(AssertionError):
    """An invariant does not hold. The message says which, where and when."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


def check_image(uid: str, image: State | None, length: int) -> None:
    """Check that each stage and step ran exactly once, in order, in one lineage of states: `length` positions."""
    require(image is not None, f"{uid} is done without an image")
    assert image is not None
    done = 0
    for position, num_steps in image.pieces:
        require(position == done and num_steps > 0, f"the image of {uid} is made of the steps {image.pieces}")
        done += num_steps
    require(done == length, f"the image of {uid} is made of {done} steps, not {length}")


def check_no_overlap(device_id: int, runs: list[Run]) -> None:
    ordered = sorted((run.start_ns, run.end_ns, run.work.work_id) for run in runs)
    for before, after in pairwise(ordered):
        require(before[1] <= after[0], f"device {device_id} runs works {before[2]} and {after[2]} at the same time")
