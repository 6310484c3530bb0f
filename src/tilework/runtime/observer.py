"""The interface for metrics: callbacks for an engine's events, and its usage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilework.admission.reservation_guard import GuardCounts
from tilework.core.component import LoadSource
from tilework.core.graph.stage import DeviceKind
from tilework.core.request import RefusalCode, Request
from tilework.core.time import START_MARGINS, Margins
from tilework.core.wire.reports import DeviceReading, Ending, KeptStates
from tilework.core.work import NewPlacement, Work
from tilework.cost.corrections import Deviations
from tilework.policy.traits import PlacementStatus
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
    """Resources that an engine holds. `waiting` and `running` count open requests by class.

    `backlog_ns` is the predicted device time of their remaining work, `state_blob_bytes` the size of their states in
    shared memory. By device: `memory_bytes` is the accelerator memory in use, by any process, at the end of the latest
    work; `kept` is what the device keeps of requests that have no work there; `resident_bytes` is the memory of each
    worker process; `weights_free_bytes` is the free memory for weights, when works have ended, of devices that load
    weights on demand. `readings` are the latest ones that the device of each worker reported, by the names of
    `resident_bytes`. `bad_reports` are those of `Executor.bad_reports`.
    `placements` are given if the policy decides which stages devices are for. `cost_deviations` are those of the latest
    works from the measured times. `margins` are those of promises; `guard` counts the works held back or started to
    keep promises.
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
    readings: Mapping[str, DeviceReading] = field(default_factory=dict)
    bad_reports: Mapping[int, int] = field(default_factory=dict)
    cost_deviations: Deviations = field(default_factory=dict)
    guard: GuardCounts = field(default_factory=GuardCounts)
    margins: Margins = START_MARGINS


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldComponent:
    """Weights on a device: `name` is their name in the stages of the first of `models`, or that of a LoRA.

    All these models use them.
    """

    models: tuple[str, ...]
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A device that is up, and the weights that it has when its works have ended, the least recently used first.

    `total_bytes` is its memory for weights; None: no limit.
    `used_bytes` is the accelerator memory in use, by any process, at the end of its latest work, if that is known.
    `readings` are its latest ones; a cell has one for each of its workers.
    """

    device_id: int
    node: int
    kind: DeviceKind
    total_bytes: int | None
    free_bytes: int | None
    used_bytes: int | None
    components: tuple[HeldComponent, ...]
    readings: tuple[DeviceReading, ...] = ()


class Observer:
    """Receives the events of an engine, on its event loop. It must neither block nor raise. This base ignores them."""

    def on_decided(self, now_ns: int, took_ns: int, num_waiting: int) -> None:
        """Note that the controller took `took_ns` for an event; `num_waiting` requests have no work now."""

    def on_refused(self, request: Request, code: RefusalCode) -> None: ...

    def on_ended(self, ticket: Ticket, outcome: Outcome) -> None:
        """Note that an accepted request has ended. Called once per request."""

    def on_work_sent(self, work: Work, requests: tuple[Request, ...], predicted_ns: int, now_ns: int) -> None:
        """Note that a work was sent to its devices, where it begins after their works. `on_work_ended` follows."""

    def on_work_ended(self, ended: EndedWork) -> None: ...

    def on_work_stopped(self, work_id: int) -> None:
        """Note that a work was asked to end early. `on_work_ended` follows."""

    def on_stuck(self, work: Work) -> None:
        """Note that a work has finished no step for too long. Its group is broken off, or its workers are killed."""

    def on_log_lost(self) -> None:
        """Note that writing the event log has failed. The log ends there."""

    def on_weights_loaded(self, device_id: int, source: LoadSource, num_bytes: int, run_ns: int) -> None:
        """Note that a device has loaded weights for its next work."""

    def on_placed(self, placement: NewPlacement) -> None:
        """Note that the policy has changed which stages devices are for."""

    def on_moved(self, job_id: int) -> None:
        """Note that a request moves to devices that do not have its state."""

    def on_preempted(self, job_id: int) -> None:
        """Note that an unfinished request has no work now, while another runs on a device of its last work."""

    def on_previewed(self, job_id: int) -> None: ...

    def on_joined(self, device_id: int, now_ns: int) -> None: ...

    def on_lost(self, device_id: int) -> None: ...


class Observers(Observer):
    """Passes each event to those of several observers that handle it, in their order."""

    def __init__(self, *observers: Observer) -> None:
        for name in [name for name in vars(Observer) if name.startswith("on_")]:
            given = [getattr(one, name) for one in observers if getattr(type(one), name) is not getattr(Observer, name)]
            if given:  # A call of a single observer costs nothing more than without this class.
                setattr(self, name, given[0] if len(given) == 1 else _each(given))


def _each(callbacks: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: object) -> None:
        for callback in callbacks:
            callback(*args)

    return call
