"""Servers and agents over a registry that is unsteady: whatever happens, agents obey the newest order alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

import clock
from clock import ManualLoop
from quick import quick
from sets.records import a_set
from sets.test_registry import RULE, beside, passes
from sets.unsteady import Shared, Unsteady
from tilework.sets.directory import Directory
from tilework.sets.leader import NodeManager
from tilework.sets.local import LocalRegistry
from tilework.sets.member import KeyOwner
from tilework.sets.records import LEADER, ROUTES, SETS, SetRecord, encoded
from tilework.sets.registry import Entry
from tilework.sets.routing import RoutedAgent

NUM_SERVERS, NUM_AGENTS = 3, 4
FAULTS_S, CALM_S = 120, 150
SEEDS = quick(range(1), range(25))


@dataclass
class Run:
    """Three servers, each with a manager that may lead, and four agents; and what was seen that must not be."""

    seed: int
    share: float = 0.3
    shared: Shared = field(default_factory=Shared)
    at: dict[str, str | None] = field(default_factory=dict)
    obeyed: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(f"sets/{self.seed}")
        self.reached: list[Unsteady] = []
        self.sets: dict[str, SetRecord] = {name: self.record(name) for name in "abc"[:NUM_SERVERS]}

    def record(self, name: str) -> SetRecord:
        share = self.random.choice((0.0, 0.5, 1.0))
        return a_set(share, agents=f"{name}:1", measured_s=30.0, most_nodes=NUM_AGENTS)

    def registry(self) -> Unsteady:
        self.reached.append(Unsteady(self.shared, self.random, self.share))
        return self.reached[-1]

    def agent(self, name: str) -> RoutedAgent:
        self.at[name], self.obeyed[name] = None, (0, 0)

        async def serve(address: str, leaving: asyncio.Event) -> None:
            seen = agent._seen
            if seen < self.obeyed[name]:
                self.shared.violations.append(f"{name} obeys {seen} after {self.obeyed[name]}")
            if self.at[name] is not None:
                self.shared.violations.append(f"{name} is at {self.at[name]} and {address}")
            self.obeyed[name], self.at[name] = seen, address
            await leaving.wait()
            await clock.sleep(self.random.uniform(0.0, 3.0))
            self.at[name] = None

        agent = RoutedAgent(self.registry(), name, serve)
        return agent

    async def scenario(self, loop: ManualLoop) -> None:
        ends, chores = asyncio.Event(), []
        for name in self.sets:
            registry = self.registry()
            directory = Directory(registry)
            server = KeyOwner(registry, SETS + name, lambda _lease, name=name: encoded(self.sets[name]), ttl_s=5)
            chores += [server.run(), directory.follow(), NodeManager(registry, directory, name, RULE).run()]
        agents = [self.agent(f"node {index}") for index in range(NUM_AGENTS)]
        async with beside(*chores, *(one.run(ends) for one in agents)):
            for _ in range(FAULTS_S):
                self._disturb()
                await passes(loop, 1.0)
            for one in self.reached:
                one.is_cut, one.share = False, 0.0
            await passes(loop, CALM_S)
            self._check_calm()

    def _disturb(self) -> None:
        """Cut some off, for seconds or for longer than leases last; let loads change."""
        for one in self.reached:
            if self.random.random() < (0.15 if one.is_cut else 0.02):
                one.is_cut = not one.is_cut
        if self.random.random() < 0.05:
            name = self.random.choice(sorted(self.sets))
            self.sets[name] = self.record(name)

    def _check_calm(self) -> None:
        """All that is there has one leader, and each agent is where its route says."""
        entries: dict[str, Entry] = self.shared.registry._entries
        directory = Directory(self.shared.registry)
        directory._take(entries)
        assert entries[LEADER], "none leads"
        assert set(directory.sets) == set(self.sets)
        assert {name: f"{one.set}:1" for name, one in directory.routes.items()} == self.at, "an agent is elsewhere"


def run(seed: int) -> list[str]:
    one = Run(seed)
    clock.run(one.scenario)
    return [f"seed {seed}: {what}" for what in one.shared.violations]


@pytest.mark.parametrize("seed", SEEDS)
def test_agents_obey_the_newest_order_alone_and_all_come_to_rest(seed: int) -> None:
    assert run(seed) == []


def obey_every_route(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_address(self: RoutedAgent) -> str | None:
        route, entry = self._directory.routes.get(self._name), self._directory.entries.get(ROUTES + self._name)
        if route is None or entry is None or route.set not in self._directory.sets:
            return None
        self._seen, address = (route.epoch, entry.changed), self._directory.sets[route.set].agents
        return None if address == self._address else address

    monkeypatch.setattr(RoutedAgent, "_next_address", next_address)


def write_without_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that was replaced writes all the same."""

    async def put(self: LocalRegistry, key: str, value: bytes, lease: int, guard: object) -> int | None:
        return self._write(key, value, lease)

    monkeypatch.setattr(LocalRegistry, "put", put)


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "words"), [(obey_every_route, " obeys "), (write_without_guard, "was replaced")])
def test_an_injected_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    for seed in range(60):
        try:
            found = run(seed)
        except AssertionError:
            continue
        if any(words in one for one in found):
            return
    pytest.fail("nothing was noticed")
