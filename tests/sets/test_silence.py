"""A registry that is silent, loses what it held, or is slow: no node moves by that, and orders are obeyed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random

import pytest

import clock
from clock import ManualLoop
from quick import quick
from sets.records import a_set
from sets.test_registry import RULE, beside, passes
from sets.unsteady import Forgetful, Late, Shared, Unsteady
from tilework.sets.directory import Directory
from tilework.sets.leader import STEADY_S, NodeManager
from tilework.sets.member import KeyOwner
from tilework.sets.records import LEADER, ROUTES, SETS, Route, SetRecord, encoded
from tilework.sets.registry import Registry
from tilework.sets.routing import RoutedAgent

WINDOW_S = 30.0
PLACES = {"x": "busy", "y": "idle", "z": "busy"}


@dataclass
class Rig:
    """Two servers, of which either may lead, and three agents; each reaches the registry for itself."""

    registry: Forgetful = field(default_factory=Forgetful)
    sets: dict[str, SetRecord] = field(default_factory=dict)
    went: dict[str, list[str]] = field(default_factory=dict)
    reached: dict[str, Unsteady] = field(default_factory=dict)
    copies: list[Directory] = field(default_factory=list)
    restarted: set[str] = field(default_factory=set)  # Servers that no agent has found again.

    def __post_init__(self) -> None:
        self.shared = Shared(self.registry)
        for name, share in (("busy", 1.0), ("idle", 0.0)):
            self.sets[name] = a_set(share, agents=f"{name}:1", measured_s=WINDOW_S, most_nodes=2 if share else 3)

    def record(self, name: str) -> SetRecord:
        """With the nodes that are connected."""
        if name in self.restarted:
            return self.sets[name]
        there = {agent: 0.0 for agent, went in self.went.items() if went and went[-1] == f"{name}:1"}
        return replace(self.sets[name], nodes=there)

    def reach(self, name: str) -> Registry:
        self.reached[name] = Unsteady(self.shared, Random(name), 0.0)
        return self.reached[name]

    def agent(self, name: str) -> RoutedAgent:
        self.went[name] = []

        async def serve(address: str, leaving: asyncio.Event) -> None:
            self.went[name].append(address)
            await leaving.wait()

        return RoutedAgent(self.reach(name), name, serve)

    @asynccontextmanager
    async def running(self, loop: ManualLoop, places: Mapping[str, str] = PLACES) -> AsyncIterator[None]:
        """The nodes have been placed; so, by default."""
        chores, ends = [], asyncio.Event()
        for name in self.sets:
            registry = self.reach(name)
            copy = Directory(registry)
            self.copies.append(copy)
            server = KeyOwner(registry, SETS + name, lambda _lease, name=name: encoded(self.record(name)), ttl_s=5)
            chores += [server.run(), copy.follow(), NodeManager(registry, copy, name, RULE).run()]
        async with beside(*chores, *(self.agent(name).run(ends) for name in PLACES)):
            await passes(loop, STEADY_S + 3.0)
            assert self.went == {name: [f"{where}:1"] for name, where in places.items()}
            yield

    def routes(self) -> dict[str, str]:
        directory = Directory(self.registry)
        directory._take(self.registry._entries)
        return {name: one.set for name, one in directory.routes.items()}


@pytest.mark.parametrize("silent_s", [5.0, 12.0, 25.0, 60.0])
@pytest.mark.parametrize("seed", quick(range(3), range(20)))
def test_no_node_moves_because_the_registry_was_silent(silent_s: float, seed: int) -> None:
    """All come back one after another. The work of the busy set has ended meanwhile, and the other one has some."""

    async def scenario(loop: ManualLoop) -> None:
        rig, random = Rig(), Random(f"silence/{seed}")
        async with rig.running(loop):
            await passes(loop, random.uniform(0.0, WINDOW_S))
            for one in rig.reached.values():
                one.is_cut = True
            rig.sets["busy"] = replace(rig.sets["busy"], share=0.0)
            rig.sets["idle"] = replace(rig.sets["idle"], share=0.5)
            await passes(loop, silent_s)
            for name in random.sample(sorted(rig.reached), len(rig.reached)):
                rig.reached[name].is_cut = False
                await passes(loop, random.uniform(0.0, 2.0))
            await passes(loop, 3 * WINDOW_S)
            assert all(one.is_current for one in rig.copies)
            assert rig.routes() == PLACES
            assert [len(one) for one in rig.went.values()] == [1, 1, 1]

    clock.run(scenario)


@pytest.mark.parametrize("cut", [("idle",), ("busy",), ("x", "z"), ("busy", "x", "z"), ("idle", "y")])
def test_no_node_moves_because_some_were_cut_off(cut: tuple[str, ...]) -> None:
    """At any time of a window; also a server with its agents."""

    async def scenario(loop: ManualLoop) -> None:
        for after_s in (0.0, 8.0, 17.0, 25.0):
            rig = Rig()
            rig.sets["busy"] = replace(rig.sets["busy"], share=0.5)
            async with rig.running(loop):
                await passes(loop, after_s)
                for name in cut:
                    rig.reached[name].is_cut = True
                await passes(loop, 0.8 * WINDOW_S)
                for name in cut:
                    rig.reached[name].is_cut = False
                    await passes(loop, 1.0)
                await passes(loop, 3 * WINDOW_S)
                assert rig.routes() == PLACES
                assert [len(one) for one in rig.went.values()] == [1, 1, 1]

    clock.run(scenario)


def test_a_set_that_comes_back_before_its_node_gets_no_other() -> None:
    """Its server was restarted meanwhile, and has no nodes yet."""

    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        async with rig.running(loop):
            for name in ("idle", "y"):
                rig.reached[name].is_cut = True
            await passes(loop, 15.0)
            rig.restarted.add("idle")
            for name in ("idle", "y"):
                rig.reached[name].is_cut = False
                await passes(loop, 7.0)
            await passes(loop, 3 * WINDOW_S)
            assert rig.routes() == PLACES
            assert [len(one) for one in rig.went.values()] == [1, 1, 1]

    clock.run(scenario)


def test_a_free_node_waits_until_all_sets_are_back() -> None:
    """Else it would go where it is not needed."""

    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        rig.sets["busy"] = replace(rig.sets["busy"], least_nodes=4, most_nodes=4)
        async with rig.running(loop, dict.fromkeys("xyz", "busy")):
            for one in rig.reached.values():
                one.is_cut = True
            await passes(loop, 20.0)
            rig.reached["idle"].is_cut = False
            async with beside(rig.agent("w").run(asyncio.Event())):
                await passes(loop, 6.0)
                for one in rig.reached.values():
                    one.is_cut = False
                await passes(loop, 20.0)
                assert rig.went["w"] == ["busy:1"]

    clock.run(scenario)


def test_a_set_that_was_away_gives_no_node_before_a_window_has_passed() -> None:
    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        rig.sets["busy"] = replace(rig.sets["busy"], most_nodes=3)
        rig.sets["idle"] = replace(rig.sets["idle"], least_nodes=2, most_nodes=2)
        async with rig.running(loop, {"x": "busy", "y": "idle", "z": "idle"}):
            rig.reached["idle"].is_cut = True
            await passes(loop, 12.0)
            rig.reached["idle"].is_cut = False
            rig.sets["idle"] = replace(rig.sets["idle"], least_nodes=1)
            await passes(loop, WINDOW_S - 1.0)
            assert sorted(rig.routes().values()) == ["busy", "idle", "idle"]
            await passes(loop, 10.0)
            assert sorted(rig.routes().values()) == ["busy", "busy", "idle"]

    clock.run(scenario)


@pytest.mark.parametrize("silent_s", [2.5, 15.0])
def test_a_load_that_was_measured_over_a_silence_moves_no_node(silent_s: float) -> None:
    """A window is to pass without a gap, though it was so short that no lease has ended; then the busy set gets one."""

    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        rig.sets["busy"] = replace(rig.sets["busy"], most_nodes=3)
        rig.sets["idle"] = replace(rig.sets["idle"], least_nodes=2, most_nodes=2)
        async with rig.running(loop, {"x": "busy", "y": "idle", "z": "idle"}):
            await passes(loop, WINDOW_S - 5.0)
            for one in rig.reached.values():
                one.is_cut = True
            rig.sets["idle"] = replace(rig.sets["idle"], least_nodes=1)
            await passes(loop, silent_s)
            for one in rig.reached.values():
                one.is_cut = False
            await passes(loop, WINDOW_S - 1.0)
            assert sorted(rig.routes().values()) == ["busy", "idle", "idle"]
            await passes(loop, 20.0)
            assert sorted(rig.routes().values()) == ["busy", "busy", "idle"]

    clock.run(scenario)


def wipe(registry: Forgetful, _kept: object) -> None:
    registry.wipe()


def restore(registry: Forgetful, kept: object) -> None:
    registry.restore(kept)


@pytest.mark.parametrize("forget", [wipe, restore])
def test_a_registry_that_forgets_moves_no_node_and_is_obeyed_again(
    forget: Callable[[Forgetful, object], None],
) -> None:
    """Also by agents that have seen a far greater epoch. What a backup says of where they are is old."""

    async def scenario(loop: ManualLoop) -> None:
        rig = Rig()
        rig.registry._revision = 2000
        async with rig.running(loop):
            kept = rig.registry.backup()
            rig.registry._revision += 1000
            lease = rig.registry._entries["agents/x"].lease
            rig.registry._write(ROUTES + "x", encoded(Route(set="idle", epoch=2900, why="")), lease)
            await passes(loop, 3.0)
            assert rig.went["x"] == ["busy:1", "idle:1"]
            forget(rig.registry, kept)
            await passes(loop, STEADY_S + 10.0)
            assert rig.went == {"x": ["busy:1", "idle:1"], "y": ["idle:1"], "z": ["busy:1"]}
            assert rig.routes() == PLACES | {"x": "idle"}
            assert rig.registry._entries[LEADER].created < 2900
            rig.sets["busy"] = replace(rig.sets["busy"], least_nodes=2)
            await passes(loop, 10.0)
            assert rig.went == {"x": ["busy:1", "idle:1", "busy:1"], "y": ["idle:1"], "z": ["busy:1"]}

    clock.run(scenario)


@pytest.mark.parametrize("late_s", [0.5, 1.5, 3.0])
def test_no_record_ends_because_answers_are_late(late_s: float) -> None:
    """Not even that of the leader, whose lease is the shortest."""

    async def scenario(loop: ManualLoop) -> None:
        registry = Late(late_s)
        texts = iter(f"{number}".encode() for number in range(10_000))
        server = KeyOwner(registry, "sets/a", lambda _lease: next(texts), ttl_s=5)
        manager = NodeManager(registry, Directory(registry), "a", RULE)
        async with beside(server.run(), manager.run()):
            await passes(loop, 12.0)
            created = {key: one.created for key, one in registry._entries.items()}
            assert set(created) == {"sets/a", LEADER}
            for _ in range(60):
                await passes(loop, 1.0)
                assert {key: one.created for key, one in registry._entries.items()} == created

    clock.run(scenario)
