"""What requests take at their optimal degrees, by role, and what was asked for so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.interfaces import CostModel
from tilework.core.request import Request, RequestClass, cost_key
from tilework.policy.placement.launch import Launch
from tilework.policy.placement.roles import Role, role_of
from tilework.policy.toolkit.demand import optimal_degree

_MOST_CLASSES = 256


@dataclass(frozen=True, slots=True)
class Profile:
    """The optimal degree of each role that a request has, and the time of its stages there.

    Of several stages with steps, D has the least optimal degree, since they keep one group; of others the widest, and
    each stage takes as much of the group as is optimal for it.
    """

    degrees: Mapping[Role, int]
    run_ns: Mapping[Role, int]

    @property
    def total_ns(self) -> int:
        return sum(self.run_ns.values())


def works_ns(
    request: Request, left: Cursor, costs: CostModel, degree_of: Callable[[Role], int], *, holds: bool
) -> Iterator[tuple[Stage, int]]:
    """The time of each remaining stage on groups of these degrees, as `Launch` starts it; CPU slots included.

    With `holds`, stages without steps run on as much of the group as was profiled; else on what is optimal for them.
    Raises UnknownCost.
    """
    launch = Launch(0, request, left, costs, "")
    while (stage := launch.left.stage) is not None:
        role = launch.role
        if role is None:
            launch.left = launch.left.advanced(launch.left.num_left_here)
            yield stage, costs.work_ns(stage, (request,), 1)
            continue
        num_before, degree = len(launch.starts), degree_of(role)
        launch.run(role, tuple(range(degree)), degree if holds else None)
        for start in launch.starts[num_before:]:
            yield start.stage, costs.work_ns(start.stage, (request,), len(start.devices), start.num_steps)


@dataclass(slots=True)
class Profiles:
    """The profiles of request classes. They are remembered, so that learned costs move no request to another group."""

    _known: dict[tuple[RequestClass, int | None], Profile] = field(default_factory=dict)

    def of(self, request: Request, costs: CostModel, most: int | None = None) -> Profile:
        """The profile on groups of at most `most` devices. Raises UnknownCost."""
        key = cost_key(request), most
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _profile(request, costs, most)
            if len(self._known) > _MOST_CLASSES:
                del self._known[next(iter(self._known))]
        return found


def _profile(request: Request, costs: CostModel, most: int | None) -> Profile:
    start, graph = costs.start(request), costs.graph(request.pipeline)
    optimal: dict[Role, list[tuple[bool, int]]] = {}
    for stage in start.itinerary.stages:
        role = role_of(graph, stage)
        if role is not None:
            optimal.setdefault(role, []).append((stage.has_steps, optimal_degree(stage, request, costs, most)))
    degrees = {
        role: min((degree for has_steps, degree in found if has_steps), default=max(degree for _, degree in found))
        for role, found in optimal.items()
    }
    run_ns = dict.fromkeys(degrees, 0)
    for stage, work_ns in works_ns(request, start, costs, degrees.__getitem__, holds=False):
        if stage.kind is not DeviceKind.CPU:
            role = role_of(graph, stage)
            assert role is not None
            run_ns[role] += work_ns
    return Profile(degrees, run_ns)


@dataclass(slots=True)
class SeenRequests:
    """What was asked for: how many requests of each class, and one of them. Of very many classes the latest count."""

    profiles: Profiles = field(default_factory=Profiles)
    num: int = 0
    _counts: dict[RequestClass, tuple[Request, int]] = field(default_factory=dict)

    def note(self, request: Request) -> None:
        key = cost_key(request)
        _, count = self._counts.get(key, (request, 0))
        self._counts[key] = request, count + 1
        self.num += 1
        if len(self._counts) > _MOST_CLASSES:
            del self._counts[next(iter(self._counts))]

    @property
    def occasion(self) -> tuple[int, int]:
        """Changes when a class comes for the first time, and when the number of requests has doubled."""
        return len(self._counts), self.num.bit_length()

    def largest(self) -> Request:
        """A request of the most pixels; there must be one."""
        return max((request for request, _ in self._counts.values()), key=lambda request: request.shape.pixels)

    def shares(self, role: Role, costs: CostModel, most: int) -> dict[int, float]:
        """How many requests have each optimal degree of a role, on groups of at most `most` devices."""
        found: dict[int, float] = {}
        for request, count in self._counts.values():
            degree = self.profiles.of(request, costs, most).degrees.get(role)
            if degree is not None:
                found[degree] = found.get(degree, 0) + count
        return found

    def mean_ns(self, costs: CostModel) -> dict[Role, float]:
        """The mean time of a request in each role at optimal degrees, at least a nanosecond."""
        total: dict[Role, float] = {}
        for request, count in self._counts.values():
            for role, run_ns in self.profiles.of(request, costs).run_ns.items():
                total[role] = total.get(role, 0) + count * run_ns
        return {role: max(1.0, total[role] / self.num) for role in Role if role in total}
