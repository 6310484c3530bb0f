"""Chores that fail, and go on."""

from __future__ import annotations

import asyncio

import pytest

import clock
from clock import ManualLoop
from sets.records import a_set
from sets.test_registry import beside, passes
from tilework.sets.chores import kept_alive
from tilework.sets.local import LocalRegistry
from tilework.sets.records import AGENTS, ROUTES, SETS, Route, encoded
from tilework.sets.registry import Guard
from tilework.sets.routing import RoutedAgent


def test_a_chore_that_fails_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    """Its traceback is logged once, until it fails otherwise."""

    async def scenario(loop: ManualLoop) -> None:
        errors = iter([KeyError("a"), KeyError("a"), ValueError("b")])

        async def chore() -> None:
            if (error := next(errors, None)) is not None:
                raise error

        async with beside(kept_alive("the chore", chore)) as (task,):
            await passes(loop, 5.0)
            assert task.done()

    clock.run(scenario)
    assert [(one.message, bool(one.exc_info)) for one in caplog.records] == [
        ("the chore has failed, and begins again in 1 s: KeyError: 'a'", True),
        ("the chore has failed, and begins again in 1 s: KeyError: 'a'", False),
        ("the chore has failed, and begins again in 1 s: ValueError: b", True),
    ]


def test_a_chore_that_fails_at_its_end_does_not_begin_again() -> None:
    async def scenario(loop: ManualLoop) -> None:
        async def chore() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                raise ValueError("while it is cancelled")

        task = asyncio.ensure_future(kept_alive("the chore", chore))
        await loop.until_idle()
        task.cancel()
        await asyncio.wait({task})
        assert isinstance(task.exception(), ValueError)

    clock.run(scenario)


async def routed(registry: LocalRegistry, loop: ManualLoop) -> None:
    """Say that the agent x is for the set a."""
    await loop.until(lambda: AGENTS + "x" in registry._entries)
    lease = registry._entries[AGENTS + "x"].lease
    created = await registry.create(SETS + "a", encoded(a_set(agents="a:1")), await registry.grant(10_000))
    assert created
    assert await registry.put(ROUTES + "x", encoded(Route(set="a", epoch=1, why="")), lease, Guard(SETS + "a", created))


def test_an_agent_whose_node_fails_begins_again_at_the_same_server() -> None:
    async def scenario(loop: ManualLoop) -> None:
        registry, addresses = LocalRegistry(), list[str]()

        async def serve(address: str, leaving: asyncio.Event) -> None:
            addresses.append(address)
            if len(addresses) < 3:
                raise KeyError("a bug")
            await leaving.wait()

        async with beside(RoutedAgent(registry, "x", serve).run(asyncio.Event())):
            await routed(registry, loop)
            await passes(loop, 5.0)
            assert addresses == ["a:1"] * 3

    clock.run(scenario)


def test_an_agent_that_its_server_tells_to_end_ends() -> None:
    async def scenario(loop: ManualLoop) -> None:
        registry, ends = LocalRegistry(), asyncio.Event()

        async def serve(_address: str, leaving: asyncio.Event) -> None:
            leaving.set()

        async with beside(RoutedAgent(registry, "x", serve).run(ends)) as (running,):
            await routed(registry, loop)
            await passes(loop, 2.0)
            assert running.done()
            assert AGENTS + "x" not in registry._entries

    clock.run(scenario)


class Broken(LocalRegistry):
    """A registry whose calls and watch fail as nobody has foreseen."""

    is_broken = False

    async def renew(self, lease: int) -> bool:
        if self.is_broken:
            raise KeyError("result")
        return await super().renew(lease)


def test_an_agent_outlives_what_nobody_has_foreseen() -> None:
    async def scenario(loop: ManualLoop) -> None:
        registry, addresses = Broken(), list[str]()

        async def serve(address: str, leaving: asyncio.Event) -> None:
            addresses.append(address)
            await leaving.wait()

        async with beside(RoutedAgent(registry, "x", serve).run(asyncio.Event())):
            await passes(loop, 5.0)
            registry.is_broken = True
            await passes(loop, 20.0)
            registry.expire()
            assert AGENTS + "x" not in registry._entries
            registry.is_broken = False
            await passes(loop, 5.0)
            await routed(registry, loop)
            await passes(loop, 5.0)
            assert addresses == ["a:1"]

    clock.run(scenario)
