"""Starts servers over all pairs of options, and one for each that is refused."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from suite.case import Check, Finding, Note, Table
from suite.pairs.covering import Place, covering_rows, pairs_of
from suite.pairs.files import write_files
from suite.pairs.samples import ABSENT, LEFT_OUT, MODELS, SIMULATED, Refused, Space
from suite.pairs.served import Outcome, start
from suite.stats import exact

SEED = 81
_AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A command that is to be served, or refused."""

    space: Space
    row: Mapping[str, int]
    refused: Refused | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.space.arguments(self.row)

    def faults(self, outcome: Outcome) -> tuple[str, ...]:
        """What is wrong with how it ended."""
        if self.refused is None:
            return (*((f"refused: {outcome.sentence}",) if outcome.sentence else ()), *outcome.faults)
        if not outcome.sentence:
            return (f"served, in place of: {self.refused.words}", *outcome.faults)
        given = [name for name, level in self.refused.places if level != ABSENT]
        faults = list[str]()
        if not any(self._is_named(name, outcome.sentence) for name in given):
            faults.append(f"the sentence does not name {' or '.join(given)}: {outcome.sentence}")
        if self.refused.words not in outcome.sentence:
            faults.append(f"refused by another sentence than {self.refused.words!r}: {outcome.sentence}")
        return (*faults, *outcome.faults)

    def _is_named(self, option: str, sentence: str) -> bool:
        """Whether it is there as it is given, or by its key, in one word or several."""
        flags = [word for word in self.space.values[option][0] if word.startswith("--")]
        return any(word in sentence for word in (*flags, option, option.replace("_", " ")))


def starts_of(space: Space, seed: int = SEED) -> tuple[Start, ...]:
    """One for each row of the covering set, then one for each that is refused, without other options."""
    least = dict.fromkeys(space.needed, 1)
    rows = covering_rows(space.factors, space.excluded, seed)
    served = [Start(space=space, row=row) for row in rows]
    refused = [
        Start(space=space, row=least | one.beside | dict(one.places), refused=one) for one in space.refused if one.words
    ]
    return (*served, *refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The sets of simulated devices and of CPU workers, by this seed; `quick` has one row in ten."""

    seed: int = SEED
    every: int = 1

    @classmethod
    def make(cls, quick: bool) -> Pairs:
        return cls(every=10 if quick else 1)

    def measure(self, note: Note) -> Finding:
        starts = [one for space in (SIMULATED, MODELS) for one in starts_of(space, self.seed)[:: self.every]]
        outcomes = run(starts, note)
        faults = [one.faults(outcome) for one, outcome in zip(starts, outcomes, strict=True)]
        return Finding(
            checks=(Check(what="starts with a fault", measured=exact(float(sum(map(bool, faults)))), high=0.0),),
            method=(
                "Each pair of values of two options occurs in a start that is served, unless it is refused. Such a "
                "start gets an image, a promise, an exact image, an edit, a cancelled call, a batch, a clip, a LoRA if "
                "there are some, metrics and SIGTERM; each call is answered by 200 or, where the model or the options "
                "have no such thing, by 400 with a message.",
                "Each that is refused is started by itself: exit code 2, and a sentence that names the options.",
                "After each start no process, shared memory or file is left, the port is free, and the log has no "
                "error. Models are on CPUs.",
                *(f"--{option.replace('_', '-')} is left out: {why}." for option, why in LEFT_OUT.items()),
            ),
            tables=(*(_space_table(space, starts) for space in (SIMULATED, MODELS)), _refusals(starts, outcomes))
            + ((_faults(starts, faults),) if any(faults) else ()),
        )


def run(starts: list[Start], note: Note) -> list[Outcome]:
    """How each of them ends. Two are there at a time."""
    with TemporaryDirectory(prefix="pairs-") as name, ThreadPoolExecutor(_AT_ONCE) as pool:
        files, profiles = Path(name) / "files", Path(name) / "profiles"
        write_files(files)
        profiles.mkdir()

        def one(place: int) -> Outcome:
            outcome = start(starts[place].arguments, files, profiles)
            faults = starts[place].faults(outcome)
            note(f"{place + 1} of {len(starts)}: {'; '.join(faults) or 'as it should be'}")
            return outcome

        return list(pool.map(one, range(len(starts))))


def _space_table(space: Space, starts: list[Start]) -> Table:
    rows = [one.row for one in starts if one.space is space and one.refused is None]
    pairs = set[frozenset[Place]]().union(*map(pairs_of, rows))
    return Table(
        title=f"Served: {space.name}",
        columns=("options", "values", "pairs", "starts"),
        rows=((str(len(space.values)), str(sum(map(len, space.factors.values()))), str(len(pairs)), str(len(rows))),),
    )


def _refusals(starts: list[Start], outcomes: list[Outcome]) -> Table:
    """Sentences, with what they were said of."""
    said: dict[tuple[str, str], list[str]] = {}
    for one, outcome in zip(starts, outcomes, strict=True):
        if one.refused is not None:
            places = sorted(one.refused.places)
            given = [" ".join(one.space.values[name][level - 1]) for name, level in places if level != ABSENT]
            given += [f"without --{name.replace('_', '-')}" for name, level in places if level == ABSENT]
            said.setdefault((one.space.name, outcome.sentence), []).append(" ".join(given))
    rows = [(where, "; ".join(given), str(len(given)), sentence) for (where, sentence), given in said.items()]
    return Table(title="Refused", columns=("devices", "options", "starts", "sentence"), rows=tuple(rows))


def _faults(starts: list[Start], faults: list[tuple[str, ...]]) -> Table:
    rows = [(" ".join(one.arguments), "; ".join(found)) for one, found in zip(starts, faults, strict=True) if found]
    return Table(title="Faults", columns=("options", "faults"), rows=tuple(rows))
