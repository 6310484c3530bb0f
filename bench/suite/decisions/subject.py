"""The Tilework that is recorded or replayed: whichever is importable. All contact with it is in this file.

Recording goes by the command line, within this process, so that a run costs no start. Only replaying needs names of
Python, which `names.json` says where to find.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suite.decisions.names import Names

_PACKAGE = "tilework"


class SubjectFailed(RuntimeError):
    """A command ended with an error; says which and how."""


@dataclass(slots=True, kw_only=True)
class Subject:
    """Speaks in old names; says the new ones to a Tilework that knows them."""

    names: Names
    _help: dict[str, str] = field(default_factory=dict)

    def make_workload(self, out: Path, name: str, parameters: Sequence[str], seed: int) -> None:
        """Write a file of requests. Raises SubjectFailed."""
        name = self.names.workloads.get(name, name)
        settings = [word for one in parameters for word in ("--set", one)]
        try:
            self._run("workload", "make", name, "--out", str(out), "--seed", str(seed), *settings, "--json")
        except SubjectFailed:
            old = {new: old for old, new in self.names.workloads.items()}.get(name)
            if old is None:
                raise
            self._run("workload", "make", old, "--out", str(out), "--seed", str(seed), *settings, "--json")

    def simulate(self, requests: Path, policy: str, table: str, options: Sequence[str], log: Path) -> None:
        """Write the event log of a simulation. Raises SubjectFailed."""
        words = [*self._spelled("simulate", options), "--policy", self._policy(policy), "--events", str(log), "--json"]
        try:
            self._run("simulate", str(requests), "--cost", table, *words)
        except SubjectFailed:
            if table not in self.names.tables:
                raise
            self._run("simulate", str(requests), "--cost", self.names.tables[table], *words)

    def fuzz(self, seed: int, policy: str, log: Path) -> dict[str, Any]:
        """Write the event log of a scenario; returns the command's answer, with violations. Raises SubjectFailed."""
        words = ["--seed", str(seed), "--policy", self._policy(policy), "--log", str(log), "--json"]
        answer: dict[str, Any] = json.loads(self._run("fuzz", *words, may_end_with=(0, 1)))
        return answer

    def replayed(self, lines: Iterable[str]) -> Iterator[str]:
        """What a fresh controller does with the events of a log, line by line as it would write it.

        A scenario's log goes on after a restart of the server, so another fresh one takes over there, with the costs
        of the models that were added. Whatever the log's reader or the controller raises passes through.
        """
        header, entries = self._python("read_log")(lines)
        entry_line = self._python("entry_line")
        server = _Server(self._python("Controller")(header.config, header.table))
        for entry in entries:
            if server.is_followed_by_another(entry):
                server = _Server(self._python("Controller")(header.config, server.controller.costs.table))
            server.has_accepted |= bool(_accepted(entry))
            yield entry_line(entry.event, server.controller.handle(entry.event, entry.now_ns), entry.now_ns)

    @property
    def version(self) -> str:
        return str(importlib.import_module(_PACKAGE).__version__)

    @property
    def revision(self) -> str:
        """The commit of the checkout that it is imported from."""
        place = Path(str(importlib.import_module(_PACKAGE).__file__)).parent
        run = ["git", "-C", str(place), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        try:
            return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "not a git checkout"

    def _policy(self, old: str) -> str:
        """Its new name, unless the help of the command lists policies, as the old code's does, and has the old one."""
        new = self.names.policies.get(old, old)
        return old if old in self._help_of("simulate").replace(",", " ").split() else new

    def _spelled(self, command: str, words: Sequence[str]) -> list[str]:
        known = self._help_of(command)
        return [new if (new := self.names.options.get(word, word)) in known else word for word in words]

    def _help_of(self, command: str) -> str:
        if command not in self._help:
            self._help[command] = self._run(command, "--help")
        return self._help[command]

    def _python(self, name: str) -> Any:
        """Raises ImportError if it is in none of the places that are known."""
        for place in self.names.python[name]:
            module, _, attribute = place.partition(":")
            with contextlib.suppress(ImportError, AttributeError):
                return getattr(importlib.import_module(module), attribute)
        raise ImportError(f"{name} is in none of {', '.join(self.names.python[name])}; add its place to names.json")

    def _run(self, *words: str, may_end_with: tuple[int, ...] = (0,)) -> str:
        """Run a command as `python -m tilework` would, and return what it prints. Raises SubjectFailed."""
        out, errors, code = io.StringIO(), io.StringIO(), 0
        argv, sys.argv = sys.argv, [_PACKAGE, *words]
        os.environ["COLUMNS"] = "3000"  # Names are not to be cut off in the help.
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
                runpy.run_module(_PACKAGE, run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception as error:
            raise SubjectFailed(f"{' '.join(words)}: {type(error).__name__}: {error}") from error
        finally:
            sys.argv = argv
        if code not in may_end_with:
            raise SubjectFailed(f"{' '.join(words)}: exit status {code}: {errors.getvalue().strip()[-500:]}")
        return out.getvalue()


@dataclass(slots=True)
class _Server:
    """The controller of a server in a log."""

    controller: Any
    has_accepted: bool = False

    def is_followed_by_another(self, entry: Any) -> bool:
        """Whether the log's controller was a fresh one: it sees a device or the number of a job for the first time."""
        event = entry.event
        if type(event).__name__ == "DeviceJoined" and self.controller.tracker.device(event.device_id) is not None:
            return True
        return self.has_accepted and 0 in _accepted(entry)


def _accepted(entry: Any) -> list[int]:
    return [action.job_id for action in entry.actions if type(action).__name__ == "Accept"]
