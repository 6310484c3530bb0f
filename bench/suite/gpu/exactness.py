"""The tests that need a GPU, as `make test-gpu` runs them, with their results kept."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.gpu.models import on_gpu
from suite.stats import exact

ROOT = Path(__file__).parents[3]
_MARK = "pytest.mark.gpu"
_NO_TESTS = 5  # Pytest's exit code.
_PARTS = {"error": "failed", "failure": "failed", "skipped": "skipped"}
"""What a test has in JUnit's format, and what is said of it."""


def files_with_gpu_tests() -> list[Path]:
    """Those that have the mark, relative to the checkout: others may import what is not installed beside a GPU."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path.relative_to(ROOT) for path in paths if _MARK in path.read_text("utf-8")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """The tests of the mark `gpu` in these `files`. Without a GPU they are skipped."""

    files: tuple[str, ...]
    device: str

    @classmethod
    def make(cls, quick: bool, only: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> Exactness:
        """`only` these files, by their stems, or all `without` those. A quick case is the same."""
        chosen = [path for path in files_with_gpu_tests() if path.stem not in without]
        files = tuple(str(path) for path in chosen if not only or path.stem in only)
        return cls(files=files, device="cuda" if on_gpu() else "cpu")

    def measure(self, note: Note) -> Finding:
        with TemporaryDirectory() as folder:
            report = Path(folder) / "tests.xml"
            run = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-v", f"--junitxml={report}", *self.files]
            done = subprocess.run(run, cwd=ROOT, stdout=sys.stderr, check=False)
            if done.returncode not in (0, 1, _NO_TESTS) or not report.exists():
                raise CaseFailed(f"pytest ended with exit code {done.returncode}; its message stands above")
            results = _results(ElementTree.parse(report).getroot())
        counts = Counter(what for _, what, _ in results)
        note(", ".join(f"{number} {what}" for what, number in counts.items()) or "no test")
        checks = [Check(what="tests that fail", measured=exact(counts["failed"]), high=0)]
        if self.device == "cuda":
            checks.append(Check(what="tests that pass", measured=exact(counts["passed"]), low=1))
        return Finding(
            checks=tuple(checks),
            method=("The tests marked `gpu`, by pytest in a process of their own; skipped ones say why.",),
            tables=(
                Table(
                    title="By file",
                    columns=("file", "passed", "failed", "skipped"),
                    rows=tuple(
                        (file, *(str(sum(one[:2] == (file, what) for one in results)) for what in _COLUMNS))
                        for file in sorted({file for file, _, _ in results})
                    ),
                ),
                Table(
                    title="Not passed",
                    columns=("what", "test or reason"),
                    rows=tuple(sorted({(what, detail) for _, what, detail in results if what != "passed"})),
                ),
            ),
        )


_COLUMNS = ("passed", "failed", "skipped")


def _results(root: ElementTree.Element) -> list[tuple[str, str, str]]:
    """Module, what became of it, and its name or the reason, of each test."""
    found = []
    for case in root.iter("testcase"):
        part = next((one for one in case if one.tag in _PARTS), None)
        what = "passed" if part is None else _PARTS[part.tag]
        name = case.get("name", "")
        detail = name if part is None or what == "failed" else part.get("message", "")
        found.append((case.get("classname", ""), what, detail))
    return found
