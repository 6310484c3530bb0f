"""The decision of the node manager, which nodes go to which set, without any clock or registry.

Theory of operation. A node that is for no set goes to one that has a place: to the set that it works for already, else
to one that has too few nodes, then to the busiest. If nodes are still lacking, sets that have more than they need give
them up at once. After a window the rule of OnePiece (`policy.placement.utilisation`, §8.2) says which set is too busy,
and which others can give it nodes. A set gives its least used nodes.

Source: OnePiece §8.2, "both within and across workflow sets": there instances change their stage, here nodes change
their set. Departures: a set keeps its `least_nodes`; it gets no more nodes than it has places; a set that was not
measured for a whole window, or was away in it, takes no part; nodes that were started for one server stay there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tilework.core.time import NS_PER_S
from tilework.policy.placement.utilisation import Use, UtilisationRule
from tilework.sets.records import AgentRecord, Route, SetRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change of a node to another set. `is_taken`: it is taken from a set that can spare it."""

    agent: str
    set: str
    why: str
    is_taken: bool = False


def moves(
    sets: Mapping[str, SetRecord],
    agents: Mapping[str, AgentRecord],
    routes: Mapping[str, Route],
    rule: UtilisationRule,
    *,
    steady: Collection[str] = (),
    new: Collection[str] = (),
    gone: Collection[str] = (),
) -> list[Move]:
    """Return the moves to make now. Ties go to the first name.

    Loads count only for `steady` sets: those that were there for a window in which no node was taken. No node is taken
    from others for a `new` set: it may have come back, and so will its nodes. A node whose set is missing waits for it,
    since a server may be restarted, or cut off from the registry alone. The node is free once that set is `gone`: away
    for a window.
    """
    placed = {name: routes[name].set for name in sorted(agents) if name in routes and routes[name].set in sets}
    homes = {
        name: routes[name].set if name in routes else agents[name].set for name in sorted(agents) if name not in placed
    }
    free = {name: home for name, home in homes.items() if home is None or home in sets or home in gone}
    nums = Counter(placed.values())
    for name, one in sets.items():
        nums[name] += len(set(one.nodes) - set(agents))  # Nodes that follow no route.
    found = _place(sets, free, nums)
    found += _supply(sets, placed, nums, new)
    return found or _rebalance(sets, placed, nums, rule, steady)


def _place(sets: Mapping[str, SetRecord], free: Mapping[str, str | None], nums: Counter[str]) -> list[Move]:
    """Move each free node to a set, while there are places: to the set that it works for already, else by need.

    Nodes that work for a set come first, so that no other node takes their places.
    """
    found = []
    for agent in sorted(free, key=lambda one: (free[one] not in sets, one)):
        room = {name: one for name, one in sets.items() if nums[name] < one.most_nodes}
        own = free[agent]
        if own is not None and own in room:
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


def _supply(
    sets: Mapping[str, SetRecord], placed: Mapping[str, str], nums: Counter[str], new: Collection[str]
) -> list[Move]:
    """Move nodes to sets that lack some and are not new: the least used ones of sets that have more than their least.

    A giving set keeps its least, and a receiving set gets no more than its least: so no node goes back.
    """
    found: list[Move] = []
    for name in sorted(set(sets).difference(new)):
        while nums[name] < min(sets[name].least_nodes, sets[name].most_nodes):
            gone = {one.agent for one in found}
            spare = [
                (sets[giver].nodes.get(agent, 0.0), agent)
                for agent, giver in placed.items()
                if agent not in gone and nums[giver] > max(1, sets[giver].least_nodes)
            ]
            if not spare:
                break
            agent = min(spare)[1]
            giver = placed[agent]
            why = f"{name} lacks nodes, and {giver} has more than its least"
            found.append(Move(agent=agent, set=name, why=why, is_taken=True))
            nums[giver] -= 1
            nums[name] += 1
    return found


def _rebalance(
    sets: Mapping[str, SetRecord],
    placed: Mapping[str, str],
    nums: Mapping[str, int],
    rule: UtilisationRule,
    steady: Collection[str],
) -> list[Move]:
    """Move little used nodes to the busiest set that has places."""
    uses = {
        name: Use(nums[name], one.share, max(1, one.least_nodes))
        for name, one in sorted(sets.items())
        if one.most_nodes
        and name in steady
        and one.measured_s * NS_PER_S >= rule.window_ns
        # A set that is too busy cannot give nodes: without a free place it takes no part.
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
            found.append(Move(agent=least, set=change.to, why=change.why, is_taken=True))
    return found
