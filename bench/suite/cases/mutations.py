"""Mutation testing: whether simulation and tests catch small bugs in the controller and the policies."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.mutant_trials import (
    ALL_CASES,
    NUM_PARTS,
    THE_COMMIT,
    Copies,
    Mutated,
    Trial,
    all_cases,
    drawn,
    of_a_commit,
    population,
    until_one_fails,
)
from suite.stats import exact

# The fastest first; a mutant is dead when the first of them fails. Tests that start processes are left out.
TESTS = (
    "control/test_controller.py",
    "control/cluster/test_queue.py",
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
_SIMULATION = "simulation"
_FUZZ = (
    "import sys; from tilework.sim.fuzz import run_seeds; "
    "sys.exit(any(v.violation for v in run_seeds(range(int(sys.argv[1])), None, None, 1)))"
)


@dataclass(frozen=True, slots=True)
class _Fate:
    mutated: Mutated
    killer: str | None


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
        chosen = drawn(self.packages, self.num_mutants, self.seed)
        fates: list[_Fate] = []
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(self.num_processes) as pool:
            copies = Copies(Path(scratch), self.num_processes)
            started_s = time.monotonic()
            if (notice := copies.first_to_notice(self._trials(0), timeout_s=None)) is not None:
                raise CaseFailed(f"without any mistake, {notice.trial} fail: {notice.said}")
            timeout_s = self.patience * (time.monotonic() - started_s)
            trials = [self._trials(index % NUM_PARTS) for index in range(len(chosen))]
            notices = pool.map(lambda one, trials: copies.first_to_notice(trials, timeout_s, [one]), chosen, trials)
            for mutated, by in zip(chosen, notices, strict=True):
                fates.append(_Fate(mutated, by.trial if by else None))
                alive = sum(fate.killer is None for fate in fates)
                note(f"{len(fates)} of {self.num_mutants} mutants, {alive} alive")
        return self._finding(fates, len(population(self.packages)))

    def _trials(self, part: int) -> tuple[Trial, ...]:
        tests = tuple(f"tests/{name}" for name in TESTS)
        fuzz = Trial(_SIMULATION, ("-c", _FUZZ, str(self.fuzz_seeds)))
        return fuzz, until_one_fails(of_a_commit(part, tests)), until_one_fails(all_cases(tests))

    def _finding(self, fates: list[_Fate], num_possible: int) -> Finding:
        killers = Counter(fate.killer for fate in fates)
        share = 100 * (len(fates) - killers[None]) / len(fates)
        checks = (
            Check(what="mutants killed", measured=exact(share), low=90.0, unit="%"),
            Check(what="mutants that only all cases catch", measured=exact(killers[ALL_CASES]), high=0),
        )
        rows = tuple((*fate.mutated.row, fate.killer or "none") for fate in fates if fate.killer in (None, ALL_CASES))
        return Finding(
            checks=checks,
            method=(
                f"{len(fates)} of {num_possible} mutants, drawn at random: a comparison, operator, number, condition "
                "or call that is another, or a statement that is missing. Texts, assertions and errors are left alone.",
                f"Each is run on {self.fuzz_seeds} fuzz scenarios; what lives is run against {len(TESTS)} test files, "
                "with one of ten parts of their matrices, the parts in turn, and what still lives with all cases.",
                "Some of the living are no mistakes: they decide the same, or do the same more slowly.",
            ),
            facts={
                **{f"caught by {name}": killers[name] for name in (_SIMULATION, THE_COMMIT)},
                "alive": killers[None],
            },
            tables=(
                Table(
                    title=f"Not caught by {THE_COMMIT}", columns=("module", "line", "was", "is", "caught by"), rows=rows
                ),
            ),
        )
