"""Mutation testing: whether simulation and tests catch small bugs in the controller and the policies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from random import Random

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.mutants import Mutant, mutants_of
from suite.stats import exact

ROOT = Path(__file__).parents[3]
# The fastest first; a mutant is dead when the first of them fails. Tests that start processes are left out.
TESTS = (
    "control/test_controller.py",
    "control/test_queue.py",
    "policy/test_policy.py",
    "admission/test_list_schedule.py",
    "admission/test_reservation_timeline.py",
    "admission/test_eta.py",
    "admission/test_admission_limits.py",
    "policy/toolkit/test_buddy_allocator.py",
    "admission/test_eta_correction.py",
    "control/test_watchdog.py",
    "control/test_recovery.py",
    "control/test_predictions.py",
    "cost/test_requests.py",
    "control/test_account.py",
    "control/test_log.py",
    "control/test_fairness.py",
    "cli/test_explain.py",
    "admission/test_reservations.py",
    "control/test_stateful.py",
    "policy/published/test_tetriserve.py",
    "sim/test_simulation.py",
    "admission/test_reservation_guard.py",
)
_FUZZ = (
    "import sys; from tilework.sim.fuzz import run_seeds; "
    "sys.exit(any(v.violation for v in run_seeds(range(int(sys.argv[1])), None, None, 1)))"
)


@dataclass(frozen=True, slots=True)
class _Fate:
    module: str
    mutant: Mutant
    killer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutations:
    """`num_mutants` drawn from all of `packages`; each is run on `fuzz_seeds` scenarios, and if it lives, by the tests.

    One that takes `patience` times as long as the code without a mistake is dead, too.
    """

    packages: tuple[str, ...] = ("admission", "control", "policy")
    num_mutants: int = 60
    fuzz_seeds: int = 60
    seed: int = 1
    patience: float = 4.0
    num_processes: int = field(default_factory=lambda: os.cpu_count() or 1)

    @classmethod
    def make(cls, quick: bool) -> Mutations:
        return cls(num_mutants=4, fuzz_seeds=8) if quick else cls()

    def measure(self, note: Note) -> Finding:
        population = [(path, mutant) for path in self._modules() for mutant in mutants_of(path.read_text("utf-8"))]
        chosen = Random(self.seed).sample(population, self.num_mutants)
        fates: list[_Fate] = []
        with tempfile.TemporaryDirectory() as scratch:
            places: SimpleQueue[Path] = SimpleQueue()
            for number in range(self.num_processes):
                places.put(_copy(Path(scratch) / str(number)))
            started_s = time.monotonic()
            if (killer := self._killer(_Copy(places), timeout_s=None)) is not None:
                raise CaseFailed(f"without any mistake, {killer} fails")
            timeout_s = self.patience * (time.monotonic() - started_s)
            with ThreadPoolExecutor(self.num_processes) as pool:
                for fate in pool.map(lambda one: self._fate(one[0], one[1], places, timeout_s), chosen):
                    fates.append(fate)
                    alive = sum(not fate.killer for fate in fates)
                    note(f"{len(fates)} of {self.num_mutants} mutants, {alive} alive")
        return self._finding(fates, len(population))

    def _modules(self) -> list[Path]:
        source = ROOT / "src" / "tilework"
        return [path for package in self.packages for path in sorted((source / package).rglob("*.py"))]

    def _fate(self, path: Path, mutant: Mutant, places: SimpleQueue[Path], timeout_s: float) -> _Fate:
        module = str(path.relative_to(ROOT / "src"))
        killer = self._killer(_Copy(places), timeout_s, module, mutant.text)
        return _Fate(module, mutant, killer or "")

    def _killer(self, copy: _Copy, timeout_s: float | None, module: str = "", text: str = "") -> str | None:
        with copy as place:
            original = None
            if module:
                original = (place / "src" / module).read_text("utf-8")
                (place / "src" / module).write_text(text, "utf-8")
            try:
                if not _passes(place, timeout_s, "-c", _FUZZ, str(self.fuzz_seeds)):
                    return "simulation"
                tests = [str(place / "tests" / name) for name in TESTS]
                pytest = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
                return None if _passes(place, timeout_s, *pytest, *tests) else "tests"
            finally:
                if original is not None:
                    (place / "src" / module).write_text(original, "utf-8")

    def _finding(self, fates: list[_Fate], population: int) -> Finding:
        killers = Counter(fate.killer for fate in fates)
        share = 100 * (len(fates) - killers[""]) / len(fates)
        checks = (Check(what="mutants killed", measured=exact(share), low=90.0, unit="%"),)
        rows = tuple(
            (fate.module, str(fate.mutant.line), fate.mutant.before, fate.mutant.after)
            for fate in fates
            if not fate.killer
        )
        return Finding(
            checks=checks,
            method=(
                f"{len(fates)} of {population} mutants, drawn at random: a comparison, operator, number, condition or "
                "call that is another, or a statement that is missing. Texts, assertions and errors are left alone.",
                f"Each is run on {self.fuzz_seeds} fuzz scenarios; what lives is run against {len(TESTS)} test files.",
                "Some of the living are no mistakes: they decide the same, or do the same more slowly.",
            ),
            facts={"by simulation": killers["simulation"], "by tests": killers["tests"], "alive": killers[""]},
            tables=(Table(title="Alive", columns=("module", "line", "was", "is"), rows=rows),),
        )


def _passes(place: Path, timeout_s: float | None, *words: str) -> bool:
    environment = {**os.environ, "PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=place,
            env=environment,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


class _Copy:
    """One of the copies of the source, for a while."""

    def __init__(self, places: SimpleQueue[Path]) -> None:
        self._places = places

    def __enter__(self) -> Path:
        self._place = self._places.get()
        return self._place

    def __exit__(self, *_: object) -> None:
        self._places.put(self._place)


def _copy(target: Path) -> Path:
    for name in ("src", "tests", "docs", "training"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, target / name)
    return target
