"""What happens in an engine, for those that count it, and what it holds at a moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilework.control.driver.result import Ending
from tilework.core.request import RefusalCode, Request
from tilework.core.work import Work
from tilework.runtime.ticket import Outcome, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWork:
    """A work that has ended; `requests` are those that it was begun for, also if they have ended since.

    It was predicted to take `predicted_ns` and ran from `start_ns` to `end_ns` on the engine's clock. If it neither
    finished nor was stopped, its start is unknown: both are then the time at which its end was known.
    `correction` is measured over tabled time of such works, as the controller has it now.
    """

    work: Work
    requests: tuple[Request, ...]
    ending: Ending
    steps_done: int
    predicted_ns: int
    start_ns: int
    end_ns: int
    correction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an engine holds. `waiting` and `running` count open requests by class.

    `backlog_ns` is the GPU time that all of them are predicted to take from now on, and `state_blob_bytes` what their
    states take in memory that the workers share. By device: `memory_bytes` is what any process had in use on an
    accelerator when its latest work ended; `pids` are the workers' processes.
    """

    waiting: Mapping[str, int]
    running: Mapping[str, int]
    backlog_ns: int
    state_blob_bytes: int
    memory_bytes: Mapping[int, int]
    pids: Mapping[int, int]


class Observer:
    """Is told what happens in an engine, always on its loop; must neither wait nor raise. This one ignores it all."""

    def on_decided(self, now_ns: int, took_ns: int, num_waiting: int) -> None:
        """The controller took `took_ns` for an event of `now_ns`; so many requests have no work since."""

    def on_refused(self, request: Request, code: RefusalCode) -> None: ...

    def on_ended(self, ticket: Ticket, outcome: Outcome) -> None:
        """An accepted request has come to its one end."""

    def on_work_ended(self, ended: EndedWork) -> None: ...

    def on_work_stopped(self, work_id: int) -> None:
        """A work was asked to end early; how far it came follows."""

    def on_stuck(self, work: Work) -> None:
        """A work has done no step for too long; its group is broken off, or its devices' workers are killed."""

    def on_log_lost(self) -> None:
        """The event log could not be written, and is not written any more."""

    def on_moved(self, job_id: int) -> None:
        """A request goes on on devices that did not have its state."""

    def on_preempted(self, job_id: int) -> None:
        """An unfinished request has no work any more, while a device of its last one has another's."""

    def on_previewed(self, job_id: int) -> None: ...

    def on_joined(self, device_id: int, now_ns: int) -> None: ...

    def on_lost(self, device_id: int) -> None: ...
