"""The node manager: one of the servers of a registry, which says which set each agent is for.

The servers try to own the key `leader`; the revision at which one has is its epoch. Its routes are written only while
that holds (`Guard`), so one that was replaced, and does not know it yet, changes nothing.

Source: OnePiece §8.1, which elects by Paxos; here etcd does that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tilework.core.time import s_from_ns
from tilework.policy.placement.utilisation import UtilisationRule
from tilework.sets.directory import Directory
from tilework.sets.manager import Move, moves
from tilework.sets.member import Member
from tilework.sets.records import LEADER, ROUTES, LeaderRecord, Route, encoded
from tilework.sets.registry import Guard, Registry, RegistryLost

_log = logging.getLogger(__name__)
TTL_S = 3
_RETRY_S = 0.5  # How often a follower tries to become the leader.
_BEAT_S = 0.5


class NodeManager:
    """Of the server of the set `own`. It decides by `rule` while it leads."""

    def __init__(self, registry: Registry, directory: Directory, own: str, rule: UtilisationRule) -> None:
        self._registry, self._directory, self._rule, self._own = registry, directory, rule, own
        record = encoded(LeaderRecord(set=own))
        self._member = Member(registry, LEADER, lambda _lease: record, ttl_s=TTL_S, retry_s=_RETRY_S)
        self._since_s = 0.0
        self._epoch: int | None = None

    async def run(self) -> None:
        """Lead whenever no other does, until cancelled."""
        leading = asyncio.create_task(self._member.run())
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
        """Make the changes that are due, if this is the leader, and the copy knows it."""
        epoch, directory, now_s = self._member.created, self._directory, asyncio.get_running_loop().time()
        if epoch != self._epoch:
            self._epoch, self._since_s = epoch, now_s
            if epoch is not None:
                _log.info("this server is the node manager of all sets, in epoch %d", epoch)
        if epoch is None or not directory.is_current or directory.leader_epoch != epoch:
            return
        is_due = now_s - self._since_s >= s_from_ns(self._rule.window_ns)
        due = moves(directory.sets, directory.agents, directory.routes, self._rule, is_due=is_due)
        if is_due:
            self._since_s = now_s
        await self._write(due, epoch)

    async def _write(self, due: Sequence[Move], epoch: int) -> None:
        """Write routes, and wait until the copy has them: the next decision goes by it."""
        newest = 0
        for move in due:
            agent = self._directory.agents.get(move.agent)
            if agent is None:
                continue
            route = encoded(Route(set=move.set, epoch=epoch, why=move.why))
            revision = await self._registry.put(ROUTES + move.agent, route, agent.lease, Guard(LEADER, epoch))
            if revision is None:
                return  # Another leads, or the agent is gone.
            newest = revision
            _log.warning("%s goes to set %s: %s", move.agent, move.set, move.why)
        await self._directory.until(lambda: self._directory.revision >= newest or None)
