"""Random sequences of changes of what a simulated server serves, under load and with faults; and what they cost others.

Live servers: `live/test_random_changes.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from builders import FEW_POLICIES, SERVICE_S, request, table
from quick import quick
from tilework.cli.app import app
from tilework.control.components import Components
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action
from tilework.core.component import Component, LoadSource
from tilework.core.events import Event, ModelRemoved, ModelServed
from tilework.core.graph.graph import Graph
from tilework.core.lora import Lora
from tilework.core.request import Request
from tilework.core.time import NS_PER_S
from tilework.cost.table import CostTable, merged
from tilework.cost.table_costs import TableCosts
from tilework.sim.config import SimConfig
from tilework.sim.faults import Faults, parse_faults
from tilework.sim.fuzz import Choice, run_seed, run_seeds
from tilework.sim.models.catalog import AddLora, Change, RemoveLora, RemoveModel, ServeModel, SimCatalog, TimedChange
from tilework.sim.scenarios.scenario import scenario
from tilework.sim.simulation import Simulation

_PER_BLOCK = 25
MIB = 1 << 20


def violations(seeds: range, faults: Faults | None = None) -> list[str]:
    results = run_seeds(seeds, Choice(faults=faults, changes=True), 1)
    given = "" if faults is None else "".join(f" --fault {fault}" for fault in faults.by_name.values())
    return [
        f"tilework fuzz --changes --seed {result.seed}{given}: {result.where}: {result.violation}"
        for result in results
        if result.violation
    ]


@pytest.mark.parametrize("block", quick((0,), range(80)))
def test_sequences_of_changes_keep_the_invariants(block: int) -> None:
    """Models and LoRAs that come and go, while requests for all of them come and workers, nodes and messages fail."""
    assert violations(range(block * _PER_BLOCK, (block + 1) * _PER_BLOCK)) == []


def test_that_a_model_was_too_large_says_nothing_of_the_next_one_of_its_name() -> None:
    """Its decode is tried whole, which the invariants allow."""
    results = (run_seed(seed, "edf", parse_faults(["oom=0.3:1"]), changes=True) for seed in (43, 56, 85, 120))
    assert not [result.violation for result in results if result.violation]


def test_some_changes_of_each_kind_are_made_and_some_are_refused() -> None:
    made, refused = set[str](), 0

    def observe(event: Event, _actions: tuple[Action, ...], _now_ns: int) -> None:
        if isinstance(event, ModelServed | ModelRemoved):
            made.add(type(event).__name__)

    kinds = set[str]()
    for seed in range(12):
        one = scenario(seed, "edf", Faults(), changes=True)
        simulation = Simulation(one.controller, one.table, one.config)
        simulation.run(one.requests, one.cancels, observe, changes=one.changes)
        refused += simulation.catalog.num_refused
        kinds |= {type(timed.change).__name__ for timed in one.changes}
    assert made == {"ModelServed", "ModelRemoved"}
    assert refused > 5
    assert kinds == {"ServeModel", "RemoveModel", "AddLora", "RemoveLora"}


def test_a_seed_determines_the_changes_too() -> None:
    assert scenario(5, changes=True) == scenario(5, changes=True)
    assert scenario(5, changes=True).changes
    assert not scenario(5, changes=False).changes
    share = sum(bool(scenario(seed).changes) for seed in range(80)) / 80
    assert 0.1 < share < 0.4


# What the invariants notice.


def keep_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are not told to drop what nothing needs any more."""

    def changed(self: Any, _before: object) -> list[Action]:
        self._known = {component.digest: component for component in self._costs.weights.all}
        self._tracker.models_changed()
        return []

    monkeypatch.setattr(Components, "_changed", changed)


def serve_whatever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "check", lambda _self, _served: None)


def refuse_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(_self: object, _served: ModelServed) -> None:
        raise ValueError("no")

    monkeypatch.setattr(Controller, "check", check)


def take_what_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check is no copy."""

    def check(self: Controller, served: ModelServed) -> None:
        self.costs.version += 1
        real(self, served)

    real = Controller.check
    monkeypatch.setattr(Controller, "check", check)


def remove_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open requests are not waited for."""
    real = SimCatalog.__init__

    def init(self: Any, controller: Any, handle: Any, _open_requests: object) -> None:
        real(self, controller, handle, list)

    monkeypatch.setattr(SimCatalog, "__init__", init)


def remember_removed_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned of a model is believed of the next one of its name."""
    monkeypatch.setattr(TableCosts, "forget", lambda _costs, _pipeline: None)


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (keep_weights, "which nothing needs any more"),
        (serve_whatever, "is not refused"),
        (refuse_all, "that can be made is refused"),
        (take_what_is_checked, "has changed costs"),
        (remove_at_once, "is open, and its model is removed"),
        (remember_removed_models, "of a new model is believed to take"),
    ],
)
def test_an_injected_bug_is_found(
    breakage: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)
    results = (run_seed(seed, "edf", Faults(), changes=True) for seed in range(30, 200))
    assert any(words in result.violation for result in results)


def test_the_command_repeats_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_weights(monkeypatch)
    words = ["--seeds", "2", "--first", "10", "--changes", "--processes", "1", "--policy", "edf", "--fault", "crash=0"]
    text = CliRunner().invoke(app, ["fuzz", *words]).stdout
    (again, *_) = re.findall(r"tilework fuzz (--seed .*)", text)
    assert "--changes" in again
    assert "--keep-changes" in again
    repeated = CliRunner().invoke(app, ["fuzz", *again.split(), "--json"])
    assert repeated.exit_code == 1
    (violation,) = json.loads(repeated.stdout)["violations"]
    assert "which nothing needs any more" in violation["violation"]


def test_a_change_that_there_is_not_is_named() -> None:
    result = CliRunner().invoke(app, ["fuzz", "--seed", "1", "--changes", "--keep-changes", "77"])
    assert "--keep-changes 77: seed 1 has" in str(result.exception)


# Deadlines of others.

SERVED, BESIDE, COMING = "toy", "beside", "coming"


def weighing(pipeline: str, digest: str) -> CostTable:
    """A model whose three stages have a component each; a device has room for those of two models."""
    costs = table(degrees=(1, 2), pipeline=pipeline)
    specs = [replace(spec, components=(spec.name,)) for spec in costs.graph(pipeline).specs]
    return replace(
        costs,
        graphs={pipeline: Graph(pipeline, tuple(specs))},
        components={pipeline: {spec.name: Component(f"{digest} {spec.name}", MIB) for spec in specs}},
        memory_bytes=6 * MIB,
        load_bytes_per_s={LoadSource.DISK: 20.0 * MIB, LoadSource.HOST: 100.0 * MIB},
    )


def busy_requests(random: Random) -> list[Request]:
    """Four fifths of what four devices can do, most for the model that is watched."""
    requests, at_s = list[Request](), 0.0
    for index in range(150):
        at_s += random.expovariate(0.8 * 4 / SERVICE_S)
        one = request(str(index), at_s, slo_s=random.uniform(2, 5) * SERVICE_S)
        requests.append(replace(one, pipeline=random.choice((SERVED, SERVED, BESIDE))))
    return requests


def changes_beside(random: Random, end_ns: int) -> list[TimedChange]:
    """About one a second: models that come and go, and LoRAs of the model beside; none of those that are in use."""
    lora = Lora(changes=frozenset({"diffuse"}), component=Component("lora", MIB // 8))
    kinds: list[Callable[[int], Change]] = [
        lambda number: ServeModel(costs=weighing(COMING, random.choice((BESIDE, f"change {number}")))),
        lambda _: RemoveModel(pipeline=COMING),
        lambda _: AddLora(pipeline=BESIDE, name="ink", lora=lora),
        lambda _: RemoveLora(pipeline=BESIDE, name="ink"),
        lambda _: ServeModel(costs=replace(weighing(COMING, BESIDE), hardware="another machine"), is_unusable=True),
    ]
    times_ns = sorted(random.randrange(end_ns) for _ in range(end_ns // NS_PER_S))
    return [
        TimedChange(number=number, at_ns=at_ns, change=random.choice(kinds)(number))
        for number, at_ns in enumerate(times_ns)
    ]


@pytest.mark.parametrize("policy", FEW_POLICIES)
def test_requests_of_other_models_keep_their_deadlines(policy: str) -> None:
    """Within 2 points of those without changes."""
    on_time = {True: 0, False: 0}
    total = made = 0
    for seed in range(2):
        requests = busy_requests(Random(seed))
        changes = changes_beside(Random(seed), requests[-1].arrival_ns)
        for is_changing in (True, False):
            both = merged([weighing(SERVED, SERVED), weighing(BESIDE, BESIDE)])
            simulation = Simulation(ControllerConfig(policy=policy), both, SimConfig(num_devices=4, seed=seed))
            trace = simulation.run(requests, changes=changes if is_changing else ())
            watched = [one for one in trace.endings if one.request.pipeline == SERVED]
            on_time[is_changing] += sum(one.on_time for one in watched)
            made += simulation.catalog.num_made
        total += len(watched)
    assert made > 20
    assert abs(on_time[True] - on_time[False]) <= 0.02 * total, f"{on_time} of {total}"


def test_a_crash_of_the_server_keeps_what_was_added() -> None:
    """A durable server begins with what the one before it served."""
    faults = parse_faults(["restart=0.02:1"])
    results = [run_seed(seed, "edf", faults, changes=True) for seed in range(12)]
    assert not [result.violation for result in results if result.violation]
    assert sum(result.fault_counts["restart"] for result in results) > 3
