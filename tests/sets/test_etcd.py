"""The registry in an etcd of three members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from suite.etcd import Etcd, etcd

from debian import has
from sets.test_registry import beside
from tilework.sets.address import open_registry
from tilework.sets.directory import Directory
from tilework.sets.etcd import EtcdRegistry
from tilework.sets.member import KeyOwner
from tilework.sets.registry import Guard, RegistryLost
from waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has("etcd", "etcd-server"), reason="needs the Debian package etcd-server"),
]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@asynccontextmanager
async def registry(members: Etcd) -> AsyncIterator[EtcdRegistry]:
    opened = open_registry(members.address)
    try:
        yield opened
    finally:
        await opened.close()


def test_creates_guards_and_leases(members: Etcd) -> None:
    async def test() -> None:
        async with registry(members) as one, registry(members) as two:
            first, second = await one.grant(60), await two.grant(60)
            epoch = await one.create("leader", b"one", first)
            assert epoch is not None
            assert await one.create("leader", b"again", first) == epoch  # As after an answer that was lost.
            assert await two.create("leader", b"two", second) is None
            assert await one.put("routes/x", b"1", second, Guard("leader", epoch))
            assert await one.renew(first)
            await one.revoke(first)
            assert not await one.renew(first)
            newer = await two.create("leader", b"two", second)
            assert newer is not None
            assert newer > epoch
            assert await one.put("routes/x", b"2", second, Guard("leader", epoch)) is None
            async with aclosing(one.watch()) as watched:
                entries = await anext(watched)
                assert entries["routes/x"].value == b"1"
                assert entries["leader"].created == newer
                waiting = asyncio.ensure_future(anext(watched))
                await asyncio.sleep(0)
                await two.revoke(second)
                assert dict(await waiting) == {}

    run(test())


def test_it_goes_on_when_a_member_is_killed(members: Etcd) -> None:
    """Even the one that leads, and that this server is connected to: its record stays, and changes are seen."""

    async def test() -> None:
        async with registry(members) as one, registry(members) as two:
            value = b"1"
            owner, directory, seen = (
                KeyOwner(one, "sets/a", lambda _lease: value),
                Directory(two),
                list[dict[str, Any]](),
            )
            directory._take = lambda entries: seen.append({key: one.value for key, one in entries.items()})  # type: ignore[method-assign]
            tasks = [asyncio.ensure_future(chore) for chore in (owner.run(), directory.follow())]
            try:
                await until(lambda: owner.created and seen and seen[-1] == {"sets/a": b"1"})
                created, leading = owner.created, members.leader()
                for opened in (one, two):
                    opened._first = leading
                members.kill(leading)
                value = b"2"
                await until(lambda: seen[-1] == {"sets/a": b"2"})
                assert owner.created == created
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    run(test())


def test_a_registry_that_does_not_answer_is_named() -> None:
    async def test() -> None:
        lost = open_registry("etcd://127.0.0.1:1,127.0.0.1:2")
        with pytest.raises(RegistryLost, match=r"etcd does not answer: http://127\.0\.0\.1:2/v3/lease/grant: Connect"):
            await lost.grant(3)
        await lost.close()

    run(test())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Etcd]:
    with etcd(tmp_path, 1) as running:
        yield running


def test_an_etcd_that_is_stopped_is_noticed_and_followed_again(alone: Etcd) -> None:
    """Its connections stay."""

    async def test() -> None:
        async with registry(alone) as one:
            owner, directory = KeyOwner(one, "sets/a", lambda _lease: b"1"), Directory(one)
            async with beside(owner.run(), directory.follow()):
                await until(lambda: "sets/a" in directory.entries)
                alone.suspend(0)
                await until(lambda: not directory.is_current and owner.created is None)
                alone.resume(0)
                await until(lambda: directory.is_current and "sets/a" in directory.entries and owner.created)
                assert one.era == 0

    run(test())


def test_an_etcd_that_was_wiped_begins_a_new_era(alone: Etcd) -> None:
    """Started by the same command it has the same id of its cluster: its revision tells. All is written anew."""

    async def test() -> None:
        async with registry(alone) as one:
            values = iter(f"{number}".encode() for number in range(1_000_000))
            owner, directory = KeyOwner(one, "sets/a", lambda _lease: next(values), beat_s=0.05), Directory(one)
            async with beside(owner.run(), directory.follow()):
                await until(lambda: "sets/a" in directory.entries and directory.entries["sets/a"].changed > 20)
                cluster = one._cluster
                alone.kill(0)
                alone.wipe(0)
                alone.start(0)
                await until(lambda: one.era == 1)
                await until(lambda: directory.is_current and "sets/a" in directory.entries and owner.created)
                assert one._cluster == cluster

    run(test())
