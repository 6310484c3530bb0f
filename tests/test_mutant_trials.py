"""The trials of mutants: what notices a mistake, and what only seems to."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite import mutant_trials
from suite.cases.mutations import Sampled
from suite.mutant_trials import Copies, Mutated, all_cases, of_a_commit, until_one_fails
from suite.mutants import mutants_of

import sampling

SUMS = "def least(a, b):\n    return min(a, b)\n"
SIDES = "def is_wide(width, height):\n    return width > height\n"
CONFTEST = "def pytest_addoption(parser):\n    parser.addoption('--part')\n"
IN_FULL = """
import pytest
from sides import is_wide
from sums import least

def test_any_commit():
    assert least(1, 1) == 1

@pytest.mark.exhaustive
def test_least():
    assert least(1, 2) == 1

@pytest.mark.exhaustive
def test_square():
    assert not is_wide(1, 1)
"""
DEADLY = """
import os
import pytest
from sums import least

@pytest.mark.exhaustive
def test_least():
    if least(1, 2) != 1:
        os._exit(1)
"""
PYPROJECT = "[tool.pytest.ini_options]\nmarkers = ['exhaustive: in full']\n"


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copies:
    root = tmp_path / "checkout"
    for folder in mutant_trials._FOLDERS:
        (root / folder).mkdir(parents=True)
    texts = {"README.md": "", "CHANGELOG.md": "", "Makefile": "", "pyproject.toml": PYPROJECT}
    texts |= {"src/sums.py": SUMS, "src/sides.py": SIDES}
    texts |= {"tests/conftest.py": CONFTEST, "tests/test_all.py": IN_FULL}
    texts["tests/test_deadly.py"] = DEADLY
    texts["tests/test_small.py"] = "def test_nothing():\n    pass\n"
    for name, text in texts.items():
        (root / name).write_text(text)
    monkeypatch.setattr(mutant_trials, "ROOT", root)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # They take longer than the tests.
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    return Copies(tmp_path / "copies", 1)


def mutated(module: str, text: str) -> Mutated:
    return Mutated(module, next(mutants_of(text)))


def test_a_mistake_is_noticed_by_the_tests_that_fail(copies: Copies) -> None:
    mistakes = [mutated("sums.py", SUMS), mutated("sides.py", SIDES)]
    assert copies.first_to_notice([of_a_commit(0, ["tests/test_small.py"])], 60.0, mistakes) is None
    notice = copies.first_to_notice([all_cases(["tests/test_all.py"])], 60.0, mistakes)
    assert notice is not None
    assert notice.again is not None
    assert notice.tests == ("tests/test_all.py::test_least", "tests/test_all.py::test_square")
    first = copies.first_to_notice([until_one_fails(notice.again)], 60.0, mistakes)
    assert first is not None
    assert first.tests == notice.tests[:1]
    assert copies.first_to_notice([notice.again], 60.0) is None, "the mistakes outlive their trial"


def test_a_trial_without_tests_notices_nothing(copies: Copies) -> None:
    assert copies.first_to_notice([all_cases(["tests/test_small.py"])], 60.0, [mutated("sums.py", SUMS)]) is None


def test_of_several_mistakes_those_live_that_no_test_notices_alone(copies: Copies) -> None:
    seen, unseen = mutated("sums.py", SUMS), mutated("sides.py", SIDES)
    trial = all_cases(["tests/test_all.py", "--deselect", "tests/test_all.py::test_square"])
    assert Sampled()._unnoticed(copies, [seen, unseen], trial) == [unseen]
    assert Sampled()._unnoticed(copies, [seen, unseen], all_cases(["tests/test_deadly.py"])) == [unseen]


def test_parts_are_those_of_the_tests() -> None:
    assert mutant_trials.NUM_PARTS == sampling.PARTS
