"""The interface for metrics: callbacks of an engine's events, and its usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilework.control.driver.result import Ending
from tilework.core.component import LoadSource
from tilework.core.interfaces import PlacementStatus
from tilework.core.request import RefusalCode, Request
from tilework.core.wire.reports import KeptStates
from tilework.core.work import NewPlacement, Work
from tilework.runtime.encode_cache import CacheUsage
from tilework.runtime.ticket import Outcome, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWork:
    """A work that has ended. `requests` are those at its start, also if some have ended since.

    It ran from `start_ns` to `end_ns` on the engine's clock. If the work neither finished nor was stopped, its start is
    unknown: both are then the time at which its end became known. `correction` is the controller's current ratio of
    measured to tabled time for such works.
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

    `backlog_ns` is the predicted device time of their remaining work, `state_blob_bytes` the size of their states in
    shared memory. By device: `memory_bytes` is the accelerator memory in use, by any process, at the end of the latest
    work; `kept` is what it keeps of requests that have no work there; `resident_bytes` is the memory of each worker
    process; `weights_free_bytes` is what those that load weights on demand have left for weights when their works have
    ended. `placements` are there if the policy decides which stages devices are for.
    """

    waiting: Mapping[str, int]
    running: Mapping[str, int]
    backlog_ns: int
    state_blob_bytes: int
    memory_bytes: Mapping[int, int]
    kept: Mapping[int, KeptStates]
    resident_bytes: Mapping[str, int]
    weights_free_bytes: Mapping[int, int] = field(default_factory=dict)
    placements: Sequence[PlacementStatus] = ()
    encode_cache: CacheUsage = field(default_factory=CacheUsage)


class Observer:
    """Receives the events of an engine, on its event loop. It must neither block nor raise. This base ignores them."""

    def on_decided(self, now_ns: int, took_ns: int, num_waiting: int) -> None:
        """The controller took `took_ns` for an event at `now_ns`; `num_waiting` requests have no work now."""

    def on_refused(self, request: Request, code: RefusalCode) -> None: ...

    def on_ended(self, ticket: Ticket, outcome: Outcome) -> None:
        """An accepted request has ended. Called once per request."""

    def on_work_ended(self, ended: EndedWork) -> None: ...

    def on_work_stopped(self, work_id: int) -> None:
        """A work was asked to end early. `on_work_ended` follows."""

    def on_stuck(self, work: Work) -> None:
        """A work has finished no step for too long. Its group is broken off, or its workers are killed."""

    def on_log_lost(self) -> None:
        """Writing the event log has failed. It ends there."""

    def on_weights_loaded(self, device_id: int, source: LoadSource, num_bytes: int, run_ns: int) -> None:
        """A device has loaded weights for its next work."""

    def on_placed(self, placement: NewPlacement) -> None:
        """The policy has changed which stages devices are for."""

    def on_moved(self, job_id: int) -> None:
        """A request moves to devices that do not have its state."""

    def on_preempted(self, job_id: int) -> None:
        """An unfinished request has no work now, while another runs on a device of its last work."""

    def on_previewed(self, job_id: int) -> None: ...

    def on_joined(self, device_id: int, now_ns: int) -> None: ...

    def on_lost(self, device_id: int) -> None: ...
