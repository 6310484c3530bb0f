"""The node manager: one of the servers of a registry, which decides which set each agent works for.

The servers try to own the key `leader`; the revision at which one takes it is its epoch. Its routes are written only
while it owns the key (`Guard`), so a leader that was replaced and does not know it yet changes nothing.

After a registry was silent, leases have ended, and records come back one after another. So the node manager decides
nothing until the registry has answered without a gap for `STEADY_S`: in that time all live members have written again.
The same holds for a single set that was away. A gap also restarts windows: measurements from before it take no node
from a set, and a set that was away in it has not given up its nodes.

Source: OnePiece §8.1, which elects by Paxos; here etcd does that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tilework.core.time import s_from_ns
from tilework.policy.placement.utilisation import UtilisationRule
from tilework.sets.chores import kept_alive
from tilework.sets.directory import Directory
from tilework.sets.manager import Move, moves
from tilework.sets.member import KeyOwner
from tilework.sets.presence import Presence
from tilework.sets.records import LEADER, ROUTES, SETS, LeaderRecord, Route, encoded
from tilework.sets.registry import Guard, Registry, RegistryLost

_log = logging.getLogger(__name__)
TTL_S = 4
STEADY_S = 12.0  # Longer than any lease, and than a member needs to wait for an answer, try again and register.
_RETRY_S = 0.5  # A follower tries this often to become the leader.
_BEAT_S = 0.5


class NodeManager:
    """The node manager of the server of the set `own`. It decides by `rule` while it leads."""

    def __init__(self, registry: Registry, directory: Directory, own: str, rule: UtilisationRule) -> None:
        self._registry = registry
        self._directory = directory
        self._rule = rule
        self._own = own
        record = encoded(LeaderRecord(set=own))
        self._member = KeyOwner(registry, LEADER, lambda _lease: record, ttl_s=TTL_S, retry_s=_RETRY_S)
        self._epoch: int | None = None
        self._changed_s = 0.0  # The time when nodes were last taken from a set, or this server began to lead.
        self._presence = Presence()
        self._written: dict[str, tuple[int, int]] = {}  # By agent: the lease and the revision of its newest route.

    async def run(self) -> None:
        """Lead whenever no other server does, until cancelled."""
        leading = asyncio.create_task(kept_alive("the lead over the sets", self._member.run))
        try:
            while True:
                try:
                    await self._decide()
                except RegistryLost as error:
                    _log.warning("the node manager cannot write: %s", error)
                await asyncio.sleep(_BEAT_S)
        finally:
            leading.cancel()
            await asyncio.wait({leading})

    async def _decide(self) -> None:
        """Make the changes that are due, if this server leads, and the copy shows that and all its earlier changes."""
        epoch = self._member.created
        directory = self._directory
        now_s = asyncio.get_running_loop().time()
        if epoch != self._epoch or not directory.is_current:
            self._epoch = epoch
            self._changed_s = now_s
            self._presence.clear()
            self._written.clear()
        if epoch is None or not self._leads(epoch) or not all(self._knows(agent) for agent in self._written):
            return
        homes = (*(one.set for one in directory.routes.values()), *(one.set for one in directory.agents.values()))
        created = {name: directory.entries[SETS + name].created for name in directory.sets}
        self._presence.see(created, [one for one in homes if one is not None], now_s)
        if directory.current_for_s < STEADY_S:
            return
        presence = self._presence
        window_s = s_from_ns(self._rule.window_ns)
        due = moves(
            directory.sets,
            directory.agents,
            directory.routes,
            self._rule,
            steady=presence.steady(now_s, window_s) if now_s - self._changed_s >= window_s else (),
            new=directory.sets.keys() - presence.steady(now_s, STEADY_S),
            gone=presence.gone(now_s, window_s),
        )
        if any(move.is_taken for move in due):
            self._changed_s = now_s
        await self._write(due, epoch)

    def _leads(self, epoch: int) -> bool:
        """Return whether this server is the leader of this epoch, according to the copy."""
        directory = self._directory
        leader = directory.leader
        is_own = leader is not None and leader.set == self._own
        return is_own and directory.leader_epoch == epoch and directory.is_current

    def _knows(self, agent: str) -> bool:
        """Return whether the copy has the route that was written for an agent, or the agent's lease has ended."""
        lease, revision = self._written[agent]
        record = self._directory.agents.get(agent)
        route = self._directory.entries.get(ROUTES + agent)
        return record is None or record.lease != lease or (route is not None and route.changed >= revision)

    async def _write(self, due: Sequence[Move], epoch: int) -> None:
        """Write routes. Raises RegistryLost."""
        for move in due:
            agent = self._directory.agents.get(move.agent)
            if agent is None:
                continue
            route = encoded(Route(set=move.set, epoch=epoch, why=move.why))
            revision = await self._registry.put(ROUTES + move.agent, route, agent.lease, Guard(LEADER, epoch))
            if revision is None:
                return  # Another server leads, or the agent is gone.
            self._written[move.agent] = agent.lease, revision
            _log.warning("%s goes to set %s: %s", move.agent, move.set, move.why)
