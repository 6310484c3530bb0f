"""Contents of a timeline, from any source and for any file format. All seconds are on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilework.core.request import Shape, Status
from tilework.formats.json_lines import RequestId
from tilework.formats.schedule import RequestLine, Schedule
from tilework.formats.workload import WorkloadRequest, by_id

OPEN = "open"
"""The status of a request whose end is unknown, as in a log that was cut off."""


_KEEP_OR_MISS = {Status.DONE, Status.FAILED, Status.EXPIRED}  # Other ends neither keep nor miss a deadline.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartWork:
    """One executed work. `first_step` counts from 1; it, `why` and `predicted_s` are known from event logs only.

    Requests that share a work each begin at a step of their own: then `first_step` is None.

    `lost` is the reason why its steps do not count; "" for a work that ended well.
    """

    work: int
    stage: str
    requests: tuple[RequestId, ...]
    devices: tuple[int, ...]
    start_s: float
    end_s: float
    steps: int
    first_step: int | None = None
    why: str = ""
    predicted_s: float | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartDecision:
    """One sentence about a request; `at_s` is on the clock of the chart."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartRequest:
    """One request, as far as it is known. A schedule without a workload has no size, and its arrival is its first work.

    `status` is one of `formats.schedule.STATUSES` or OPEN; then `finish_s` is None. `on_time` is None without a
    deadline and for a request that is open, was refused or was cancelled (see `Request.met_deadline`).
    """

    id: RequestId
    arrival_s: float
    finish_s: float | None
    status: str
    shape: Shape | None = None
    steps: int | None = None
    pipeline: str = ""
    tenant: str = ""
    priority: str = ""
    deadline_s: float | None = None
    eta_s: float | None = None
    on_time: bool | None = None
    decisions: tuple[ChartDecision, ...] = ()

    @property
    def slack_s(self) -> float | None:
        """Seconds left to the deadline at its end; negative when late; None without a deadline or while it is open."""
        return None if self.deadline_s is None or self.finish_s is None else self.deadline_s - self.finish_s

    @property
    def is_late(self) -> bool:
        """True if the request was done after its deadline."""
        return self.status == Status.DONE and self.on_time is False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A device was lost from `start_s` to `end_s`, the end of the chart if it did not come back."""

    device_id: int
    start_s: float
    end_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLoad:
    """A device loaded the weights of a stage; `source` says from where, if that is known.

    `is_read_ahead`: the host of its node read them from the disk, while the devices there did other things.
    """

    device_id: int
    stage: str
    start_s: float
    end_s: float
    source: str = ""
    is_read_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartPlacement:
    """Use of devices from `at_s` until the next one: `names` of stages by device. `why` says why it changed."""

    at_s: float
    names: Mapping[int, str]
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Works by start, requests by arrival, placements by time. `nodes` names the devices and the node of each, idle
    ones too; `slots` are those that are CPU slots.
    """

    works: tuple[ChartWork, ...] = ()
    requests: tuple[ChartRequest, ...] = ()
    outages: tuple[Outage, ...] = ()
    loads: tuple[ChartLoad, ...] = ()
    placements: tuple[ChartPlacement, ...] = ()
    nodes: Mapping[int, int] = field(default_factory=dict)
    slots: frozenset[int] = frozenset()

    def new_uses(self) -> Iterator[tuple[ChartPlacement, dict[int, str]]]:
        """Yield each placement, and what devices are for from then on, where that is new."""
        before: Mapping[int, str] = {}
        for placement in self.placements:
            names = placement.names
            yield placement, {device: name for device, name in names.items() if before.get(device) != name}
            before = names

    def name_of(self, device_id: int) -> str:
        return f"CPU slot {device_id}" if device_id in self.slots else f"device {device_id}"

    @property
    def start_s(self) -> float:
        starts = [work.start_s for work in self.works] + [request.arrival_s for request in self.requests]
        return min(starts, default=0.0)

    @property
    def end_s(self) -> float:
        ends = [work.end_s for work in self.works] + [load.end_s for load in self.loads]
        ends += [request.arrival_s if request.finish_s is None else request.finish_s for request in self.requests]
        return max(ends, default=0.0)


def chart_of_schedule(
    schedule: Schedule, workload: Sequence[WorkloadRequest] = (), num_devices: int | None = None
) -> Chart:
    """Return the chart of a schedule.

    `workload` (matched by request id) adds sizes, arrivals and deadlines. `num_devices` adds idle devices; what is
    numbered beyond them is a CPU slot.
    """
    known = by_id(workload)
    works = tuple(
        ChartWork(
            work=line.work,
            stage=line.stage,
            requests=line.requests,
            devices=line.devices,
            start_s=line.start_s,
            end_s=line.end_s,
            steps=line.steps,
        )
        for line in sorted(schedule.works, key=lambda line: (line.start_s, line.work))
    )
    starts_s: dict[RequestId, float] = {}
    for work in works:
        for request in work.requests:
            starts_s.setdefault(request, work.start_s)
    ends = {line.request: line for line in schedule.requests}
    ids = dict.fromkeys([*ends, *starts_s])
    requests = [_request(i, known.get(i), ends.get(i), starts_s.get(i)) for i in ids]
    devices = {device_id for work in works for device_id in work.devices} | set(range(num_devices or 0))
    loads = tuple(
        ChartLoad(device_id=line.device_id, stage=line.stage, start_s=line.start_s, end_s=line.end_s)
        for line in schedule.weights
        if line.change == "load"
    )
    devices |= {load.device_id for load in loads}
    return Chart(
        works=works,
        requests=by_arrival(requests),
        loads=loads,
        nodes=dict.fromkeys(sorted(devices), 0),
        slots=frozenset(one for one in devices if num_devices and one >= num_devices),
    )


def by_arrival(requests: Iterable[ChartRequest]) -> tuple[ChartRequest, ...]:
    return tuple(sorted(requests, key=lambda request: (request.arrival_s, str(request.id))))


def busy_shares(works: Iterable[ChartWork], start_s: float, end_s: float) -> dict[int, float]:
    """Return the share of [start_s, end_s] that each device spent in at least one work, by device."""
    spans: dict[int, list[tuple[float, float]]] = {}
    for work in works:
        for device_id in work.devices:
            spans.setdefault(device_id, []).append((max(work.start_s, start_s), min(work.end_s, end_s)))
    length_s = end_s - start_s
    return {
        device_id: _covered_s(sorted(spans[device_id])) / length_s if length_s > 0 else 0.0
        for device_id in sorted(spans)
    }


def _request(
    request_id: RequestId, known: WorkloadRequest | None, end: RequestLine | None, start_s: float | None
) -> ChartRequest:
    finish_s = None if end is None else end.finish_s
    first_s = start_s if start_s is not None else finish_s
    assert first_s is not None, "a request of a schedule has a work or an end"
    return ChartRequest(
        id=request_id,
        arrival_s=min(first_s, first_s if finish_s is None else finish_s) if known is None else known.arrival_s,
        finish_s=finish_s,
        status=OPEN if end is None else end.status,
        shape=None if known is None else known.shape,
        steps=None if known is None else known.steps,
        pipeline="" if known is None else known.pipeline,
        tenant="" if known is None else known.tenant or "",
        deadline_s=None if known is None else known.deadline_s,
        on_time=None if end is None or end.status not in _KEEP_OR_MISS else end.on_time,
    )


def _covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of sorted spans."""
    covered_s, until_s = 0.0, float("-inf")
    for start_s, end_s in spans:
        covered_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return covered_s
