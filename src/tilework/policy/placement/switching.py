"""The rule by which a new placement is derived, and by which it is worth switching to.

Theory of operation. The paper compares the throughput of stages in a sliding window: if the fastest has at least theta
times the slowest, a new plan is derived. But in steady state each stage completes as many requests as come, so equal
throughputs say nothing (the reading `completions`). What differs is the *capacity*: completions per time that a replica
was busy, times replicas. The reading `capacity` compares what was asked of each type, completions and backlog, with
what it could have done in the window. A type without a backlog keeps up, however idle it is, and counts as in balance.

A change of the mix is a second trigger: the next plan would differ although no queue has formed yet. There is at most
one switch per window, so that the window holds what the latest placement did; and none for less than a node, since
every changed device loads weights.

Source: TridentServe §5.3. The window and theta are missing in the text that we have. 1.5 stands for theta, and 5 to 10
mean latencies make a window (60 s for SD3, 120 s for FLUX, 180 s for CogVideoX, 300 s for HunyuanVideo). The reading
`capacity`, the second trigger and the hysteresis are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeVar

from tilework.core.time import s_from_ns
from tilework.policy.placement.demand import Mix
from tilework.policy.placement.placement import Nodes, Placement
from tilework.policy.placement.roles import VirtualReplica

Key = TypeVar("Key", bound=str)
"""A role or a placement type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStats:
    """The work of the replicas of a placement type, or of a role, in the latest window.

    Attributes:
        completions: requests whose stages they ended.
        busy_ns: the busy time of all replicas together.
        replicas: how many there are.
        backlog: requests that wait for them now.
    """

    completions: int
    busy_ns: int
    replicas: int
    backlog: int = 0

    def pressure(self, window_ns: int) -> float:
        """Return what was asked of them per what they could do, 1 if they keep up.

        Where nothing was completed, nothing is known: 1, too, unless requests wait and there is no replica.
        """
        if not self.backlog:
            return 1.0
        if not self.replicas:
            return inf
        if not self.completions or not self.busy_ns:
            return 1.0
        capacity = self.completions / self.busy_ns * self.replicas * window_ns
        return max(1.0, (self.completions + self.backlog) / capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRule:
    """The rule by which a new placement is derived.

    Attributes:
        window_ns: the length of the sliding window, which is also the least time between two switches.
        theta: how far apart the fastest and the slowest may be.
        reading: what is compared; see the module.
        mix_change: the share of the requests (by what budgets go) that must have changed their V* for the second
            trigger. Below a tenth, hardly a node would change.
    """

    window_ns: int
    theta: float = 1.5
    reading: Literal["capacity", "completions"] = "capacity"
    mix_change: float = 0.1

    def reason(
        self, stats: Mapping[Key, WindowStats], mix_before: Mix, mix_now: Mix, since_switch_ns: int
    ) -> str | None:
        """Return why a new placement should be derived, in words; None if none should.

        `stats` is by placement type, or by role, which is the paper's reading. `mix_before` is that of the latest plan
        (`PlacementPlan.mix`), `since_switch_ns` the time since it was made.
        """
        if since_switch_ns < self.window_ns:
            return None
        return self._imbalance(stats) or self._new_mix(mix_before, mix_now)

    def _imbalance(self, stats: Mapping[Key, WindowStats]) -> str | None:
        if len(stats) < 2:
            return None
        over = f"over {s_from_ns(self.window_ns):g} s"
        if self.reading == "completions":
            done = {key: one.completions for key, one in stats.items()}
            fast, slow = max(done, key=done.__getitem__), min(done, key=done.__getitem__)
            is_skewed = done[fast] > done[slow] and done[fast] >= self.theta * done[slow]
            return f"{over}, {fast} completed {done[fast]} and {slow} {done[slow]}" if is_skewed else None
        asked = {key: one.pressure(self.window_ns) for key, one in stats.items()}
        slow, fast = max(asked, key=asked.__getitem__), min(asked, key=asked.__getitem__)
        if asked[slow] < self.theta * asked[fast] or asked[slow] == asked[fast]:
            return None
        return f"{over}, {slow} was asked for {asked[slow]:.2f} times what it can do, and {fast} for {asked[fast]:.2f}"

    def _new_mix(self, before: Mix, now: Mix) -> str | None:
        """Return the change of the mix in words.

        Half of the sum of all changes of shares is the share of requests that changed.
        """
        changes = {one: now.get(one, 0.0) - before.get(one, 0.0) for one in VirtualReplica}
        if not now or sum(map(abs, changes.values())) / 2 < self.mix_change:
            return None
        most = max(changes, key=lambda one: abs(changes[one]))
        return f"the share of {most} went from {before.get(most, 0):.0%} to {now.get(most, 0):.0%}"


def is_worthwhile(before: Placement, after: Placement, nodes: Nodes) -> bool:
    """Return whether every device of at least one node changes its type.

    Of a single node, always mixed, any change counts.

    Devices that are in one placement only, as when a node was lost, count as changed.
    """
    rows = [[before.of(device_id) is not after.of(device_id) for device_id in row] for row in nodes.values() if row]
    return any(map(any if len(rows) == 1 else all, rows))
