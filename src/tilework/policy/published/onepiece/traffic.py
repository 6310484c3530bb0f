"""What was asked for lately, and what that takes of each service."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tilework.core.interfaces import CostModel
from tilework.core.request import Request, RequestClass, cost_key
from tilework.policy.placement.roles import Role
from tilework.policy.published.onepiece.modes import Mode, Run, runs_of
from tilework.policy.published.onepiece.services import Service, Services


@dataclass(slots=True, kw_only=True)
class Traffic:
    """The requests of this window and of the one before, by class, and what each takes.

    Times are looked up once in a window for each class: learned costs change what instances are for at its end.

    Attributes:
        num: how many requests came since the first.
        widest: the workers of the widest instance.
    """

    mode: Mode
    services: Services
    num: int = field(default=0, init=False)
    widest: int = field(default=1, init=False)
    _counts: Counter[RequestClass] = field(default_factory=Counter, init=False)
    _before: Counter[RequestClass] = field(default_factory=Counter, init=False)
    _one_of: dict[RequestClass, Request] = field(default_factory=dict, init=False)
    _runs: dict[RequestClass, dict[Role, Run]] = field(default_factory=dict, init=False)

    def note(self, request: Request, costs: CostModel) -> None:
        """Count a request. Raises UnknownCost."""
        key = cost_key(request)
        self._counts[key] += 1
        self._one_of[key] = request
        self.num += 1
        self.services.note(request.pipeline, costs)

    @property
    def occasion(self) -> tuple[int, int]:
        """Changes when a class comes for the first time in two windows, and when the number of requests has doubled."""
        return len(self._one_of), self.num.bit_length()

    def set_widest(self, widest: int) -> None:
        """Learn how many workers the widest instance has."""
        self.widest = widest
        self._runs.clear()

    def end_window(self) -> None:
        """Forget what came before this window, and all times."""
        self._before, self._counts = self._counts, Counter()
        self._one_of = {key: one for key, one in self._one_of.items() if key in self._before}
        self._runs.clear()

    def wanted_width(self, costs: CostModel, most: int) -> int:
        """The most workers that a request wants for its steps, of at most `most`. Raises UnknownCost."""
        return max((self.mode.degree(Role.D, one, costs, most) for one in self._one_of.values()), default=1)

    def runs(self, request: Request, costs: CostModel) -> dict[Role, Run]:
        """What a request takes of each role. Raises UnknownCost."""
        key = cost_key(request)
        if key not in self._runs:
            self._runs[key] = runs_of(request, costs, self.mode, self.widest)
        return self._runs[key]

    def parts(self, request: Request, costs: CostModel) -> dict[Service, list[Run]]:
        """What a request takes of each service. Its pipeline was seen. Raises UnknownCost."""
        found: dict[Service, list[Run]] = {}
        for role, run in self.runs(request, costs).items():
            found.setdefault(self.services.of(request.pipeline, role), []).append(run)
        return found

    def loads(self, costs: CostModel) -> dict[Service, float]:
        """The device time that all these requests take of each service, at least a nanosecond. Raises UnknownCost."""
        found = dict.fromkeys(self.services.all(), 1.0)
        for key, num in (self._counts + self._before).items():
            for service, runs in self.parts(self._one_of[key], costs).items():
                found[service] += num * sum(run.device_ns for run in runs)
        return found

    def longest_ns(self, service: Service, costs: CostModel) -> int:
        """The longest that one of these requests keeps its workers of a service. Raises UnknownCost."""
        parts = (self.parts(one, costs).get(service, ()) for one in self._one_of.values())
        return max((sum(run.run_ns for run in runs) for runs in parts), default=0)
