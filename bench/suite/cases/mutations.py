"""Mutation testing: what simulation and the tests of one commit catch of injected bugs, and what only all cases do."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Self

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.mutant_trials import (
    ALL_CASES,
    NUM_PARTS,
    ROOT,
    THE_COMMIT,
    Copies,
    Mutated,
    Notice,
    Trial,
    all_cases,
    drawn,
    of_a_commit,
    until_one_fails,
)
from suite.stats import exact

_SIMULATION = "simulation"
_FUZZ = (
    "import sys; from tilework.sim.fuzz import Choice, run_seeds; "
    "sys.exit(any(v.violation for v in run_seeds(range(int(sys.argv[1])), Choice(), 1)))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutations:
    """`num_mutants` drawn from `packages`: each is tried by the tests of its room, those of a commit, then all cases.

    The tests of a commit are those of `make test` and `make slow`, with one part of the matrices: the parts take turns.
    `fuzz_seeds` scenarios are simulated, too, if there are any. What takes more than `timeout_s`, or `patience` times
    as long to simulate as without a mistake, has noticed.
    """

    packages: tuple[str, ...] = ("admission", "control", "policy")
    num_mutants: int = 60
    seed: int = 1
    fuzz_seeds: int = 60
    least_percent: float = 90.0
    timeout_s: float = 3600.0
    patience: float = 4.0
    num_processes: int = field(default_factory=lambda: os.cpu_count() or 1)

    @classmethod
    def make(cls, quick: bool) -> Self:
        case = cls()
        few_seeds = min(8, case.fuzz_seeds)
        return replace(case, packages=("core",), num_mutants=4, fuzz_seeds=few_seeds) if quick else case

    def measure(self, note: Note) -> Finding:
        chosen = drawn(self.packages, self.num_mutants, self.seed)
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(self.num_processes) as pool:
            copies = Copies(Path(scratch), self.num_processes)
            rooms = sorted({_room(one) for one in chosen})
            note(f"{', '.join(rooms)}: their tests without any mistake")
            for room, failed in zip(rooms, pool.map(partial(_unharmed, copies), rooms), strict=True):
                if failed is not None:
                    raise CaseFailed(f"without any mistake, a test of tests/{room} fails: {' '.join(failed.tests)}")
            notices = pool.map(partial(self._alone, copies, self._fuzz_s(copies)), chosen, range(len(chosen)))
            found = list(_told(chosen, notices, note))
            living = [one for one, notice in found if notice is None]
            note(f"{len(living)} alive: the other tests of their rooms, with one part")
            groups = _groups(living)
            missed = _flat(pool.map(partial(self._unnoticed, copies), groups, map(_of_group, groups, count())))
            note(f"{len(missed)} alive: all cases of their rooms")
            groups = _groups(missed)
            never = _flat(pool.map(partial(self._unnoticed, copies), groups, map(_in_full, groups)))
        by = Counter(notice.trial for _, notice in found if notice is not None)
        return self._finding(by[_SIMULATION], missed, never)

    def _fuzz_s(self, copies: Copies) -> float:
        """How long simulation may take."""
        started_s = time.monotonic()
        if copies.first_to_notice(self._fuzz(), None) is not None:
            raise CaseFailed(f"without any mistake, a scenario of seeds 0 to {self.fuzz_seeds - 1} fails")
        return self.patience * (time.monotonic() - started_s)

    def _fuzz(self) -> list[Trial]:
        return [Trial(_SIMULATION, ("-c", _FUZZ, str(self.fuzz_seeds)))] if self.fuzz_seeds else []

    def _alone(self, copies: Copies, fuzz_s: float, mutated: Mutated, index: int) -> Notice | None:
        """What the files of tests that name its module say, then simulation: most mutants end here."""
        module = mutated.module.removesuffix(".py").replace("/", ".")
        files = sorted((ROOT / "tests" / _room(mutated)).rglob("test_*.py"))
        near = [str(path.relative_to(ROOT)) for path in files if module in path.read_text("utf-8")]
        tests = [until_one_fails(of_a_commit(index % NUM_PARTS, near))] if near else []
        notice = copies.first_to_notice(tests, self.timeout_s, [mutated])
        return notice or copies.first_to_notice(self._fuzz(), fuzz_s, [mutated])

    def _unnoticed(self, copies: Copies, group: Sequence[Mutated], trial: Trial) -> Sequence[Mutated]:
        """Those that a trial does not notice: tried together, and each alone by the tests that failed.

        Where none is said to have failed, as when the process has died, each half is tried.
        """
        together = copies.first_to_notice([trial], self.timeout_s, group)
        if together is None:
            return group
        if together.again is None:
            middle = len(group) // 2
            halves = (group[:middle], group[middle:]) if middle else ()
            return [one for half in halves for one in self._unnoticed(copies, half, trial)]
        alone = until_one_fails(together.again)
        return [one for one in group if copies.first_to_notice([alone], self.timeout_s, [one]) is None]

    def _finding(self, by_simulation: int, missed: Sequence[Mutated], never: Sequence[Mutated]) -> Finding:
        num_lost = len(missed) - len(never)
        num_caught = self.num_mutants - len(missed)
        percent = 100 * num_caught / self.num_mutants
        simulated = f" What these miss is simulated in {self.fuzz_seeds} fuzz scenarios." if self.fuzz_seeds else ""
        return Finding(
            checks=(
                Check(what="mutants caught at a commit", measured=exact(percent), low=self.least_percent, unit="%"),
                Check(what="mutants that only all cases catch", measured=exact(num_lost), high=0),
            ),
            method=(
                "A comparison, operator, number, condition or call that is another, or a statement that is missing, in "
                f"{', '.join(self.packages)}. Texts, assertions and errors are left alone.",
                "Each is tried by the tests of its room (tests/ mirrors src/tilework), slow ones included, first by "
                f"the files that name its module, with one of ten parts of the matrices, the parts in turn.{simulated} "
                "What lives is tried by the other tests of its room, then by all cases; those that live long are tried "
                "together, each in another module.",
                "Some of the living are no mistakes: they decide the same, or do the same more slowly.",
            ),
            facts={
                "mutants": self.num_mutants,
                **({f"caught by {_SIMULATION} first": by_simulation} if self.fuzz_seeds else {}),
                f"caught by {THE_COMMIT} first": num_caught - by_simulation,
                f"caught by {ALL_CASES} alone": num_lost,
            },
            tables=(
                Table(
                    title=f"Not caught by {THE_COMMIT}",
                    columns=("module", "line", "was", "is", "caught by"),
                    rows=tuple((*one.row, "none" if one in never else ALL_CASES) for one in missed),
                ),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled(Mutations):
    """The same of packages that no simulation reaches, and whose matrices are the largest."""

    packages: tuple[str, ...] = ("server/calls", "runtime", "worker", "pipelines")
    num_mutants: int = 40
    seed: int = 79
    fuzz_seeds: int = 0
    least_percent: float = 80.0


def _room(mutated: Mutated) -> str:
    """The folder of tests for a module: `server` for `tilework/server/calls/table.py`."""
    return Path(mutated.module).parts[1]


def _unharmed(copies: Copies, room: str) -> Notice | None:
    """What fails without any mistake, twice: the room together, and then what failed of it."""
    failed = copies.first_to_notice([_of_room(room, 0)], None)
    return failed and copies.first_to_notice([failed.again or _of_room(room, 0)], None)


def _of_room(room: str, part: int) -> Trial:
    return of_a_commit(part, [f"tests/{room}"])


def _of_group(group: Sequence[Mutated], number: int) -> Trial:
    return _of_room(_room(group[0]), number % NUM_PARTS)


def _in_full(group: Sequence[Mutated]) -> Trial:
    return all_cases([f"tests/{_room(group[0])}"])


def _told(
    chosen: Sequence[Mutated], notices: Iterable[Notice | None], note: Note
) -> Iterator[tuple[Mutated, Notice | None]]:
    for number, (mutated, notice) in enumerate(zip(chosen, notices, strict=True), 1):
        by = (" ".join(notice.tests) or notice.said) if notice else "alive"
        note(f"{number} of {len(chosen)}, line {mutated.row[1]} of {mutated.module}: {by}")
        yield mutated, notice


def _groups(mutants: Sequence[Mutated]) -> list[list[Mutated]]:
    """Groups of mutants of one room, each of another module, so that they can live in one copy."""
    groups: list[list[Mutated]] = []
    for one in mutants:
        fits = (
            group
            for group in groups
            if _room(group[0]) == _room(one) and all(other.module != one.module for other in group)
        )
        if (group := next(fits, None)) is None:
            groups.append(group := [])
        group.append(one)
    return groups


def _flat(groups: Iterable[Sequence[Mutated]]) -> list[Mutated]:
    return [one for group in groups for one in group]
