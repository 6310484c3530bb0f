"""Recording: simulated schedules and scenarios of fuzzing, as event logs."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suite.decisions.cells import POLICIES, Cell, policy_of
from suite.decisions.subject import Subject, SubjectFailed

SCHEDULES, FUZZ, LIVE, ABOUT, OUTCOMES = "schedules", "fuzz", "live", "about.json", "outcomes.jsonl"
REQUESTS, LOG = "requests.jsonl", ".jsonl.gz"
Note = Callable[[str], None]

_TENANTS, _CLASSES = ("a", "a", "b"), ("interactive", "standard", "batch")


class OutTaken(ValueError):
    """A directory has been recorded into before; says which and what to do."""


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Writes event logs into `out`, compressed: schedules/CELL/POLICY, fuzz/SEED; and what failed into about.json."""

    subject: Subject
    out: Path
    note: Note
    failures: dict[str, str] = field(default_factory=dict)
    num_logs: int = 0
    num_events: int = 0

    def record(self, cells: Sequence[Cell], seeds: range) -> None:
        """Raises OutTaken, OSError, and SubjectFailed if there are no requests to simulate."""
        if any((self.out / name).exists() for name in (SCHEDULES, FUZZ, ABOUT)):
            raise OutTaken(f"{self.out} holds a recording; give another directory, so that no old log is left in it")
        began_s = time.monotonic()
        self.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            for cell in cells:
                self._cell(cell, Path(scratch))
                self.note(f"{cell.name}: {time.monotonic() - began_s:.0f} s, {self.num_events} events so far")
            self._fuzz(seeds, Path(scratch))
        self._about(time.monotonic() - began_s, cells, seeds)

    def _cell(self, cell: Cell, scratch: Path) -> None:
        place = self.out / SCHEDULES / cell.name
        place.mkdir(parents=True, exist_ok=True)
        requests, log = place / REQUESTS, scratch / "log.jsonl"
        self.subject.make_workload(requests, cell.workload, cell.settings, cell.seed)
        if cell.promises:
            _promise(requests)
        for policy in POLICIES:
            try:
                self.subject.simulate(requests, policy, cell.table, cell.arguments, log)
            except SubjectFailed as error:
                self.failures[f"{cell.name}/{policy}"] = str(error)
            else:
                self._keep(log, place / (policy + LOG))

    def _fuzz(self, seeds: range, scratch: Path) -> None:
        place, log = self.out / FUZZ, scratch / "log.jsonl"
        place.mkdir(exist_ok=True)
        began_s = time.monotonic()
        with (self.out / FUZZ / OUTCOMES).open("w", encoding="utf-8") as outcomes:
            for seed in seeds:
                policy = policy_of(seed)
                try:
                    answer = self.subject.fuzz(seed, policy, log)
                except SubjectFailed as error:
                    self.failures[f"{FUZZ}/{seed:05d}"] = str(error)
                    continue
                self._keep(log, place / f"{seed:05d}{LOG}")
                outcome = {"seed": seed, "policy": policy, "violations": len(answer["violations"])}
                outcomes.write(json.dumps(outcome) + "\n")
                if seed % 100 == 99:
                    self.note(f"seed {seed}: {time.monotonic() - began_s:.0f} s")

    def _keep(self, log: Path, place: Path) -> None:
        """Compressed without name and time: equal logs are equal files."""
        text = log.read_bytes()
        log.unlink()
        place.write_bytes(gzip.compress(text, compresslevel=5, mtime=0))
        self.num_logs += 1
        self.num_events += text.count(b"\n") - 1

    def _about(self, seconds: float, cells: Sequence[Cell], seeds: range) -> None:
        about: dict[str, Any] = {
            "revision": self.subject.revision,
            "version": self.subject.version,
            "cells": [cell.name for cell in cells],
            "policies": len(POLICIES),
            "seeds": [seeds.start, seeds.stop],
            "logs": self.num_logs,
            "events": self.num_events,
            "seconds": round(seconds),
            "failures": self.failures,
        }
        (self.out / ABOUT).write_text(json.dumps(about, indent=2) + "\n", "utf-8")


def _promise(requests: Path) -> None:
    """Give requests tenants and classes, and every second one the wish to be refused rather than late."""
    lines = [json.loads(line) for line in requests.read_text("utf-8").splitlines()]
    for index, line in enumerate(lines):
        line |= {"tenant": _TENANTS[index % len(_TENANTS)], "priority": _CLASSES[index // 2 % len(_CLASSES)]}
        if index % 2:
            line["on_miss"] = "reject"
        if index % 7 == 0:
            line["slo_s"] = None
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
