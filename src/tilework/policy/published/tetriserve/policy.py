"""TetriServe: the degree of a request is chosen anew in every round, as low as its deadline allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tilework.core.interfaces import ClusterView, CostModel
from tilework.core.request import Shape
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.policy.published.tetriserve.round_plan import RoundPlan
from tilework.policy.published.tetriserve.rounds import Kind, RoundSearch
from tilework.policy.registry import policy
from tilework.policy.toolkit.demand import Speed
from tilework.policy.toolkit.elastic import Elastic
from tilework.policy.toolkit.order import doom
from tilework.policy.toolkit.tasks import Task, tasks_at_hand

_MOST_KINDS = 8
# Rounds after which their length is thought over, with news of the requests and without.
_SOONEST, _LATEST = 4, 256


@policy("tetriserve")
@dataclass(slots=True, kw_only=True)
class TetriServe(Elastic):
    """Plan in rounds: everything that runs in one is decided at its beginning (see `RoundPlan`).

    A round that nobody of is left to wait for its end is over when an arrival finds all devices idle. The length of
    a round follows from the requests seen lately (see `RoundSearch`), unless `round_ns` fixes it. At the end of
    each round, `margin_ns` is left free: what dispatch, moves and small delays take must not push steps over it.
    With `ends_early` a round is over as soon as all its work is done, which spares the tails of rounds in which few
    jobs ran; over many devices somebody is nearly always at work, and little changes.

    Jobs that cannot be on time any more, even at full speed from now on, are set aside; they and jobs without a
    deadline are served by the patience of `DeadlineOrder`.

    Source: TetriServe §4.2. Departures: encode and decode are charged; what a step costs includes its share of the
    tail that whole steps leave in a round.
    """

    round_ns: int | None = None
    ends_early: bool = False
    margin_ns: int = 10 * NS_PER_MS
    _end_ns: int = field(default=0, init=False)
    _chosen_ns: int = field(default=0, init=False)
    _age: int = field(default=_LATEST, init=False)
    _search: RoundSearch | None = field(default=None, init=False)
    _has_news: bool = field(default=False, init=False)
    _kinds: dict[tuple[str, Shape, int, bool, int], Kind] = field(default_factory=dict, init=False)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        is_over = now_ns >= self._end_ns or _is_deserted(view) or (self.ends_early and _is_idle(view))
        if not is_over:
            return Plan(wake_ns=self._end_ns)
        tasks = tasks_at_hand(view, costs, now_ns)
        doomed = tuple(
            (task.job.job_id, why) for task in tasks if (why := doom(task.job, task.earliest_ns)) is not None
        )
        if doomed:
            return Plan(dropped_to_best_effort=doomed)
        round_ns = self.round_ns or self._adapted_round_ns(tasks)
        starts = RoundPlan(view, costs, tasks, now_ns, round_ns, self.margin_ns).starts()
        if not starts:  # Whatever is still running ends with an event, and the next round begins then.
            return Plan()
        self._end_ns = now_ns + round_ns
        return Plan(starts=starts, wake_ns=self._end_ns)

    def _adapted_round_ns(self, tasks: Sequence[Task]) -> int:
        """The length chosen last; thought over when there is news, a little in each of the next rounds."""
        self._has_news |= self._remember(tasks)
        self._age += 1
        if self._search is None and self._age >= (_SOONEST if self._has_news else _LATEST):
            self._search = RoundSearch(list(self._kinds.values()), self.margin_ns)
            self._has_news, self._age = False, 0
        if self._search is not None:
            self._search.proceed()
            if self._search.is_over or not self._chosen_ns:
                self._chosen_ns = self._search.best_ns()
            if self._search.is_over:
                self._search = None
        return self._chosen_ns

    def _remember(self, tasks: Sequence[Task]) -> bool:
        """Keep the kinds seen last, each with the mean of its latest budgets; returns whether one is new or changed."""
        is_news = False
        for task in tasks:
            request = task.job.request
            key = (request.pipeline, request.shape, request.steps, request.guided, request.preview_every)
            old = self._kinds.get(key)
            is_changed = old is None or _differ(old.speeds, task.speeds)
            if not task.num_steps or (task.job.last_devices and not is_changed):
                continue
            budget_ns = self.urgency_ns(request, False) - request.arrival_ns - task.encode_ns - task.decode_ns
            if old is not None:
                budget_ns = old.budget_ns + (budget_ns - old.budget_ns) // 8
            is_news |= is_changed
            self._kinds.pop(key, None)
            self._kinds[key] = Kind(task.speeds if old is None or is_changed else old.speeds, request.steps, budget_ns)
        while len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return is_news


def _differ(old: Sequence[Speed], new: Sequence[Speed]) -> bool:
    """Whether the length of a round should be thought over: other degrees, or steps that changed by more than 1%."""
    if len(old) != len(new):
        return True
    return any(abs(one.step_ns - other.step_ns) > 0.01 * one.step_ns for one, other in zip(old, new, strict=True))


def _is_idle(view: ClusterView) -> bool:
    return not any(device.works for device in view.devices)


def _is_deserted(view: ClusterView) -> bool:
    """Whether all devices are idle and nobody waits for the end of the round who has a state on some."""
    return _is_idle(view) and not any(job.last_devices for job in view.waiting())


policy("tetriserve-early")(partial(TetriServe, ends_early=True))
