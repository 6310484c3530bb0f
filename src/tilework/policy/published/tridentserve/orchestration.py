"""The occasions on which the placement changes: the first one, a new mix or balance, and devices that come and go.

Theory of operation. Until the first placement, all stages are on each device. The first one is derived when 32 requests
were seen, or a quarter of a window after the first; at once from a declared mix. Then a tick, twelve times in a window,
asks `SwitchRule`; a new placement is taken if it `is_worthwhile`. Ticks are looked at when the policy is asked, and it
has itself woken for them while requests wait, unless all devices hold all stages. Profiles are made anew at each tick.

Two things do not wait for a tick, and do not count as a switch: devices that join or are lost, and a request that can
run nowhere as devices are placed. Otherwise a size that comes seldom would wait until the next switch.

Nothing moves with a new placement: devices load what their next start needs. With `downtime_ns`, devices that change
after the first placement get no start for that long, as if they were stopped and loaded anew (§8.4, "downtime").

Source: TridentServe §5.3 and §8.4. What starts the first placement, ticks and both exceptions are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tilework.core.policy import ClusterView, CostModel, DeviceView
from tilework.core.request import Request, RequestClass, cost_key
from tilework.core.work import NewPlacement
from tilework.policy.placement.demand import By
from tilework.policy.placement.feasible import virtual_replica
from tilework.policy.placement.placement import widest
from tilework.policy.placement.roles import PlacementType
from tilework.policy.placement.switching import SwitchRule, WindowStats, is_worthwhile
from tilework.policy.published.tridentserve.division import Divider, Division, demands_by_part, mixes_of, shares_of
from tilework.policy.published.tridentserve.layout import SHARED, Pool, PoolLayout
from tilework.policy.published.tridentserve.monitor import Monitor
from tilework.policy.published.tridentserve.ways import Profiles
from tilework.policy.toolkit.order import by_urgency
from tilework.policy.toolkit.tasks import Task
from tilework.policy.traits import PlacementStatus

_FIRST_REQUESTS = 32
_FIRST_PER_WINDOW = 4
_TICKS_PER_WINDOW = 12
_NO_DEVICES: Sequence[DeviceView] = ()


@dataclass(slots=True, kw_only=True)
class Orchestration:
    """The present layout, and what decides on the next one.

    Attributes:
        switches: whether the placement is derived again after the first one, where it is not for devices or requests
            that can run nowhere.
        downtime_ns: for how long devices that change are closed.
        declared: the mix for the first placement, if it is known: requests, each with its share.
        by, theta, reading: see `placement.orchestrator` and `placement.switching`.
    """

    switches: bool = True
    downtime_ns: int = 0
    declared: Sequence[tuple[Request, float]] = ()
    by: By = "device_time"
    theta: float = 1.5
    reading: Literal["capacity", "completions"] = "capacity"
    layout: PoolLayout = field(init=False, default_factory=lambda: PoolLayout.colocated({}))
    monitor: Monitor = field(init=False, default_factory=Monitor)
    profiles: Profiles = field(init=False, default_factory=Profiles)
    _devices: Sequence[DeviceView] = field(init=False, default=_NO_DEVICES)
    _now: Division | None = field(init=False, default=None)
    _switched_ns: int | None = field(init=False, default=None)
    _ticked_ns: int = field(init=False, default=0)
    _tried: set[RequestClass] = field(init=False, default_factory=set)
    _closed: dict[int, int] = field(init=False, default_factory=dict)
    _news: NewPlacement | None = field(init=False, default=None)
    _has_stuck: bool = field(init=False, default=False)
    _latest: tuple[CostModel, Sequence[Task]] | None = field(init=False, default=None)
    _checked: tuple[int, PoolLayout, int] | None = field(init=False, default=None)
    _nowhere: set[RequestClass] = field(init=False, default_factory=set)  # Classes that can run nowhere now.

    def closed(self, now_ns: int) -> Collection[int]:
        """Return the devices that get no start now."""
        self._closed = {one: until_ns for one, until_ns in self._closed.items() if until_ns > now_ns}
        return self._closed.keys()

    def take_news(self) -> NewPlacement | None:
        """Return the new placement that no plan has told yet; None if there is none."""
        news, self._news = self._news, None
        return news

    def status(self, now_ns: int) -> list[PlacementStatus]:
        """Return what the monitor counts for each pool, with the tasks of the latest update.

        Their profiles are known.
        """
        if self._latest is None:
            return []
        return [
            PlacementStatus(
                name=self.layout.name_of(Pool(part, kind)),
                num_devices=stats.replicas,
                window_ns=self.monitor.window_ns,
                completions=stats.completions,
                busy_ns=stats.busy_ns,
                backlog=stats.backlog,
            )
            for part in sorted(self.layout.parts)
            for kind, stats in self._stats(part, *self._latest, now_ns).items()
        ]

    def wake_ns(self, has_tasks: bool, now_ns: int) -> int | None:
        """Return when to look again if nothing happens until then; None if only an event can change anything.

        `has_tasks`: something is left to start.
        """
        times = list(self._closed.values())
        if has_tasks and self._switched_ns is None and self.monitor.first_ns is not None:
            times.append(self._first_due_ns(self.monitor.first_ns))
        if has_tasks and (self._has_stuck or not self.layout.is_colocated):
            times.append(self._ticked_ns + self.monitor.window_ns // _TICKS_PER_WINDOW)
        return min((at_ns for at_ns in times if at_ns > now_ns), default=None)

    def forget(self, pipeline: str) -> None:
        """Forget a pipeline, which is served no more. If devices are its own, they are divided anew."""
        self.monitor.forget_pipeline(pipeline)
        self.profiles.forget()
        self._latest = self._checked = None
        for classes in (self._tried, self._nowhere):
            classes -= {key for key in classes if key.step.pipeline == pipeline}
        if pipeline in self.layout.parts:
            self.layout = PoolLayout.colocated(self.layout.rows)
            self._now = None
            self._switched_ns = None

    def widest_node(self) -> int:
        """Return the most devices of a node."""
        return widest(self.layout.rows)

    def update(self, view: ClusterView, costs: CostModel, tasks: Sequence[Task], now_ns: int) -> None:
        """Look at what has changed, and derive a new layout if that is due. `tasks` are all that wait, and others.

        Raises UnknownCost.
        """
        have_changed = self._note_devices(view)
        if have_changed:
            self.monitor.forget_unknown(costs)  # Profiles may have to be made anew.
        self._latest = costs, tasks
        self.monitor.see(view, tasks, now_ns)
        if have_changed and self._now is not None:
            self._derive(costs, "devices have joined or were lost", self._left_to_start(view, tasks), now_ns)
        elif self._is_first_due(now_ns):
            self.monitor.forget_unknown(costs)
            self.monitor.set_window(self.profiles, costs)
            num = "the declared mix" if self.declared else f"{self.monitor.num_seen} requests"
            self._derive(costs, f"the first placement, for {num}", self._left_to_start(view, tasks), now_ns)
            self._ticked_ns = self._switched_ns = now_ns
        elif now_ns >= self._ticked_ns + self.monitor.window_ns // _TICKS_PER_WINDOW:
            self._tick(view, costs, tasks, now_ns)
        if (stuck := self._stuck(view, costs, tasks)) is not None:
            why = f"a request of {stuck.shape} can run nowhere"
            self._derive(costs, why, self._left_to_start(view, tasks), now_ns)

    def _note_devices(self, view: ClusterView) -> bool:
        if self._devices is view.devices:
            return False
        self._devices = view.devices
        rows: dict[int, list[int]] = {}
        for device in view.devices:
            rows.setdefault(device.pool, []).append(device.device_id)
        limits = [one.memory.total_bytes for one in view.devices if one.memory.total_bytes is not None]
        self.profiles.set_devices(min(limits, default=None), map(len, rows.values()))
        if self._now is None:
            self.layout = PoolLayout.colocated(rows)
        else:
            pools = {one.device_id: self.layout.pool_of(one.device_id) for one in view.devices}
            self.layout = PoolLayout(rows, {one: pool for one, pool in pools.items() if pool is not None})
        return True

    # The occasions.

    def _first_due_ns(self, first_ns: int) -> int:
        return first_ns + self.monitor.window_ns // _FIRST_PER_WINDOW

    def _is_first_due(self, now_ns: int) -> bool:
        if self._switched_ns is not None or (first_ns := self.monitor.first_ns) is None:
            return False
        is_seen = self.monitor.num_seen >= _FIRST_REQUESTS or now_ns >= self._first_due_ns(first_ns)
        return bool(self.declared) or is_seen

    def _stuck(self, view: ClusterView, costs: CostModel, tasks: Sequence[Task]) -> Request | None:
        """Return a request that can run nowhere, although it fits on some placement, of a class not tried since a tick.

        Jobs are looked at only if there is such a class in the window, and classes only if they, the layout or the
        profiles have changed.
        """
        state = self.monitor.num_classes_seen, self.layout, self.profiles.version
        if self._checked != state:
            self._checked = state
            self.monitor.forget_unknown(costs)
            classes = self.monitor.classes().items()
            self._nowhere = {key for key, (one, _) in classes if not self._can_run(one, costs)}
        self._has_stuck = False
        if not self._nowhere:
            return None
        found = None
        for request in self._left_to_start(view, tasks):
            if (key := cost_key(request)) in self._nowhere:
                self._has_stuck = True
                fits = self.profiles.of(request, costs).fits
                if key not in self._tried and virtual_replica(fits, self.widest_node()) is not None:
                    found = found or request
        return found

    def _left_to_start(self, view: ClusterView, tasks: Sequence[Task]) -> list[Request]:
        """Return the requests of the window of which something is left to start, the most urgent first."""
        jobs = {job.job_id: job for job in (*(task.job for task in tasks), *self.monitor.running(view))}
        return [job.request for job in sorted(jobs.values(), key=by_urgency)]

    def _can_run(self, request: Request, costs: CostModel) -> bool:
        return bool(self.layout.replicas(request.pipeline, self.profiles.of(request, costs).fits))

    def _tick(self, view: ClusterView, costs: CostModel, tasks: Sequence[Task], now_ns: int) -> None:
        self._ticked_ns = now_ns
        self._tried.clear()
        self.monitor.forget(now_ns)
        self.monitor.forget_unknown(costs)
        self.profiles.forget()
        self.monitor.set_window(self.profiles, costs)
        if self.switches and self._switched_ns is not None:
            reason = self._reason(costs, tasks, now_ns, now_ns - self._switched_ns)
            if reason is not None:
                self._derive(costs, reason, self._left_to_start(view, tasks), now_ns, is_switch=True)

    def _reason(self, costs: CostModel, tasks: Sequence[Task], now_ns: int, since_ns: int) -> str | None:
        assert self._now is not None
        rule = SwitchRule(window_ns=self.monitor.window_ns, theta=self.theta, reading=self.reading)
        wide = self.widest_node()
        demands = demands_by_part(tuple(self.monitor.classes().values()), self.profiles, costs, wide)
        if since_ns < rule.window_ns or not demands:
            return None
        shares, mixes = shares_of(demands), mixes_of(demands, wide, self.by)
        for part in sorted(shares.keys() | self._now.shares.keys()):
            before, now = self._now.shares.get(part, 0.0), shares.get(part, 0.0)
            if abs(now - before) >= rule.mix_change:
                return f"the share of {part or 'the other pipelines'} went from {before:.0%} to {now:.0%}"
            if part in mixes and part in self._now.mixes:
                self.monitor.forget(now_ns, rule.window_ns)
                stats = self._stats(part, costs, tasks, now_ns)
                if reason := rule.reason(stats, self._now.mixes[part], mixes[part], since_ns):
                    return reason
        return None

    def _stats(
        self, part: str, costs: CostModel, tasks: Sequence[Task], now_ns: int
    ) -> dict[PlacementType, WindowStats]:
        return self.monitor.stats(part, self.layout, self._backlog(part, costs, tasks), now_ns)

    def _backlog(self, part: str, costs: CostModel, tasks: Sequence[Task]) -> Mapping[PlacementType, int]:
        """Return how many requests wait for the primary of their V*."""
        found = Counter[PlacementType]()
        wide = self.widest_node()
        for task in tasks:
            if task.job.works or task.job.left.num_steps_done:
                continue
            replica = virtual_replica(self.profiles.of(task.job.request, costs).fits, wide)
            if replica is not None and self.layout.part_of(task.job.request.pipeline) == part:
                found[replica.primary] += 1
        return found

    # The next layout.

    def _derive(
        self, costs: CostModel, reason: str, waiting: Sequence[Request], now_ns: int, *, is_switch: bool = False
    ) -> None:
        """Derive a layout; a switch is made only if it is worthwhile. `waiting` are requests by urgency."""
        classes = self.monitor.classes()
        known: Sequence[tuple[Request, float]] = tuple(classes.values())
        if self.declared and self._now is None:
            known = self.declared
        turns = tuple(dict.fromkeys(map(cost_key, waiting)))
        division = Divider(profiles=self.profiles, costs=costs, before=self.layout, by=self.by).divide(known, turns)
        if is_switch:
            if not self._is_worthwhile(division):
                return
            self._switched_ns = now_ns
        self._tried = set(classes)
        changed = division.layout.changed(self.layout)
        has_changed = bool(changed) or division.layout.groups() != self.layout.groups()
        if self._switched_ns is not None and self.downtime_ns:
            self._closed |= dict.fromkeys(changed, now_ns + self.downtime_ns)
        self._now = division
        self.layout = division.layout
        if has_changed:
            why = "; ".join((reason, *division.reasons))
            self._news = NewPlacement(groups=self.layout.groups(), why=why)

    def _is_worthwhile(self, division: Division) -> bool:
        """Return whether a node changes, or devices go from one part to another."""
        before, after = self.layout, division.layout
        if before.parts != after.parts:
            return True
        moved = set(after.changed(before))
        for part in after.parts:
            was, will = before.placement_of(part), after.placement_of(part)
            if {one for one, _ in was.types} != {one for one, _ in will.types}:
                return True
            own = {node: [one for one in row if will.of(one) is not None] for node, row in before.rows.items()}
            if part != SHARED and moved and is_worthwhile(was, will, {node: row for node, row in own.items() if row}):
                return True
        return False
