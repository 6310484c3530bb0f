"""Mutation testing of the tests themselves: what the tests of one commit catch, of what all cases catch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

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
            rooms = sorted({_room(one) for one in chosen})
            note(f"{', '.join(rooms)}: their tests without any mistake")
            for room, failed in zip(rooms, pool.map(partial(_unharmed, copies), rooms), strict=True):
                if failed is not None:
                    raise CaseFailed(f"without any mistake, a test of tests/{room} fails: {' '.join(failed.tests)}")
            notices = pool.map(partial(self._by_nearest, copies), chosen, range(len(chosen)))
            living = [one for one, notice in _told(chosen, notices, note) if notice is None]
            note(f"{len(living)} alive: the other tests of their rooms, with one part")
            groups = _groups(living)
            missed = _flat(pool.map(partial(self._unnoticed, copies), groups, map(_of_group, groups, count())))
            note(f"{len(missed)} alive: all cases of their rooms")
            groups = _groups(missed)
            never = _flat(pool.map(partial(self._unnoticed, copies), groups, map(_in_full, groups)))
        return self._finding(missed, never)

    def _by_nearest(self, copies: Copies, mutated: Mutated, index: int) -> Notice | None:
        """What the files of tests that name its module say: most mutants end here."""
        module = mutated.module.removesuffix(".py").replace("/", ".")
        files = sorted((ROOT / "tests" / _room(mutated)).rglob("test_*.py"))
        near = [str(path.relative_to(ROOT)) for path in files if module in path.read_text("utf-8")]
        trial = until_one_fails(of_a_commit(index % NUM_PARTS, near))
        return copies.first_to_notice([trial], self.timeout_s, [mutated]) if near else None

    def _unnoticed(self, copies: Copies, group: Sequence[Mutated], trial: Trial) -> Sequence[Mutated]:
        """Those that a trial does not notice: tried together, and each alone by the tests that failed."""
        together = copies.first_to_notice([trial], self.timeout_s, group)
        if together is None:
            return group
        alone = until_one_fails(together.again or trial)
        return [one for one in group if copies.first_to_notice([alone], self.timeout_s, [one]) is None]

    def _finding(self, missed: Sequence[Mutated], never: Sequence[Mutated]) -> Finding:
        num_lost = len(missed) - len(never)
        num_caught = self.num_mutants - len(missed)
        return Finding(
            checks=(Check(what="mutants that only all cases catch", measured=exact(num_lost), high=0),),
            method=(
                "A comparison, operator, number, condition or call that is another, or a statement that is missing, in "
                f"{', '.join(self.packages)}. Each is tried by the tests of its room (tests/ mirrors src/tilework), "
                "slow ones included: first with one of ten parts of the matrices, the parts in turn; what lives, then "
                "with all cases. Those that live long are tried together, each in another module.",
            ),
            facts={
                "mutants": self.num_mutants,
                f"caught by {THE_COMMIT}": num_caught,
                f"caught by {ALL_CASES}": num_caught + num_lost,
            },
            tables=(
                Table(
                    title=f"Not caught by {THE_COMMIT}",
                    columns=("module", "line", "was", "is", "caught by"),
                    rows=tuple((*one.row, "none" if one in never else ALL_CASES) for one in missed),
                ),
            ),
        )


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
