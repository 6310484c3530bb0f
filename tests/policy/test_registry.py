"""Policies by name: those that ship, those of other packages, and any class by its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from builders import Idle, poisson, simulate, table
from tilework import entry_points
from tilework.cli.app import app
from tilework.cost.table_file import table_json
from tilework.policy import registry
from tilework.policy.registry import SHIPPED, UnknownPolicy, make_policy, policy_names
from tilework.sim.workloads import registry as workloads

MODULE = """
from tilework.policy.published.edf import EarliestDeadlineFirst

class LatestFirst(EarliestDeadlineFirst):
    def urgency_ns(self, request, dropped_to_best_effort, delay_ns=0):
        return -request.arrival_ns

class Unfinished:
    def plan(self, view, costs, now_ns): ...

def wants_one(argument): ...

class Fails:
    def __init__(self):
        1 / 0

NUMBER = 7
"""
RUSH = """
from dataclasses import dataclass
from tilework.sim.workloads.synthetic import HeavyTail

@dataclass(frozen=True, slots=True, kw_only=True)
class Rush(HeavyTail):
    name = "rush"
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, text in (("mine", MODULE), ("broken", "def"), ("lacking", "import not_there_at_all")):
        (tmp_path / f"{name}_of_a_test.py").write_text(text, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "mine_of_a_test"


def declare(monkeypatch: pytest.MonkeyPatch, group: str, places: dict[str, str]) -> None:
    found = entry_points.declared_places
    given = {group: places}
    for module in (registry, workloads):
        monkeypatch.setattr(module, "declared_places", lambda asked: given.get(asked) or found(asked))


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_what_ships_is_there_without_any_other_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "declared_places", lambda group: {})
    assert policy_names() == sorted(SHIPPED)
    assert type(make_policy(name)).__module__.startswith("tilework.policy.")


def test_a_class_is_a_policy_by_its_place(own_module: str, tmp_path: Path) -> None:
    requests = poisson(12, 2.0, seed=1)
    place = f"{own_module}:LatestFirst"
    assert simulate(requests, place).endings != simulate(requests, "edf").endings
    lines = [{"arrival_s": at_s, "pipeline": "toy", "height": 64, "width": 64, "steps": 4} for at_s in (0, 0.1, 0.2)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    (tmp_path / "c.json").write_text(json.dumps(table_json(table())), "utf-8")
    log = str(tmp_path / "log.jsonl")
    files = [str(tmp_path / "r.jsonl"), "--cost", str(tmp_path / "c.json")]
    done = CliRunner().invoke(app, ["simulate", *files, "--policy", place, "--events", log])
    assert done.exit_code == 0, done.output
    replayed = CliRunner().invoke(app, ["replay", log])
    assert replayed.exit_code == 0, replayed.output


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("no_such.module:Policy", r"no module 'no_such' on Python's path; run it with its folder in PYTHONPATH"),
        ("{}:Missing", r"module '{}' has no 'Missing'"),
        ("{}:latestFirst", r"has no 'latestFirst'; did you mean 'LatestFirst'\?"),
        ("{}:Unfinished", r"is a Unfinished, which lacks urgency_ns, degrees, demand; give a class"),
        ("{}:wants_one", r"TypeError: wants_one.* missing 1 .*; it is built without arguments \(functools.partial"),
        ("{}:Fails", r"ZeroDivisionError: division by zero at .*{}\.py:1\d; it is built without"),
        ("{}:NUMBER", r"is a int; give a class, or a function that builds one"),
        ("{}.py:LatestFirst", r"'{}\.py' is no module; write {}:LatestFirst, with its folder in PYTHONPATH"),
        (":LatestFirst", r"'' is no module; write module:LatestFirst"),
        ("broken_of_a_test:Policy", r"module 'broken_of_a_test' cannot be imported: SyntaxError"),
        ("lacking_of_a_test:Policy", r"cannot be imported: it imports 'not_there_at_all', which is missing"),
    ],
)
def test_a_place_that_is_no_policy_is_named_with_the_remedy(place: str, message: str, own_module: str) -> None:
    with pytest.raises(UnknownPolicy, match=message.replace("{}", own_module)):
        make_policy(place.replace("{}", own_module))


def test_packages_declare_policies_but_take_no_name_that_ships(
    own_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{own_module}:LatestFirst"
    declare(monkeypatch, registry.ENTRY_POINTS, {"latest": place, "edf": place})
    assert type(make_policy("latest")).__name__ == "LatestFirst"
    assert type(make_policy("edf")).__name__ == "EarliestDeadlineFirst"
    assert policy_names() == sorted([*SHIPPED, "latest"])
    with pytest.raises(UnknownPolicy, match=r"did you mean 'latest'\?"):
        make_policy("lates")


def test_without_the_lab_its_policies_are_hinted_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "declared_places", lambda group: {})
    with pytest.raises(UnknownPolicy, match=r"'srtf' does not exist; .*policies of papers come with .* pip install"):
        make_policy("srtf")


def test_a_declared_workload_is_checked_and_hides_no_other(own_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, workloads.ENTRY_POINTS, {"odd": f"{own_module}:LatestFirst"})
    assert workloads.family("mixes").name == "mixes"
    with pytest.raises(workloads.UnknownWorkload, match=r"workload 'odd' is no class derived from .*Family"):
        workloads.family("odd")
    listed = CliRunner().invoke(app, ["workload", "list"])
    assert listed.exit_code == 0
    assert "heavy-tail" in listed.stdout


def test_a_workload_by_its_place_is_shown(own_module: str, tmp_path: Path) -> None:
    (tmp_path / "rush_of_a_test.py").write_text(RUSH, "utf-8")
    shown = CliRunner().invoke(app, ["workload", "show", "rush_of_a_test:Rush", "--num", "5"])
    assert shown.exit_code == 0, shown.output
    assert "5 requests" in shown.stdout
    missing = CliRunner().invoke(app, ["workload", "show", "rush_of_a_test:Rash"])
    assert "did you mean 'Rush'?" in str(missing.exception)


def test_a_name_is_given_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_GIVEN", {})
    registry.register("mine", Idle)
    assert isinstance(make_policy("mine"), Idle)
    assert "mine" not in policy_names()
    for taken in ("mine", "edf"):
        with pytest.raises(AssertionError, match=f"two policies are called {taken}"):
            registry.register(taken, Idle)
