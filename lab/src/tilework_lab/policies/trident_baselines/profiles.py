"""The time of requests at their optimal degrees, by role, and the requests that were seen so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.policy import CostModel
from tilework.core.request import Request, RequestClass, cost_key
from tilework.cost.demand import optimal_degree
from tilework.policy.placement.launch import Launch
from tilework.policy.placement.roles import Role, role_of
from tilework.policy.toolkit.known_demands import ByClass

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
    """Yield the time of each remaining stage on groups of these degrees, as `Launch` starts it; CPU slots included.

    With `holds`, stages without steps run on as much of the group as was profiled; else on what is optimal for them.
    Raises UnknownCost.
    """
    launch = Launch((0,), request, left, costs, "")
    while (stage := launch.left.stage) is not None:
        role = launch.role
        if role is None:
            launch.left = launch.left.advanced(launch.left.num_left_here)
            yield stage, costs.work_ns(stage, (request,), 1)
            continue
        num_before = len(launch.starts)
        degree = degree_of(role)
        launch.run(role, tuple(range(degree)), degree if holds else None)
        for start in launch.starts[num_before:]:
            yield start.stage, costs.work_ns(start.stage, (request,), len(start.devices), start.num_steps)


def profile_of(request: Request, costs: CostModel) -> Profile:
    """Return the profile of a request. Raises UnknownCost."""
    start = costs.start(request)
    graph = costs.graph(request.pipeline)
    optimal: dict[Role, list[tuple[bool, int]]] = {}
    for stage in start.itinerary.stages:
        role = role_of(graph, stage)
        if role is not None:
            optimal.setdefault(role, []).append((stage.has_steps, optimal_degree(stage, request, costs)))
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
    """The requests that were seen: the number of each class, and its profile. Of very many classes the newest count.

    Profiles are remembered, so that learned costs move no request to another group.
    """

    num: int = 0
    _classes: ByClass[RequestClass, tuple[Profile, int]] = field(default_factory=partial(ByClass, _MOST_CLASSES))

    def note(self, request: Request, costs: CostModel) -> None:
        """Count a request. Raises UnknownCost."""
        key = cost_key(request)
        profile, count = self._classes[key] if key in self._classes else (profile_of(request, costs), 0)
        self._classes[key] = profile, count + 1
        self.num += 1

    def forget(self, pipeline: str) -> bool:
        """Drop the classes of a pipeline, and their requests; returns whether there were any."""
        had_any = self._classes.forget(pipeline)
        self.num = sum(count for _, count in self._classes.values())
        return had_any

    @property
    def occasion(self) -> tuple[int, int]:
        """Key that changes when a class comes for the first time, and when the number of requests has doubled."""
        return len(self._classes), self.num.bit_length()

    def profile(self, request: Request, costs: CostModel) -> Profile:
        """Return the profile of a request, which may be new. Raises UnknownCost."""
        found = self._classes.get(cost_key(request))
        return profile_of(request, costs) if found is None else found[0]

    def largest(self) -> Profile:
        """Return the profile of a request of the most pixels; there must be one."""
        key = max(self._classes, key=lambda key: key.step.shape.pixels)
        return self._classes[key][0]

    def shares(self, role: Role) -> dict[int, float]:
        """Return how many requests have each optimal degree of a role."""
        found: dict[int, float] = {}
        for profile, count in self._classes.values():
            degree = profile.degrees.get(role)
            if degree is not None:
                found[degree] = found.get(degree, 0) + count
        return found

    def mean_ns(self) -> dict[Role, float]:
        """Return the mean time of a request in each role at optimal degrees, at least a nanosecond."""
        total: dict[Role, float] = {}
        for profile, count in self._classes.values():
            for role, run_ns in profile.run_ns.items():
                total[role] = total.get(role, 0) + count * run_ns
        num = sum(count for _, count in self._classes.values())
        return {role: max(1.0, total[role] / num) for role in Role if role in total}
