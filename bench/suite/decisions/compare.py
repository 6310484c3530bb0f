"""Comparing two recordings, and the answers of the Tilework at hand with live logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.decisions.logs import Agreement, compare_lines, read_lines, renewed_lines
from suite.decisions.names import Names
from suite.decisions.record import ABOUT, FUZZ, LIVE, LOG, OUTCOMES, REQUESTS, SCHEDULES
from suite.decisions.subject import Subject

FUZZ_REPLAYED = "fuzz replayed"


class BadRecording(ValueError):
    """A directory holds no recording; says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one log: `part` is where it belongs, `group` the cell; `difference` is empty if all is the same."""

    part: str
    name: str
    group: str = ""
    num_events: int = 0
    difference: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Verdicts on everything that the old recording holds, one at a time."""

    old: Path
    new: Path
    names: Names
    subject: Subject

    def verdicts(self) -> Iterator[Verdict]:
        """Raises BadRecording, and OSError."""
        about_of(self.old)
        yield from self._workloads()
        yield from self._schedules()
        yield from self._fuzz()
        yield from self._live()

    def _workloads(self) -> Iterator[Verdict]:
        """Other requests give other schedules; that is told apart here."""
        for old in self._of_cells(REQUESTS):
            new = self.new / old.relative_to(self.old)
            was = [self.names.renewed(json.loads(line), "requests") for line in read_lines(old)]
            now = [json.loads(line) for line in read_lines(new)] if new.exists() else []
            difference = "" if was == now else "other requests" if now else "missing"
            yield Verdict(part="workloads", name=old.parent.name, difference=difference)

    def _schedules(self) -> Iterator[Verdict]:
        for old in self._of_cells(f"*{LOG}"):
            yield self._verdict(old, part=SCHEDULES, name=old.name.removesuffix(LOG), group=old.parent.name)
        yield from self._failures()

    def _of_cells(self, pattern: str) -> list[Path]:
        """Of all cells that the new code was asked to record."""
        asked = about_of(self.new)["cells"]
        found = self.old.glob(f"{SCHEDULES}/*/{pattern}")
        return sorted(place for place in found if place.parent.name in asked)

    def _failures(self) -> Iterator[Verdict]:
        """What failed when the old code was recorded is to fail now."""
        about = about_of(self.new)
        for name in about_of(self.old)["failures"]:
            if name.partition("/")[0] not in (*about["cells"], FUZZ):
                continue
            difference = "" if name in about["failures"] else "does not fail any more"
            yield Verdict(part="failures", name=name, difference=difference)

    def _fuzz(self) -> Iterator[Verdict]:
        asked = range(*about_of(self.new)["seeds"])
        before, after = _outcomes(self.old), _outcomes(self.new)
        for old in sorted(self.old.glob(f"{FUZZ}/*{LOG}")):
            seed = old.name.removesuffix(LOG)
            if int(seed) not in asked:
                continue
            verdict = self._verdict(old, part=FUZZ, name=seed, group=before[int(seed)]["policy"])
            if not verdict.difference and before[int(seed)] != after.get(int(seed)):
                difference = f"violations: {before[int(seed)]} has become {after.get(int(seed))}"
                verdict = Verdict(part=FUZZ, name=seed, group=verdict.group, difference=difference)
            yield verdict
            yield self._replayed(old, part=FUZZ_REPLAYED, name=seed, group=verdict.group)

    def _live(self) -> Iterator[Verdict]:
        for old in sorted(self.old.glob(f"{LIVE}/*.jsonl")):
            yield self._replayed(old, part=LIVE, name=old.stem, group="")

    def _replayed(self, old: Path, *, part: str, name: str, group: str) -> Verdict:
        """What the controller at hand answers to the events of an old log, whatever devices would do today."""
        lines = read_lines(old)
        replayed = _Answers(self.subject, renewed_lines(lines, self.names))
        agreement = compare_lines(lines[1:], replayed, self.names)
        difference = replayed.failure or agreement.difference
        return Verdict(part=part, name=name, group=group, num_events=agreement.num_events, difference=difference)

    def _verdict(self, old: Path, *, part: str, name: str, group: str) -> Verdict:
        agreement = self._agreement(old, self.new / old.relative_to(self.old))
        num_events, difference = agreement.num_events, agreement.difference
        return Verdict(part=part, name=name, group=group, num_events=num_events, difference=difference)

    def _agreement(self, old: Path, new: Path) -> Agreement:
        if not new.exists():
            failure = about_of(self.new)["failures"].get(f"{new.parent.name}/{new.name.removesuffix(LOG)}", "")
            return Agreement(num_events=0, difference=f"missing. {failure}".strip())
        return compare_lines(read_lines(old)[1:], read_lines(new)[1:], self.names)


class _Answers:
    """The lines of a replay; ends at a failure, which it keeps."""

    def __init__(self, subject: Subject, lines: Iterator[str]) -> None:
        self._lines = subject.replayed(lines)
        self.failure = ""

    def __iter__(self) -> Iterator[str]:
        count = 0
        try:
            for line in self._lines:
                yield line
                count += 1
        except Exception as error:
            self.failure = f"line {count + 2}: it cannot be replayed: {type(error).__name__}: {error}"


def about_of(recording: Path) -> dict[str, Any]:
    """Raises BadRecording."""
    try:
        about: dict[str, Any] = json.loads((recording / ABOUT).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadRecording(f"{recording} holds no finished recording: {error}") from error
    return about


def _outcomes(recording: Path) -> dict[int, dict[str, Any]]:
    lines = (recording / FUZZ / OUTCOMES).read_text("utf-8").splitlines()
    return {outcome["seed"]: outcome for outcome in map(json.loads, lines)}
