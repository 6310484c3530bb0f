"""Mutation testing of the tests themselves: what the tests of one commit catch, of what all cases catch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.mutant_trials import (
    ALL_CASES,
    NUM_PARTS,
    ROOT,
    THE_COMMIT,
    Copies,
    Mutated,
    Trial,
    all_cases,
    drawn,
    of_a_commit,
)
from suite.stats import exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """`num_mutants` drawn from `packages`, each tried by the tests of its room: those of a commit, then all cases.

    The tests of a commit are those of `make test` and `make slow`, with one part of the matrices: the parts take turns.
    A trial that takes more than `timeout_s` has noticed.
    """

    packages: tuple[str, ...] = ("server/calls", "runtime", "worker", "pipelines")
    num_mutants: int = 40
    seed: int = 79
    timeout_s: float = 3600.0
    num_processes: int = field(default_factory=lambda: os.cpu_count() or 1)

    @classmethod
    def make(cls, quick: bool) -> Sampled:
        return cls(packages=("core",), num_mutants=4) if quick else cls()

    def measure(self, note: Note) -> Finding:
        chosen = drawn(self.packages, self.num_mutants, self.seed)
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(self.num_processes) as pool:
            copies = Copies(Path(scratch), self.num_processes)
            for room in sorted({_room(one) for one in chosen}):
                note(f"{room}: its tests without any mistake")
                sound = copies.first_to_notice([of_a_commit(0, [f"tests/{room}"])], None)
                if sound is not None:
                    raise CaseFailed(f"without any mistake, a test of tests/{room} fails: {' '.join(sound.tests)}")
            living: list[Mutated] = []
            trials = [tuple(_trials(one, index % NUM_PARTS)) for index, one in enumerate(chosen)]
            notices = pool.map(
                lambda one, trials: copies.first_to_notice(trials, self.timeout_s, [one]), chosen, trials
            )
            for number, (mutated, notice) in enumerate(zip(chosen, notices, strict=True), 1):
                if notice is None:
                    living.append(mutated)
                first = " ".join(notice.tests) or notice.said if notice else "alive"
                note(f"{number} of {self.num_mutants}, line {mutated.row[1]} of {mutated.module}: {first}")
            found = pool.map(lambda group: self._by_all_cases(copies, group), _rounds(living))
            lost = [mutated for group in found for mutated in group]
        return self._finding(living, lost)

    def _by_all_cases(self, copies: Copies, group: Sequence[Mutated]) -> list[Mutated]:
        """Those that all cases of their room catch: tried together, and one by one only if something fails."""
        room = [f"tests/{_room(group[0])}"]
        together = copies.first_to_notice([all_cases(room, first_only=False)], self.timeout_s, group)
        if together is None:
            return []
        alone = all_cases(together.tests or room)
        return [one for one in group if copies.first_to_notice([alone], self.timeout_s, [one]) is not None]

    def _finding(self, living: list[Mutated], lost: list[Mutated]) -> Finding:
        by_commit = self.num_mutants - len(living)
        return Finding(
            checks=(Check(what="mutants that only all cases catch", measured=exact(len(lost)), high=0),),
            method=(
                "A comparison, operator, number, condition or call that is another, or a statement that is missing, in "
                f"{', '.join(self.packages)}. Each is tried by the tests of its room (tests/ mirrors src/tilework), "
                "slow ones included: first with one of ten parts of the matrices, the parts in turn; what lives, then "
                "with all cases.",
            ),
            facts={
                "mutants": self.num_mutants,
                f"caught by {THE_COMMIT}": by_commit,
                f"caught by {ALL_CASES}": by_commit + len(lost),
            },
            tables=(
                Table(
                    title=f"Not caught by {THE_COMMIT}",
                    columns=("module", "line", "was", "is", "caught by"),
                    rows=tuple((*one.row, ALL_CASES if one in lost else "none") for one in living),
                ),
            ),
        )


def _room(mutated: Mutated) -> str:
    """The folder of tests for a module: `server` for `tilework/server/calls/table.py`."""
    return Path(mutated.module).parts[1]


def _trials(mutated: Mutated, part: int) -> Iterator[Trial]:
    """The tests of its room, in files that name the module before the others: most mutants end early."""
    module = mutated.module.removesuffix(".py").replace("/", ".")
    files = sorted((ROOT / "tests" / _room(mutated)).rglob("test_*.py"))
    near = [path for path in files if module in path.read_text("utf-8")]
    for some in (near, [path for path in files if path not in near]):
        if some:
            yield of_a_commit(part, [str(path.relative_to(ROOT)) for path in some])


def _rounds(living: Sequence[Mutated]) -> list[list[Mutated]]:
    """Groups within a room whose mutants are each of another module, so that they can live in one copy."""
    groups: list[list[Mutated]] = []
    for one in living:
        fits = (
            group
            for group in groups
            if _room(group[0]) == _room(one) and all(other.module != one.module for other in group)
        )
        if (group := next(fits, None)) is None:
            groups.append(group := [])
        group.append(one)
    return groups
