"""The requests of late: how many workers of an instance each gets, and what they take of each service.

Source: OnePiece §4.3. In individual mode each worker takes a request of its own, in collaboration mode all workers of
a node work on one. The user of OnePiece chooses the mode of each stage; here a policy has one rule for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from tilework.core.policy import CostModel
from tilework.core.request import Request, RequestClass, cost_key
from tilework.cost.demand import optimal_degree, step_degrees, usable_degree
from tilework.cost.tabled import UnknownCost
from tilework.policy.placement.profile import optimal_for, pieces_by_role
from tilework.policy.placement.roles import Role
from tilework.policy.published.onepiece.services import Service, Services
from tilework.policy.toolkit.known_demands import ByClass


class Mode(Enum):
    """The number of workers that a request gets for its steps.

    `EFFICIENT`: as many as it uses well (`placement.profile`), so that a small request takes one and a large one
    several. `COLLABORATION`: all that a node has, as far as was profiled. `INDIVIDUAL`: one.
    """

    EFFICIENT = "efficient"
    COLLABORATION = "collaboration"
    INDIVIDUAL = "individual"

    def degrees(self, request: Request, costs: CostModel) -> dict[Role, int]:
        """Return how many workers a request wants for each role. Raises UnknownCost."""
        found = {}
        for role, pieces in pieces_by_role(request, costs).items():
            if self is Mode.INDIVIDUAL:
                found[role] = 1
            elif self is Mode.COLLABORATION and role is Role.D:
                found[role] = step_degrees(request, costs)[-1]
            else:
                found[role] = optimal_for(role, pieces, request, costs)
        return found


class RoleRun(NamedTuple):
    """The stages of one role of a request: on how many workers, and for how long."""

    degree: int
    run_ns: int

    @property
    def device_ns(self) -> int:
        return self.degree * self.run_ns


def runs_of(request: Request, degrees: Mapping[Role, int], costs: CostModel) -> dict[Role, RoleRun]:
    """Return what a request takes of each role, on this many workers. Raises UnknownCost."""
    found = {}
    for role, pieces in pieces_by_role(request, costs).items():
        degree = degrees[role]
        run_ns = 0
        for stage, num_steps in pieces:
            width = degree if stage.has_steps else optimal_degree(stage, request, costs, degree)
            run_ns += costs.work_ns(stage, (request,), width, num_steps)
        found[role] = RoleRun(degree, run_ns)
    return found


def narrowed(role: Role, degree: int, most: int, request: Request, costs: CostModel) -> int:
    """Return how many of `most` workers a request gets for a role for which it wants `degree`. Raises UnknownCost."""
    if degree <= most:
        return degree
    return usable_degree(request, most, costs) if role is Role.D else most


_few = partial(ByClass, 1024)

Parts = Mapping[Service, RoleRun]
"""Share of a request in each service: the most workers at a time, and the time for which it keeps these."""


@dataclass(slots=True, kw_only=True)
class Traffic:
    """The requests of this window and of the one before, by class, and what each takes.

    Times are looked up once in a window for each class: learned costs change what instances are for at its end. How
    many workers a class wants is looked up once, so that its requests go where they went.

    Attributes:
        num: how many requests came since the first.
        wanted: the most workers that any of them wants for its steps.
        widest: the workers of the widest instance.
    """

    mode: Mode
    services: Services
    num: int = field(default=0, init=False)
    wanted: int = field(default=1, init=False)
    widest: int = field(default=1, init=False)
    _counts: ByClass[RequestClass, int] = field(default_factory=_few, init=False)
    _before: ByClass[RequestClass, int] = field(default_factory=_few, init=False)
    _one_of: ByClass[RequestClass, Request] = field(default_factory=_few, init=False)
    _degrees: ByClass[RequestClass, Mapping[Role, int]] = field(default_factory=_few, init=False)
    _runs: ByClass[RequestClass, Mapping[Role, RoleRun]] = field(default_factory=_few, init=False)
    _parts: ByClass[RequestClass, Parts] = field(default_factory=_few, init=False)
    _longest_ns: dict[Service, int] = field(default_factory=dict, init=False)

    def note(self, request: Request, costs: CostModel) -> None:
        """Count a request. Raises UnknownCost."""
        key = cost_key(request)
        self._counts[key] = self._counts.get(key, 0) + 1
        self.num += 1
        if key not in self._one_of:
            self._one_of[key] = request
            self.wanted = max(self.wanted, self.degrees(request, costs).get(Role.D, 1))
            self.services.note(request.pipeline, costs)
            self.services_changed()

    @property
    def occasion(self) -> tuple[int, int]:
        """Key that changes when a class comes for the first time in two windows, and when the requests have doubled."""
        return len(self._one_of), self.num.bit_length()

    def services_changed(self) -> None:
        """Forget what was computed for other services or classes."""
        self._parts.clear()
        self._longest_ns.clear()

    def forget(self, pipeline: str) -> None:
        """Forget a pipeline, which is served no more. If no other was asked for, no request has come yet."""
        self.services.forget(pipeline)
        for known in (self._counts, self._before, self._one_of, self._degrees, self._runs):
            known.forget(pipeline)
        self.services_changed()
        if not self._one_of:
            self.num = 0

    def set_instances(self, num: int, widest: int) -> None:
        """Learn how many instances there are, and how many workers the widest has."""
        self.services.set_instances(num)
        self.widest = widest
        self._runs.clear()
        self.services_changed()

    def end_window(self) -> None:
        """Forget what came before this window, and all times."""
        self._before, self._counts = self._counts, _few()
        for key in [one for one in self._one_of if one not in self._before]:
            del self._one_of[key]
        self._runs.clear()
        self.services_changed()

    def degrees(self, request: Request, costs: CostModel) -> Mapping[Role, int]:
        """Return how many workers a request wants for each role. Raises UnknownCost."""
        key = cost_key(request)
        if key not in self._degrees:
            self._degrees[key] = self.mode.degrees(request, costs)
        return self._degrees[key]

    def runs(self, request: Request, costs: CostModel) -> Mapping[Role, RoleRun]:
        """Return what a request takes of each role. Raises UnknownCost."""
        key = cost_key(request)
        if key not in self._runs:
            wanted = self.degrees(request, costs).items()
            degrees = {role: narrowed(role, degree, self.widest, request, costs) for role, degree in wanted}
            self._runs[key] = runs_of(request, degrees, costs)
        return self._runs[key]

    def parts(self, request: Request, costs: CostModel) -> Parts:
        """Return what a request takes of each service. Its pipeline was seen. Raises UnknownCost."""
        key = cost_key(request)
        if key not in self._parts:
            found: dict[Service, RoleRun] = {}
            for role, run in self.runs(request, costs).items():
                service = self.services.of(request.pipeline, role)
                before = found.get(service, RoleRun(0, 0))
                found[service] = RoleRun(max(before.degree, run.degree), before.run_ns + run.run_ns)
            self._parts[key] = found
        return self._parts[key]

    def loads(self, costs: CostModel) -> dict[Service, float]:
        """Return the device time that all these requests take of each service, at least a nanosecond."""
        found = dict.fromkeys(self.services.all(), 1.0)
        for key, one in self._served(costs):
            num = self._counts.get(key, 0) + self._before.get(key, 0)
            for service, run in self.parts(one, costs).items():
                found[service] += num * run.device_ns
        return found

    def longest_ns(self, service: Service, costs: CostModel) -> int:
        """Return the longest that one of these requests keeps its workers of a service."""
        if service not in self._longest_ns:
            runs = (self.parts(one, costs).get(service) for _, one in self._served(costs))
            self._longest_ns[service] = max((run.run_ns for run in runs if run is not None), default=0)
        return self._longest_ns[service]

    def _served(self, costs: CostModel) -> Iterator[tuple[RequestClass, Request]]:
        """Yield one request of each class, without those of models that were removed meanwhile."""
        for key, one in self._one_of.items():
            try:
                costs.start(one)
            except UnknownCost:
                continue
            yield key, one
