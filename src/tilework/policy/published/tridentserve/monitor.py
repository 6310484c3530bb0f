"""The monitor: the requests that came lately, and what each pool did for them as predicted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.core.policy import ClusterView, CostModel, JobView
from tilework.core.request import Request, RequestClass, cost_key
from tilework.core.time import NS_PER_S
from tilework.cost.tabled import UnknownCost
from tilework.policy.placement.roles import PlacementType
from tilework.policy.placement.switching import WindowStats
from tilework.policy.published.tridentserve.layout import Pool, PoolLayout
from tilework.policy.published.tridentserve.ways import Profiles
from tilework.policy.toolkit.order import by_urgency
from tilework.policy.toolkit.tasks import Task

_WINDOW_LATENCIES = 7.5
_LEAST_WINDOW_NS = 60 * NS_PER_S
_MOST_WINDOW_NS = 600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class PoolRun:
    """Stages of requests on a pool, predicted when they were started. `busy_ns` is of all devices together."""

    pool: Pool
    begin_ns: int
    end_ns: int
    busy_ns: int
    num_requests: int = 1


class _Seen(NamedTuple):
    """The time at which a job was seen, and its request with its class."""

    at_ns: int
    job_id: int
    request: Request
    key: RequestClass


@dataclass(slots=True)
class Monitor:
    """Keeps the requests of a sliding window, and the runs that end in it.

    The window is 7.5 times the mean latency of its requests at optimal degrees, from one to ten minutes: 60 s for SD3,
    60 to 110 s for FLUX.1, 180 to 220 s for CogVideoX and 240 to 300 s for HunyuanVideo. A request is seen when it is
    first among the most urgent ones; one that is still there at the end of its window is seen again.

    Attributes:
        num_seen: how many requests were seen so far.
        num_classes_seen: how often one was seen of a class that had none in the window.
    """

    window_ns: int = _LEAST_WINDOW_NS
    num_seen: int = 0
    num_classes_seen: int = 0
    first_ns: int | None = None
    _requests: deque[_Seen] = field(default_factory=deque)
    _ids: set[int] = field(default_factory=set)
    _counts: Counter[RequestClass] = field(default_factory=Counter)
    _runs: list[PoolRun] = field(default_factory=list)

    def see(self, view: ClusterView, tasks: Sequence[Task], now_ns: int) -> None:
        """Note requests of which something is left to start: all that wait and begin now, and others after a window."""
        over = []
        while self._requests and self._requests[0].at_ns <= now_ns - self.window_ns:
            over.append(seen := self._requests.popleft())
            self._ids.remove(seen.job_id)
            self._counts[seen.key] -= 1
            if not self._counts[seen.key]:
                del self._counts[seen.key]
        given = {task.job.job_id: task.job for task in tasks}
        running = [job for one in over if one.job_id not in given and (job := _running(view, one.job_id)) is not None]
        new = [job for job_id, job in given.items() if job_id not in self._ids]
        for job in sorted((*new, *running), key=by_urgency):
            key = cost_key(job.request)
            self._requests.append(_Seen(now_ns, job.job_id, job.request, key))
            self._ids.add(job.job_id)
            self.num_classes_seen += not self._counts[key]
            self._counts[key] += 1
            self.num_seen += 1
            self.first_ns = now_ns if self.first_ns is None else self.first_ns

    def running(self, view: ClusterView) -> list[JobView]:
        """Return the jobs of the window that run, and of which something is left to start."""
        return [job for job_id in self._ids if (job := _running(view, job_id)) is not None]

    def note(self, run: PoolRun) -> None:
        self._runs.append(run)

    def forget_unknown(self, costs: CostModel) -> None:
        """Forget the requests with LoRAs that were removed: nothing can be said of them any more."""
        self._drop({key for key, (one, _) in self.classes().items() if not _is_known(one, costs)})

    def forget_pipeline(self, pipeline: str) -> None:
        """Forget the requests of a pipeline that was removed; without any others nothing has been seen yet."""
        self._drop({key for key in self._counts if key.step.pipeline == pipeline})
        self._runs = [run for run in self._runs if run.pool.part != pipeline]
        if not self._requests:
            self.first_ns = None
            self.num_seen = 0

    def _drop(self, classes: Collection[RequestClass]) -> None:
        if classes:
            self._ids -= {seen.job_id for seen in self._requests if seen.key in classes}
            self._requests = deque(seen for seen in self._requests if seen.key not in classes)
            self._counts = Counter(seen.key for seen in self._requests)

    def forget(self, now_ns: int, window_ns: int = _MOST_WINDOW_NS) -> None:
        """Forget runs that ended before a window; without one, those that no window can have any more."""
        self._runs = [run for run in self._runs if run.end_ns > now_ns - window_ns]

    def classes(self) -> dict[RequestClass, tuple[Request, int]]:
        """Return the requests of the window by class: one of each, and how many there are."""
        found: dict[RequestClass, tuple[Request, int]] = {}
        for seen in self._requests:
            if seen.key not in found:
                found[seen.key] = seen.request, self._counts[seen.key]
        return found

    def set_window(self, profiles: Profiles, costs: CostModel) -> None:
        """Set the length of the window by the requests in it."""
        classes = self.classes().values()
        num = sum(count for _, count in classes)
        if num:
            total_ns = sum(count * profiles.of(one, costs).latency_ns for one, count in classes)
            wanted_ns = round(_WINDOW_LATENCIES * total_ns / num / NS_PER_S) * NS_PER_S
            self.window_ns = max(_LEAST_WINDOW_NS, min(_MOST_WINDOW_NS, wanted_ns))

    def stats(
        self, part: str, layout: PoolLayout, waiting: Mapping[PlacementType, int], now_ns: int
    ) -> dict[PlacementType, WindowStats]:
        """Return what each type of a part did in the window. `waiting` are requests by the type that they wait for.

        A run that is queued and has not begun, as predicted, waits, too.
        """
        done, busy_ns, queued = Counter[PlacementType](), Counter[PlacementType](), Counter[PlacementType]()
        for run in self._runs:
            if run.pool.part != part or run.end_ns <= now_ns - self.window_ns:
                continue
            kind = run.pool.kind
            done[kind] += run.num_requests if run.end_ns <= now_ns else 0
            busy_ns[kind] += run.busy_ns if run.end_ns <= now_ns else 0
            queued[kind] += run.num_requests if run.begin_ns > now_ns else 0
        replicas = layout.placement_of(part).counts()
        return {
            kind: WindowStats(
                completions=done[kind],
                busy_ns=busy_ns[kind],
                replicas=replicas.get(kind, 0),
                backlog=queued[kind] + waiting.get(kind, 0),
            )
            for kind in PlacementType
            if replicas.get(kind, 0) or waiting.get(kind, 0)
        }


def _running(view: ClusterView, job_id: int) -> JobView | None:
    """Return a job that has works, and of which something is left to start; None if it is not such a one."""
    job = view.job(job_id)
    return job if job is not None and job.works and job.left.stage is not None else None


def _is_known(request: Request, costs: CostModel) -> bool:
    try:
        costs.start(request)
    except UnknownCost:
        return False
    return True
