"""What the monitor knows: the requests that came lately, and what each pool did for them as predicted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tilework.core.interfaces import CostModel
from tilework.core.request import Request, RequestClass, cost_key
from tilework.core.time import NS_PER_S
from tilework.policy.placement.roles import PlacementType
from tilework.policy.placement.switching import WindowStats
from tilework.policy.published.tridentserve.layout import Layout, Pool
from tilework.policy.published.tridentserve.ways import Profiles
from tilework.policy.toolkit.tasks import Task

_WINDOW_LATENCIES = 7.5
_LEAST_WINDOW_NS = 60 * NS_PER_S
_MOST_WINDOW_NS = 600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class PoolRun:
    """Stages of one request on a pool, predicted when they were started. `busy_ns` is of all devices together."""

    pool: Pool
    begin_ns: int
    end_ns: int
    busy_ns: int


@dataclass(slots=True)
class Monitor:
    """Keeps the requests of a sliding window, and the runs that end in it.

    The window is 7.5 times the mean latency of its requests at optimal degrees, from one to ten minutes: 60 s for SD3,
    60 to 110 s for FLUX.1, 180 to 220 s for CogVideoX and 240 to 300 s for HunyuanVideo. A request is seen when it is
    first among the most urgent ones; one that is still there at the end of its window is seen again.
    """

    window_ns: int = _LEAST_WINDOW_NS
    num_seen: int = 0
    first_ns: int | None = None
    _requests: deque[tuple[int, int, Request]] = field(default_factory=deque)
    _ids: set[int] = field(default_factory=set)
    _runs: list[PoolRun] = field(default_factory=list)

    def see(self, tasks: Iterable[Task], now_ns: int) -> None:
        """Note requests of which something is left to start."""
        while self._requests and self._requests[0][0] <= now_ns - self.window_ns:
            self._ids.remove(self._requests.popleft()[1])
        for task in tasks:
            if (job_id := task.job.job_id) not in self._ids:
                self._requests.append((now_ns, job_id, task.job.request))
                self._ids.add(job_id)
                self.num_seen += 1
                self.first_ns = now_ns if self.first_ns is None else self.first_ns

    def note(self, run: PoolRun) -> None:
        self._runs.append(run)

    def forget(self, now_ns: int, window_ns: int = _MOST_WINDOW_NS) -> None:
        """Forget runs that ended before a window; without one, those that no window can have any more."""
        self._runs = [run for run in self._runs if run.end_ns > now_ns - window_ns]

    def classes(self) -> dict[RequestClass, tuple[Request, int]]:
        """The requests of the window by class: one of each, and how many there are."""
        found: dict[RequestClass, tuple[Request, int]] = {}
        for _, _, request in self._requests:
            key = cost_key(request)
            one, count = found.get(key, (request, 0))
            found[key] = one, count + 1
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
        self, part: str, layout: Layout, waiting: Mapping[PlacementType, int], now_ns: int
    ) -> dict[PlacementType, WindowStats]:
        """What each type of a part did in the window. `waiting` are requests by the type that they wait for.

        A run that is queued and has not begun, as predicted, waits, too.
        """
        done, busy_ns, queued = Counter[PlacementType](), Counter[PlacementType](), Counter[PlacementType]()
        for run in self._runs:
            if run.pool.part != part or run.end_ns <= now_ns - self.window_ns:
                continue
            kind = run.pool.kind
            done[kind] += run.end_ns <= now_ns
            busy_ns[kind] += run.busy_ns if run.end_ns <= now_ns else 0
            queued[kind] += run.begin_ns > now_ns
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
