"""Workers whose server is gone: what they are told, what of them the next server hears, and when they end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from runtime.nodes.rig import INFO, Heard, begin, ended
from tilework.core.component import Component, LoadSource
from tilework.core.wire.commands import Command, DropWeights, GroupRef, StartOver
from tilework.core.wire.reports import LoadedModel, StartedOver
from tilework.core.work import Group
from tilework.runtime.nodes.node_workers import NodeWorkers
from waiting import PATIENCE_S, until

GROUP = GroupRef(3, (0, 1))
BEGIN = begin()


@dataclass(eq=False)
class PlayedWorkers:
    """Two workers and a CPU slot; those of `silent` do not answer, until they are killed."""

    silent: frozenset[int] = frozenset()
    got: list[tuple[int, Command]] = field(default_factory=list)
    broken: list[GroupRef] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    has_ended: bool = False
    num_devices: int = 2
    num_slots: int = 1

    async def start(self, listener: Any) -> tuple[LoadedModel, ...]:
        self.listener = listener
        return (LoadedModel(info=INFO, components={"unet": Component("abc", 8)}),)

    @property
    def devices_up(self) -> Group:
        return tuple(one for one in (0, 1) if one not in self.killed)

    @property
    def slots_up(self) -> Group:
        return (2,)

    def send(self, device_id: int, command: Command) -> None:
        self.got.append((device_id, command))
        if isinstance(command, StartOver) and device_id not in self.silent:
            loop = asyncio.get_running_loop()
            loop.call_soon(self.listener.on_report, device_id, ended(7))
            loop.call_soon(self.listener.on_report, device_id, StartedOver())

    def break_off(self, ref: GroupRef) -> None:
        self.broken.append(ref)

    def kill(self, device_id: int, reason: str) -> None:
        self.killed.append(device_id)
        self.listener.on_lost(device_id, reason)

    async def end_calibration(self) -> Mapping[LoadSource, float]:
        return {}

    async def end_reads(self) -> None: ...

    async def stop(self) -> None:
        self.has_ended = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[PlayedWorkers]:
    """The workers that were started, the latest last."""
    all_started: list[PlayedWorkers] = []

    def start(_config: object) -> PlayedWorkers:
        all_started.append(PlayedWorkers(silent=frozenset({1}) if not all_started else frozenset()))
        return all_started[-1]

    monkeypatch.setattr("tilework.runtime.nodes.node_workers.LocalExecutor", start)
    monkeypatch.setattr("tilework.runtime.nodes.node_workers._END_WORKS_S", 0.02)
    return all_started


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE_S))


async def broken_off(workers: NodeWorkers) -> Heard:
    """A session that has broken off; returns what it has heard."""
    heard = Heard()
    await workers.begin(BEGIN, heard.on_loading)
    workers.attach(heard)
    workers.wait([GROUP])
    return heard


def test_the_next_session_has_workers_that_have_forgotten_the_last(started: list[PlayedWorkers]) -> None:
    async def test() -> None:
        workers, second = NodeWorkers(wait_s=60), Heard()
        first = await broken_off(workers)
        executor = await workers.begin(replace(BEGIN, node=1), second.on_loading)
        assert [executor] == started
        (played,) = started
        told = [(device_id, command) for device_id in (0, 1, 2) for command in (DropWeights(("abc",)), StartOver())]
        assert (played.got, played.broken, played.killed) == (told, [GROUP], [1])
        workers.attach(second)
        assert second.all == [("lost", 1, "its worker is started again")]
        played.listener.on_joined(1)
        played.listener.on_report(0, ended(8))
        assert second.all[1:] == [("joined", 1), ("report", 0, ended(8))]
        assert first.all == [], "what they report of the old session goes nowhere"
        await workers.close()
        assert played.has_ended

    run(test())


@pytest.mark.parametrize("why", ["asks for other workers", "models have changed"])
def test_a_session_that_is_for_something_else_has_new_workers(started: list[PlayedWorkers], why: str) -> None:
    async def test() -> None:
        workers, is_changed = NodeWorkers(wait_s=60), why == "models have changed"
        await broken_off(workers)
        if is_changed:
            workers.note_change()
        wanted = BEGIN if is_changed else replace(BEGIN, num_workers=3)
        assert await workers.begin(wanted, lambda _num: None) is started[1]
        assert started[0].has_ended

    run(test())


def test_workers_that_no_server_wants_end(started: list[PlayedWorkers]) -> None:
    async def test() -> None:
        for wait_s in (0.0, 0.001):
            workers = NodeWorkers(wait_s)
            await broken_off(workers)
            await until(lambda: started[-1].has_ended)
        await workers.begin(BEGIN, lambda _num: None)
        assert len(started) == 3

    run(test())


@pytest.mark.parametrize("how", ["breaks off", "is let go"])
def test_a_session_that_ends_before_it_has_them_changes_nothing_for_workers_that_wait(
    started: list[PlayedWorkers], how: str
) -> None:
    """For example one at a server that has no place for a node yet. Their time is that since the last one had them."""

    async def test() -> None:
        loop, timers, workers = asyncio.get_running_loop(), list[asyncio.TimerHandle](), NodeWorkers(wait_s=77)
        call_later = loop.call_later

        def noted(delay_s: float, *call: Any) -> asyncio.TimerHandle:
            timer = call_later(delay_s, *call)
            timers.extend([timer] if delay_s == 77 else [])
            return timer

        loop.call_later = noted  # type: ignore[method-assign, assignment]
        await broken_off(workers)
        workers.wait([]) if how == "breaks off" else await workers.let_go()
        assert await workers.begin(BEGIN, lambda _num: None) is started[0]
        assert len(timers) == 1
        assert timers[0].cancelled(), "it would end the workers of the session that has them now"
        await workers.let_go()
        assert started[0].has_ended

    run(test())


def test_a_session_that_ends_while_it_waits_leaves_the_workers_to_the_next(started: list[PlayedWorkers]) -> None:
    async def test() -> None:
        workers = NodeWorkers(wait_s=60)
        await broken_off(workers)
        begun = asyncio.create_task(workers.begin(BEGIN, lambda _num: None))
        await asyncio.sleep(0)
        begun.cancel()
        workers.wait([])
        assert await workers.begin(BEGIN, lambda _num: None) is started[0]
        assert sum(isinstance(command, StartOver) for _, command in started[0].got) == 3, "once for each"

    run(test())
