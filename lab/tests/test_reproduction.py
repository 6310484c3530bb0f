"""lab/docs/reproduction.md: every command in it runs, small, and every figure that is remade stands there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilework.cli.app import app
from tilework.policy.registry import policy_names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "lab" / "docs" / "reproduction.md"
BENCH = ("python", "lab/bench/run.py")
OF_THE_PRODUCT = ("python", "bench/run.py")
"""Cases of the product's bench, which its own tests try."""
READ_COMMANDS = """
import json, sys
from run import CASES, app
from typer.main import get_command

for args in json.loads(sys.argv[1]):
    get_command(app).make_context("run.py", args)
    assert {arg for arg in args if arg[0] != "-"} <= set(CASES), args
print(json.dumps(list(CASES)))
"""
REMAKE_SMALL = """
import json, sys
from figures.papers import Paper

finding = Paper(figure=sys.argv[1], seeds=1, processes=1, out="", requests=4, brief=True).measure(lambda text: None)
assert all(picture.png.startswith(b"\\x89PNG") for picture in finding.pictures)
print(json.dumps(len(finding.tables)))
"""
POLICIES = """
import json
import figures.papers
from tilework.policy.registry import policy_names

print(json.dumps(policy_names()))
"""


def in_the_bench(program: str, *args: str) -> Any:
    """What a program prints, in a process of its own, since the bench registers policies."""
    places = ("src", "lab/src", "lab/bench", "bench", "tests")
    env = {"PYTHONPATH": ":".join(str(ROOT / place) for place in places), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program, *args], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def commands() -> list[list[str]]:
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def figures() -> list[str]:
    """Those that commands of the page remake, one by one."""
    return sorted({arg for one in commands() if tuple(one[:2]) == BENCH for arg in one[2:] if not arg.startswith("-")})


def small(args: list[str]) -> list[str]:
    """The same comparison with two requests and one seed, which keeps and draws nothing."""
    kept = []
    for option, value in zip(args[::2], args[1::2], strict=True):
        if option == "--workload":
            kept += [option, re.sub(r",num=\d+$", "", value) + ",num=2"]
        elif option not in ("--seeds", "--out", "--plot", "--processes"):
            kept += [option, value]
    return [*kept, "--seeds", "1", "--processes", "1", "--json"]


def test_the_page_has_commands_of_the_known_forms_only() -> None:
    found = commands()
    known = (BENCH, OF_THE_PRODUCT, ("tilework", "compare"))
    others = [one for one in found if tuple(one[:2]) not in known]
    assert others == []
    assert found


@pytest.mark.parametrize("command", [one for one in commands() if one[0] == "tilework"], ids=" ".join)
def test_a_comparison_runs(command: list[str]) -> None:
    result = CliRunner().invoke(app, ["compare", *small(command[2:])])
    assert result.exit_code == 0, result.output
    cells = json.loads(result.stdout)["cells"]
    asked = command[command.index("--policies") + 1].split(",")
    assert len(cells) == command.count("--workload")
    assert all(set(cell["policies"]) == set(asked) for cell in cells)


@pytest.mark.slow
def test_a_seed_is_the_same_scenario_in_the_bench() -> None:
    """Its policies are not among those that a seed chooses from."""
    assert in_the_bench(POLICIES) == policy_names()


@pytest.mark.slow
def test_commands_are_read_and_remake_every_figure() -> None:
    asked = [command[len(BENCH) :] for command in commands() if tuple(command[:2]) == BENCH]
    assert sorted(in_the_bench(READ_COMMANDS, json.dumps(asked))) == sorted([*figures(), "yardsticks"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("figure", figures())
def test_a_figure_can_be_remade(figure: str) -> None:
    assert in_the_bench(REMAKE_SMALL, figure) > 0


def test_the_pictures_are_there_and_small() -> None:
    names = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGE.read_text("utf-8"))
    assert names
    assert all((PAGE.parent / name).stat().st_size < 150_000 for name in names)
