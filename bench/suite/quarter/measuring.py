"""A part as a process of its own, and what it leaves."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from suite.children import run
from suite.gpu.parts import Part
from suite.quarter.course import Ending, Outcome
from suite.quarter.kept import Kept
from suite.quarter.wheels import ROOT, SITE, Pack

_MODELS = Path("/dev/shm/tilework-bench")
_ENDINGS: Mapping[int | None, Ending] = {0: Ending.MEASURED, 1: Ending.MISSED, None: Ending.PAST_LIMIT}
_SHOWN_LINES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Runs parts with what was installed from `packed`. What a part leaves is kept the moment it ends."""

    kept: Kept
    packed: Pack

    def measure(self, part: Part) -> Ending:
        with tempfile.TemporaryDirectory(prefix="tilework-quarter-") as temporary:
            results, others = Path(temporary) / "results", Path(temporary) / "others"
            results.mkdir()
            others.mkdir()
            log, script = others / f"{part.name}.log", str(ROOT / "bench" / "gpu" / "run.py")
            command = [sys.executable, script, part.name, "--write", "--out", str(results)]
            code = run(command, part.limit_s, log, self._environment(), ROOT)
            ending = _ENDINGS.get(code, Ending.FAILED)
            if ending in (Ending.MEASURED, Ending.MISSED) and not any(results.iterdir()):
                ending = Ending.FAILED  # Python's own exit code for an error is that of a missed goal.
            self.kept.add_results(results)
            if part.leaves and (folder := self._models / part.leaves).is_dir():
                shutil.copytree(folder, others / part.leaves)
            self.kept.add_others(others)
            if ending in (Ending.FAILED, Ending.PAST_LIMIT):
                print(*log.read_text("utf-8", "replace").splitlines()[-_SHOWN_LINES:], sep="\n", flush=True)
        return ending

    def page(self, outcomes: Sequence[Outcome]) -> str:
        """What became of each part, and the results."""
        rows = [f"| `{one.part.name}` | {one.ending} | {one.seconds:.0f} |" for one in outcomes]
        head = f"# A quarter of an hour\n\nRevision {self.packed.commit}, Python {self.packed.python}.\n"
        table = "\n".join(["| part | | s |", "|---|---|---|", *rows])
        return "\n\n".join([head, table, *self.kept.documents().values()]) + "\n"

    @property
    def _models(self) -> Path:
        return Path(os.environ.get("BENCH_MODELS", _MODELS))

    def _environment(self) -> dict[str, str]:
        """Modules are compiled once: an environment may forbid to keep them, which costs each process seconds."""
        there = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        paths = [str(SITE), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return there | {"PYTHONPATH": os.pathsep.join(paths), "BENCH_COMMIT": self.packed.commit}
