"""Which nodes go to which set: the decision of the node manager, without any clock or registry.

Theory of operation. A node that is for no set goes to one that has a place: first to one that has not enough nodes to
start, then to the busiest. After a window the rule of OnePiece (`policy.placement.utilisation`, §8.2) says which set is
too busy, and which others can give it nodes; of a set that gives, the least used nodes go.

Source: OnePiece §8.2, "both within and across workflow sets": there instances change their stage, here nodes change
their set. Departures: a set keeps its `least_nodes`; it gets no more nodes than it has places; a set that was not
measured for a whole window takes no part; nodes that were started for one server stay there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilework.core.time import NS_PER_S
from tilework.policy.placement.utilisation import Use, UtilisationRule
from tilework.sets.records import AgentRecord, Route, SetRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A node is for another set from now on."""

    agent: str
    set: str
    why: str


def moves(
    sets: Mapping[str, SetRecord],
    agents: Mapping[str, AgentRecord],
    routes: Mapping[str, Route],
    rule: UtilisationRule,
    *,
    is_due: bool,
) -> list[Move]:
    """What to change now. `is_due`: a window has passed since the last change; else only free nodes are placed.

    Ties go to the first name.
    """
    placed = {name: routes[name].set for name in sorted(agents) if name in routes and routes[name].set in sets}
    # A node whose set is gone waits for it: a server may be restarted. It is free when a window has passed.
    away = set(routes) - set(placed)
    free = [name for name in sorted(agents) if name not in placed and (is_due or name not in away)]
    nums = Counter(placed.values())
    for name, one in sets.items():
        nums[name] += len(set(one.nodes) - set(agents))  # Those that follow no route.
    found = _place(sets, agents, free, nums)
    return found or (_rebalance(sets, placed, nums, rule) if is_due else [])


def _place(
    sets: Mapping[str, SetRecord], agents: Mapping[str, AgentRecord], free: Sequence[str], nums: Counter[str]
) -> list[Move]:
    """A set for each free node, as far as there are places: the one that it works for already, else by need."""
    found = []
    for agent in free:
        room = {name: one for name, one in sets.items() if nums[name] < one.most_nodes}
        own = agents[agent].set
        if own in room:
            name, why = own, "it was there"
        elif room:
            name = min(room, key=lambda one: (nums[one] >= room[one].least_nodes, -room[one].share, one))
            lacks = nums[name] < room[name].least_nodes
            why = f"{name} lacks nodes" if lacks else f"it was free, and {name} was busy for {room[name].share:.0%}"
        else:
            break
        nums[name] += 1
        found.append(Move(agent=agent, set=name, why=why))
    return found


def _rebalance(
    sets: Mapping[str, SetRecord], placed: Mapping[str, str], nums: Mapping[str, int], rule: UtilisationRule
) -> list[Move]:
    """Nodes for the busiest set that has places, from those that are little used."""
    uses = {
        name: Use(nums[name], one.share, max(1, one.least_nodes))
        for name, one in sorted(sets.items())
        if one.most_nodes
        and one.measured_s * NS_PER_S >= rule.window_ns
        # One that is too busy can give none: without a place it takes no part.
        and (one.share <= rule.threshold or nums[name] < one.most_nodes)
    }
    change = rule.reassignment(uses, 0)
    if change is None:
        return []
    found: list[Move] = []
    for giver in change.givers[: sets[change.to].most_nodes - nums[change.to]]:
        assert giver is not None, "no node is idle"
        gone = {one.agent for one in found}
        nodes = [name for name, where in placed.items() if where == giver and name not in gone]
        if nodes:
            least = min(nodes, key=lambda name: (sets[giver].nodes.get(name, 0.0), name))
            found.append(Move(agent=least, set=change.to, why=change.why))
    return found
