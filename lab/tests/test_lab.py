"""What the lab declares is there: each policy runs any scenario, each workload has its name, each command its help."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quick import quick
from tilework.cli.app import app
from tilework.policy.registry import SHIPPED, make_policy
from tilework.sim.fuzz import Choice, run_seeds
from tilework.sim.workloads.registry import family

LAB = Path(__file__).parents[1]
GROUPS = tomllib.loads((LAB / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
POLICIES, WORKLOADS = sorted(GROUPS["tilework.policies"]), sorted(GROUPS["tilework.workloads"])
FEW = ("deadline-lru", "trident-b6", "spci", "tridentserve-downtime", "nirvana")
_SEEDS = 12


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_what_is_installed_is_what_the_project_declares(group: str) -> None:
    """An entry that was added since is not found before `make .venv/dev`."""
    installed = {one.name: one.value for one in entry_points(group=group) if one.value.startswith("tilework_lab.")}
    assert installed == GROUPS[group]


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_can_be_built(name: str) -> None:
    assert name not in SHIPPED
    assert callable(make_policy(name).plan)


@pytest.mark.parametrize("name", quick(FEW, POLICIES))
def test_each_policy_keeps_the_invariants_where_things_go_wrong(name: str) -> None:
    results = run_seeds(range(_SEEDS), Choice(policy=name), 1)
    assert [
        f"tilework fuzz --seed {one.seed} --policy {name}: {one.violation}" for one in results if one.violation
    ] == []


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_keeps_its_promises(name: str) -> None:
    results = run_seeds(range(6), Choice(policy=name, is_faultless=True), 1)
    assert [f"--faultless --seed {one.seed} --policy {name}: {one.violation}" for one in results if one.violation] == []


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_has_the_name_that_is_declared(name: str) -> None:
    assert family(name).name == name


@pytest.mark.parametrize("name", sorted(GROUPS["tilework.commands"]))
def test_each_command_has_an_example(name: str) -> None:
    told = CliRunner().invoke(app, [name, "--help"]).stdout
    assert f"tilework {name} " in told.partition("Example")[2]
