"""Runs tests on code with a mistake: copies of the source, in each of which one mutant lives at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from random import Random

from suite.mutants import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tilework"
NUM_PARTS = 10  # of the matrices: `tests/sampling.py`
THE_COMMIT, ALL_CASES = "the tests of a commit", "all cases"
_LIMIT = ("--timeout", "200", "--timeout-method", "thread")  # Of one test; it ends deaf threads, too.
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *_LIMIT)
_later_s = count(1)
_PATIENCE_S = "60"  # Of a wait in a test: a mistake often shows by what never comes.
_NO_TESTS = 5  # exit status of pytest when it selected none
_FOLDERS = ("src", "tests", "bench", "docs", "training", "deploy", "examples", "web")


@dataclass(frozen=True, slots=True)
class Mutated:
    """A mutant of a module, whose path is relative to `src`."""

    module: str
    mutant: Mutant

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Module, line, what stood there, and what stands there now."""
        return self.module, str(self.mutant.line), self.mutant.before, self.mutant.after


@dataclass(frozen=True, slots=True)
class Trial:
    """Arguments of Python, run in a copy, that exit with 0 if they notice nothing."""

    name: str
    words: tuple[str, ...] = field(repr=False)


def of_a_commit(part: int, tests: Iterable[str]) -> Trial:
    """These tests as a commit runs them: with one part of the matrices."""
    return Trial(THE_COMMIT, (*_PYTEST, "--part", str(part), *tests))


def all_cases(tests: Iterable[str]) -> Trial:
    """The matrices in these tests, in full."""
    return Trial(ALL_CASES, (*_PYTEST, "-m", "exhaustive", *tests))


def until_one_fails(trial: Trial) -> Trial:
    """The same tests; the first that fails ends them."""
    return Trial(trial.name, (*trial.words, "-x"))


def population(packages: Sequence[str]) -> list[Mutated]:
    """Every mutant of every module of these packages, which are paths below `tilework`."""
    paths = [path for package in packages for path in sorted((SOURCE / package).rglob("*.py"))]
    return [
        Mutated(str(path.relative_to(ROOT / "src")), mutant)
        for path in paths
        for mutant in mutants_of(path.read_text("utf-8"))
    ]


def drawn(packages: Sequence[str], number: int, seed: int) -> list[Mutated]:
    """So many of them, at random."""
    return Random(seed).sample(population(packages), number)


@dataclass(frozen=True, slots=True)
class Notice:
    """The first trial that fails, the tests that failed in it, and the last line that it printed."""

    trial: str
    tests: tuple[str, ...]
    said: str

    @property
    def again(self) -> Trial | None:
        """The tests that failed; None if it ended without saying which."""
        return Trial(self.trial, (*_PYTEST, *self.tests)) if self.tests else None


class Copies:
    """Copies of source and tests, so that several mutants can be tried at once."""

    def __init__(self, scratch: Path, number: int) -> None:
        self._places: SimpleQueue[Path] = SimpleQueue()
        for index in range(number):
            self._places.put(_copy(scratch / str(index)))

    def first_to_notice(
        self, trials: Iterable[Trial], timeout_s: float | None, mutants: Sequence[Mutated] = ()
    ) -> Notice | None:
        """The first trial that fails, or takes longer than `timeout_s`; None if none does.

        Several mutants, each of another module, are tried together.
        """
        with self._place() as place, ExitStack() as stack:
            for mutated in mutants:
                stack.enter_context(_in_place_of(place, mutated))
            return next((notice for one in trials if (notice := _tried(place, timeout_s, one)) is not None), None)

    @contextmanager
    def _place(self) -> Iterator[Path]:
        place = self._places.get()
        try:
            yield place
        finally:
            self._places.put(place)


@contextmanager
def _in_place_of(place: Path, mutated: Mutated) -> Iterator[None]:
    path = place / "src" / mutated.module
    original, time_s = path.read_text("utf-8"), int(path.stat().st_mtime)
    _write(path, mutated.mutant.text, time_s + next(_later_s))
    try:
        yield
    finally:
        _write(path, original, time_s)


def _write(path: Path, text: str, time_s: int) -> None:
    """With a time of its own, in seconds, by which Python tells whether what it has compiled is of this text."""
    path.write_text(text, "utf-8")
    os.utime(path, (time_s, time_s))


def _tried(place: Path, timeout_s: float | None, trial: Trial) -> Notice | None:
    environment = {**os.environ, "PYTHONPATH": str(place / "src"), "TESTS_PATIENCE_S": _PATIENCE_S}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, *trial.words]
    try:
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Notice(trial.name, (), f"took more than {timeout_s:.0f} s")
    if done.returncode in (0, _NO_TESTS):
        return None
    lines = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
    failed = [line.partition(" ")[2].partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return Notice(trial.name, tuple(failed), lines[-1])


def _copy(target: Path) -> Path:
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / name, target / name)
    return target
