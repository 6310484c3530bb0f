"""Each case of the exhaustive matrices runs within ten commits, and a sample that fails says how to repeat it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import sampling

MATRIX = """
import pytest

@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(200))
def test_of_a_matrix(number): assert number != {wrong}

def test_of_none(): pass
"""


RUN = """
import os, pytest, sys
status = int(pytest.main(sys.argv[1:]))
sys.stdout.flush()
os._exit(status)
"""
"""As a process ends that was forked to try a broken source: without what Python does at the exit."""
TEMPORARY = "temporary"


def run(tmp_path: Path, *options: str, wrong: int = -1) -> str:
    """What pytest prints of a matrix of 200 cases, and of one test that is in none, by this suite's conftest."""
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "conftest.py").read_text("utf-8"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers = exhaustive: a\npythonpath = {Path(__file__).parent}\n")
    (tmp_path / "test_matrix.py").write_text(MATRIX.format(wrong=wrong))
    (tmp_path / TEMPORARY).mkdir()
    command = [sys.executable, "-c", RUN, "-rA", *options]
    alone = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TMPDIR": str(tmp_path / TEMPORARY),
    }  # Seconds to load.
    alone.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False).stdout


def passed(output: str) -> list[str]:
    return [line.removeprefix("PASSED ") for line in output.splitlines() if line.startswith("PASSED ")]


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.slow), ("-p", "xdist.plugin", "-n", "2")])
def test_a_run_has_its_part_of_the_matrix_and_all_that_is_in_none(tmp_path: Path, options: Sequence[str]) -> None:
    cases = [f"test_matrix.py::test_of_a_matrix[{number}]" for number in range(200)]
    expected = {case for case in cases if sampling.part_of(case) == 3}
    assert set(passed(run(tmp_path, "--part", "3", *options))) == expected | {"test_matrix.py::test_of_none"}


def test_the_parts_are_of_one_size_nearly() -> None:
    counts = Counter(sampling.part_of(f"test_matrix.py::test_of_a_matrix[{number}]") for number in range(1000))
    assert counts.keys() == set(range(sampling.PARTS))
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_a_run_without_a_part_has_all_cases(tmp_path: Path) -> None:
    assert len(passed(run(tmp_path))) == 201


def test_a_run_leaves_no_folder_of_its_own_behind(tmp_path: Path) -> None:
    output = run(tmp_path, "-k", "of_none")
    assert len(passed(output)) == 1
    assert not list((tmp_path / TEMPORARY).iterdir())


def test_a_part_that_fails_says_how_to_run_the_case_and_the_part_again(tmp_path: Path) -> None:
    case = "test_matrix.py::test_of_a_matrix[7]"
    part = sampling.part_of(case)
    output = run(tmp_path, "--part", str(part), wrong=7)
    assert f"part {part} of 0 to 9" in output
    assert f"python -m pytest '{case}'" in output
    assert f"make slow PART={part}" in output


def due(answers: dict[tuple[str, ...], str]) -> int | None:
    """The part by what git answers."""
    here = {("rev-parse", "--show-toplevel"): str(Path(sampling.__file__).resolve().parents[1])}
    return sampling.part_from(sampling.BY_COMMIT, lambda *words: (here | answers)[words])


def test_consecutive_commits_take_all_parts() -> None:
    def history(count: int) -> int | None:
        return due({("rev-parse", "--is-shallow-repository"): "false", ("rev-list", "--count", "HEAD"): str(count)})

    for first in (1, 7, 1234):
        assert {history(count) for count in range(first, first + sampling.PARTS)} == set(range(sampling.PARTS))


def test_a_shallow_clone_takes_a_part_by_the_hash_of_its_commit() -> None:
    answers = {("rev-parse", "--is-shallow-repository"): "true", ("rev-parse", "HEAD"): "2b"}
    assert due(answers) == 0x2B % sampling.PARTS


def test_the_history_of_a_repository_around_the_tree_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(pytest.UsageError, match=f"lies in another one, {tmp_path}"):
        due({("rev-parse", "--show-toplevel"): str(tmp_path)})


@pytest.mark.parametrize("text", ["10", "-1", "some", "²"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"choose all, commit, or a number from 0 to 9"):
        sampling.part_from(text, lambda *_: "")


def test_without_git_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.UsageError, match=r"No such file or directory.*give --part all or a number"):
        sampling.part_from(sampling.BY_COMMIT, sampling.git)


def test_the_reason_of_git_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    with pytest.raises(pytest.UsageError, match="not a git repository: '/nonexistent'"):
        sampling.part_from(sampling.BY_COMMIT, sampling.git)
