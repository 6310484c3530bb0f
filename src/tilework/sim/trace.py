"""The result of a simulation: what ran, and how requests ended."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.request import Request, Status
from tilework.sim.runs import LoadRun, Run, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one request ended.

    `job_id` and `eta_ns`, the finish predicted at admission, are None if the request was rejected. `image` is the state
    that the delivered picture was decoded from.
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
        """Whether the request was done by its deadline; without a deadline, whether it was done."""
        deadline_ns = self.request.deadline_ns
        return self.status is Status.DONE and (deadline_ns is None or self.finish_ns <= deadline_ns)

    @property
    def was_promised(self) -> bool:
        """Whether it was accepted as a promise, which no client took back."""
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
    endings: tuple[Ending, ...]
    num_events: int
    loads: tuple[LoadRun, ...] = ()
    num_reads: int = 0
