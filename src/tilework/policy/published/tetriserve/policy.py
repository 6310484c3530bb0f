"""TetriServe: each round chooses the degree of every request again, as low as its deadline allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import RequestClass, cost_key
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.cost.demand import Speed
from tilework.policy.published.tetriserve.round_length import ClassBudget, RoundSearch
from tilework.policy.published.tetriserve.round_plan import Round, RoundPlan
from tilework.policy.toolkit.known_demands import ByClass
from tilework.policy.toolkit.order import DeadlinePolicy, late_jobs
from tilework.policy.toolkit.tasks import Task, tasks_at_hand

_MOST_CLASSES = 8
# Rounds after which their length is searched again, if request classes have changed and if not.
_SOONEST, _LATEST = 4, 256


@dataclass(slots=True, kw_only=True)
class TetriServe(DeadlinePolicy):
    """Plans in rounds: everything that runs in one is decided at its beginning (see `RoundPlan`).

    A round ends early when an arrival finds all devices idle and no job waits for its end. The length of a round
    follows from the requests seen lately (see `RoundSearch`), unless `round_ns` fixes it. The last `margin_ns` of each
    round are left free, so that dispatch, moves and small delays push no steps over its end. With `ends_early` a round
    is over as soon as all its work is done, which saves the tails of rounds in which few jobs ran; of many devices some
    are nearly always at work, and little changes.

    Jobs that can no longer be on time, even at full speed from now on, are dropped to best effort; they and jobs
    without a deadline are served by the patience of `DeadlineOrder`.

    Source: TetriServe §4.2. Departures: encode and decode are charged to the deadline; the cost of a step includes its
    share of the tail that whole steps leave in a round.
    """

    round_ns: int | None = None
    ends_early: bool = False
    margin_ns: int = 10 * NS_PER_MS
    _end_ns: int = field(default=0, init=False)
    _chosen_ns: int = field(default=0, init=False)
    _age: int = field(default=_LATEST, init=False)
    _search: RoundSearch | None = field(default=None, init=False)
    _has_news: bool = field(default=False, init=False)
    _budgets: ByClass[RequestClass, ClassBudget] = field(default_factory=partial(ByClass, _MOST_CLASSES), init=False)

    def forget(self, pipeline: str, costs: CostModel) -> None:
        DeadlinePolicy.forget(self, pipeline, costs)  # Dataclasses with slots know no super().
        if self._budgets.forget(pipeline):  # The length was for its requests, too.
            self._search = None
            self._chosen_ns = 0
            self._age = _LATEST

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        is_over = now_ns >= self._end_ns or _is_abandoned(view) or (self.ends_early and _is_idle(view))
        if not is_over:
            return Plan(wake_ns=self._end_ns)
        tasks = tasks_at_hand(view, costs, now_ns)
        if late := late_jobs([(task.job, task.earliest_ns) for task in tasks]):
            return Plan(dropped_to_best_effort=late)
        round_ns = self.round_ns or self._adapted_round_ns(tasks)
        starts = RoundPlan(view, costs, tasks, Round(now_ns, round_ns, self.margin_ns)).starts()
        if not starts:  # Running works end with an event, and the next round begins then.
            return Plan()
        self._end_ns = now_ns + round_ns
        return Plan(starts=starts, wake_ns=self._end_ns)

    def _adapted_round_ns(self, tasks: Sequence[Task]) -> int:
        """Return the length chosen last; when request classes change, it is searched again, a piece in each round."""
        self._has_news |= self._remember(tasks)
        self._age += 1
        if self._search is None and self._age >= (_SOONEST if self._has_news else _LATEST):
            self._search = RoundSearch(list(self._budgets.values()), self.margin_ns, self.ends_early)
            self._has_news = False
            self._age = 0
        if self._search is not None:
            self._search.proceed()
            if self._search.is_over or not self._chosen_ns:
                self._chosen_ns = self._search.best_ns()
            if self._search.is_over:
                self._search = None
        return self._chosen_ns

    def _remember(self, tasks: Sequence[Task]) -> bool:
        """Keep the classes seen last, each with its mean budget of late; returns whether one is new or changed."""
        is_news = False
        for task in tasks:
            request = task.job.request
            key = cost_key(request)
            old = self._budgets.get(key)
            is_changed = old is None or _differ(old.speeds, task.speeds)
            if not task.num_steps or (task.job.last_devices and not is_changed):
                continue
            budget_ns = self.urgency_ns(request, False) - request.arrival_ns - task.head_ns - task.tail_ns
            if old is not None:
                budget_ns = old.budget_ns + (budget_ns - old.budget_ns) // 8
            is_news |= is_changed
            self._budgets.pop(key, None)
            speeds = task.speeds if old is None or is_changed else old.speeds
            self._budgets[key] = ClassBudget(speeds, request.steps, budget_ns)
        while len(self._budgets) > _MOST_CLASSES:
            del self._budgets[next(iter(self._budgets))]
        return is_news


def _differ(old: Sequence[Speed], new: Sequence[Speed]) -> bool:
    """Return whether to search the length of a round again: other degrees, or steps that changed by more than 1%."""
    if len(old) != len(new):
        return True
    return any(abs(one.step_ns - other.step_ns) > 0.01 * one.step_ns for one, other in zip(old, new, strict=True))


def _is_idle(view: ClusterView) -> bool:
    return not any(device.works for device in view.devices)


def _is_abandoned(view: ClusterView) -> bool:
    """Return whether all devices are idle, and no waiting job has its state on some of them."""
    return _is_idle(view) and not any(job.last_devices for job in view.waiting())
