"""Members, the leader and agents over a registry in this process, whose clock the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

import clock
from clock import ManualLoop
from sets.records import a_set
from tilework.core.time import NS_PER_S
from tilework.policy.placement.utilisation import UtilisationRule
from tilework.sets.address import open_registry
from tilework.sets.directory import Directory
from tilework.sets.leader import STEADY_S, NodeManager
from tilework.sets.local import LocalRegistry
from tilework.sets.member import TTL_S, KeyOwner
from tilework.sets.records import AGENTS, LEADER, ROUTES, SETS, AgentRecord, Route, SetRecord, decoded, encoded
from tilework.sets.registry import BadRegistry, Guard, RegistryLost
from tilework.sets.routing import RoutedAgent, Serve

RULE = UtilisationRule(window_ns=30 * NS_PER_S)


@asynccontextmanager
async def beside(*chores: Awaitable[None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.ensure_future(one) for one in chores]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def passes(loop: ManualLoop, seconds: float, step_s: float = 0.25) -> None:
    """Let time pass in steps, so that all timers run at their time."""
    for _ in range(int(seconds / step_s)):
        loop.advance(step_s)
        await loop.until_idle()


def keep(registry: LocalRegistry, name: str, record: SetRecord) -> KeyOwner:
    return KeyOwner(registry, SETS + name, lambda _lease: encoded(record))


def test_a_record_ends_with_its_owner() -> None:
    async def scenario(loop: ManualLoop) -> None:
        registry = LocalRegistry()
        directory = Directory(registry)
        async with beside(directory.follow()):
            async with beside(keep(registry, "a", a_set()).run()):
                await loop.until(lambda: directory.sets == {"a": a_set()})
                await passes(loop, 3 * TTL_S)
                assert directory.sets
            await loop.until(lambda: not directory.sets)

    clock.run(scenario)


def test_a_name_that_is_taken_is_taken_over_when_its_owner_has_died(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: ManualLoop) -> None:
        registry = LocalRegistry()
        lease = await registry.grant(TTL_S)  # Of one that died: it is never renewed.
        assert await registry.create("sets/a", b"other", lease)
        member = KeyOwner(registry, "sets/a", lambda _lease: b"mine", taken="a is taken")
        async with beside(member.run()):
            await passes(loop, TTL_S - 0.5)
            assert member.created is None
            await passes(loop, 2.0)
            assert member.created is not None

    clock.run(scenario)
    assert [one.message for one in caplog.records] == ["a is taken"]


def test_a_guarded_write_fails_once_the_key_has_another_owner() -> None:
    async def scenario(_loop: ManualLoop) -> None:
        registry = LocalRegistry()
        lease, other = await registry.grant(TTL_S), await registry.grant(TTL_S)
        epoch = await registry.create(LEADER, b"", lease)
        assert epoch is not None
        assert await registry.create(LEADER, b"", other) is None
        assert await registry.put("routes/x", b"1", other, Guard(LEADER, epoch))
        await registry.revoke(lease)
        newer = await registry.create(LEADER, b"", other)
        assert newer is not None
        assert newer > epoch
        assert await registry.put("routes/x", b"2", other, Guard(LEADER, epoch)) is None

    clock.run(scenario)


class Cut(LocalRegistry):
    """A registry that can be lost."""

    is_lost = False

    async def renew(self, lease: int) -> bool:
        if self.is_lost:
            raise RegistryLost("no address answers")
        return await super().renew(lease)


def test_a_member_returns_when_the_registry_does() -> None:
    async def scenario(loop: ManualLoop) -> None:
        registry = Cut()
        member = KeyOwner(registry, "sets/a", lambda _lease: b"")
        async with beside(member.run()):
            await loop.until(lambda: member.created)
            registry.is_lost = True
            await passes(loop, 2 * TTL_S)
            assert member.created is None
            registry.is_lost = False
            await passes(loop, 2.0)
            assert member.created is not None

    clock.run(scenario)


def test_the_alternate_is_the_open_set_that_would_begin_first() -> None:
    directory = Directory(LocalRegistry())
    directory.sets = {
        "a": a_set(start_in_s=0.0),
        "b": a_set(start_in_s=2.0, url="http://b"),
        "c": a_set(start_in_s=1.0, url="http://c"),
        "d": a_set(start_in_s=0.5, is_open=False),
        "e": a_set(start_in_s=0.5, models=("other",)),
        "f": a_set(start_in_s=0.5, devices_up=0),
    }
    assert directory.alternate("m", "a", 9.0) is None  # The copy may be old.
    directory.is_current = True
    assert directory.alternate("m", "a", 9.0) is directory.sets["c"]
    assert directory.alternate("m", "a", 1.0) is None
    assert directory.alternate("none", "a", 9.0) is None


def test_another_leads_when_the_leader_dies() -> None:
    async def scenario(loop: ManualLoop) -> None:
        registry = LocalRegistry()
        directory = Directory(registry)
        first, second = (NodeManager(registry, Directory(registry), name, RULE) for name in "ab")
        async with beside(directory.follow()), beside(first.run()) as (leading,):
            await loop.until(lambda: directory.leader is not None and directory.leader.set == "a")
            epoch = directory.leader_epoch
            async with beside(second.run()):
                await passes(loop, 2 * TTL_S)
                assert directory.leader is not None
                assert directory.leader.set == "a"
                leading.cancel()
                await passes(loop, 1.0)
                assert directory.leader is not None
                assert directory.leader.set == "b"
                assert directory.leader_epoch > epoch

    clock.run(scenario)


def test_a_leader_that_was_replaced_moves_nothing() -> None:
    """Its copy of the registry is old: it still believes that it leads."""

    async def scenario(loop: ManualLoop) -> None:
        registry = LocalRegistry()
        old_copy, copy = Directory(registry), Directory(registry)
        agent = KeyOwner(registry, f"{AGENTS}x", lambda lease: encoded(AgentRecord(lease=lease, set=None)))
        first = NodeManager(registry, old_copy, "a", RULE)
        async with beside(copy.follow(), agent.run()):
            async with beside(old_copy.follow(), first.run()):
                await loop.until(lambda: old_copy.leader is not None and "x" in old_copy.agents)
                old, epoch = old_copy.entries, old_copy.leader_epoch
            lease = await registry.grant(10_000)
            for key in (SETS + "a", SETS + "b", LEADER):
                await registry.create(key, encoded(a_set(agents="a:1")), lease)
            old_copy._take({**old, SETS + "a": registry._entries[SETS + "a"]})
            first._member.created = epoch
            await passes(loop, STEADY_S + 1.0)
            assert first._leads(epoch)
            await first._decide()
            await passes(loop, 1.0)
            assert copy.sets
            assert copy.routes == {}

    clock.run(scenario)


def test_a_leader_decides_nothing_until_its_copy_shows_that_it_leads() -> None:
    async def scenario(loop: ManualLoop) -> None:
        registry = LocalRegistry()
        copy = Directory(registry)
        manager, other = NodeManager(registry, copy, "a", RULE), Directory(registry)
        agent = KeyOwner(registry, f"{AGENTS}x", lambda lease: encoded(AgentRecord(lease=lease, set=None)))
        async with beside(other.follow(), agent.run(), keep(registry, "a", a_set()).run(), manager.run()):
            await loop.until(lambda: other.leader_epoch and other.agents and other.sets)
            copy._take(dict(registry._entries))
            copy.leader_epoch -= 1
            await passes(loop, STEADY_S + 2.0)
            assert other.routes == {}
            copy.leader_epoch += 1
            await passes(loop, 2.0)
            assert other.routes["x"].set == "a"

    clock.run(scenario)


def test_one_change_in_a_window() -> None:
    async def scenario(loop: ManualLoop) -> None:
        registry = LocalRegistry()
        copy, ends = Directory(registry), asyncio.Event()
        nodes = [RoutedAgent(registry, name, _goes([])) for name in "wxyz"]
        busy = a_set(1.0, agents="a:1", measured_s=30.0, most_nodes=4)
        idle = a_set(0.0, agents="b:1", measured_s=30.0, most_nodes=4, least_nodes=3)
        sets = {"a": busy, "b": idle}
        servers = [KeyOwner(registry, SETS + name, lambda _lease, name=name: encoded(sets[name])) for name in sets]
        manager = NodeManager(registry, copy, "a", RULE)
        async with beside(
            copy.follow(), manager.run(), *(one.run() for one in servers), *(one.run(ends) for one in nodes)
        ):
            await passes(loop, STEADY_S + 2.0)
            sets["b"] = replace(idle, least_nodes=1)
            for seconds, num_moved in ((10.0, 0), (20.0, 1), (10.0, 1), (20.0, 2)):
                await passes(loop, seconds)
                assert [one.set for one in copy.routes.values()].count("a") == 1 + num_moved

    clock.run(scenario)


def test_a_node_goes_from_the_idle_set_to_the_busy_one() -> None:
    """From registration to the second set, without one choice by the test."""

    async def scenario(loop: ManualLoop) -> None:
        registry = LocalRegistry()
        directory = Directory(registry)
        there: dict[str, list[str]] = {"x": [], "y": [], "z": []}
        busy = a_set(1.0, agents="busy:1", measured_s=30.0)
        idle = a_set(0.0, agents="idle:1", measured_s=30.0, least_nodes=2)
        sets = {"a": busy, "b": idle}
        servers = [KeyOwner(registry, SETS + name, lambda _lease, name=name: encoded(sets[name])) for name in sets]
        nodes = [RoutedAgent(registry, name, _goes(there[name])) for name in there]
        manager, ends = NodeManager(registry, directory, "a", RULE), asyncio.Event()
        async with beside(
            directory.follow(), manager.run(), *(one.run() for one in servers), *(one.run(ends) for one in nodes)
        ):
            await passes(loop, STEADY_S + 3.0)
            assert there == {"x": ["busy:1"], "y": ["idle:1"], "z": ["idle:1"]}
            await passes(loop, 60.0)  # The idle one keeps two.
            assert sorted(one.set for one in directory.routes.values()) == ["a", "b", "b"]
            sets["b"] = replace(idle, least_nodes=1, nodes={"y": 0.1, "z": 0.0})
            await passes(loop, 60.0)
            assert there == {"x": ["busy:1"], "y": ["idle:1"], "z": ["idle:1", "left idle:1", "busy:1"]}
            assert "it gets 1 of b (0%)" in directory.routes["z"].why
            assert directory.agents["z"].set == "a"

    clock.run(scenario)


def _goes(addresses: list[str]) -> Serve:
    async def serve(address: str, leaving: asyncio.Event) -> None:
        addresses.append(address)
        await leaving.wait()
        await clock.sleep(1.0)  # A server lets it go only then.
        addresses.append(f"left {address}")

    return serve


def test_an_agent_with_the_name_of_another_one_is_told_so_and_serves_no_set(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: ManualLoop) -> None:
        registry = LocalRegistry()
        directory, first, second = Directory(registry), list[str](), list[str]()
        server = KeyOwner(registry, SETS + "a", lambda _lease: encoded(a_set(agents="a:1")))
        manager, ends = NodeManager(registry, directory, "a", RULE), asyncio.Event()
        async with beside(
            directory.follow(), manager.run(), server.run(), RoutedAgent(registry, "x", _goes(first)).run(ends)
        ):
            await loop.until(lambda: AGENTS + "x" in registry._entries)
            async with beside(RoutedAgent(registry, "x", _goes(second)).run(ends)):
                await passes(loop, STEADY_S + 3.0)
                assert (first, second) == (["a:1"], [])

    clock.run(scenario)
    assert "agent x: another has this name" in caplog.text


def test_an_agent_does_not_obey_a_route_of_an_older_epoch_or_of_another_lease() -> None:
    async def scenario(loop: ManualLoop) -> None:
        registry = LocalRegistry()
        addresses: list[str] = []
        agent = RoutedAgent(registry, "x", _goes(addresses))
        lease = await registry.grant(10_000)
        for name in "ab":
            await registry.create(SETS + name, encoded(a_set(agents=f"{name}:1")), lease)
        guard = Guard(SETS + "a", 2)
        ends = asyncio.Event()
        async with beside(agent.run(ends)) as (running,):
            await loop.until(lambda: AGENTS + "x" in registry._entries)
            lease = registry._entries[AGENTS + "x"].lease
            for name, epoch, expected in (("a", 7, ["a:1"]), ("b", 6, ["a:1"]), ("b", 8, ["a:1", "left a:1", "b:1"])):
                assert await registry.put(ROUTES + "x", encoded(Route(set=name, epoch=epoch, why="")), lease, guard)
                await passes(loop, 2.0)
                assert addresses == expected
            other = await registry.grant(10_000)
            assert await registry.put(ROUTES + "x", encoded(Route(set="a", epoch=9, why="")), other, guard)
            await passes(loop, 2.0)
            assert addresses[-1] == "b:1"  # The route is not under its lease.
            ends.set()
            await passes(loop, 0.5)
            assert not running.done()
            await passes(loop, 1.0)
            assert running.done()
            assert addresses[-1] == "left b:1"

    clock.run(scenario)


def test_records_of_other_versions() -> None:
    record = encoded(AgentRecord(lease=3, set=None))
    assert decoded(AgentRecord, record) == AgentRecord(lease=3, set=None)
    assert decoded(AgentRecord, record[:-1] + b', "more": 1}') == AgentRecord(lease=3, set=None)
    assert decoded(AgentRecord, b'{"set": "a"}') is None
    assert decoded(SetRecord, b"\xff") is None


@pytest.mark.parametrize("address", ["", "10.0.0.5", "etcd://", "etcd://a:b", "etcd://a,,b", "redis://a"])
def test_addresses_that_name_no_registry(address: str) -> None:
    with pytest.raises(BadRegistry, match=r"registry is '.*'; give etcd://HOST"):
        open_registry(address)
