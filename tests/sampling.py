"""Which of the tests marked exhaustive a run has: all, or the part that is due at this commit.

A case belongs to one of `PARTS` parts by its name. Consecutive commits take the parts in turn, so that each case runs
within `PARTS` commits. The hash of the commit would give no such bound: after ten draws of one in ten, a third of the
cases have not run. It decides only where the history is not at hand, as in a shallow clone.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from shlex import quote
from zlib import crc32

import pytest

PARTS = 10
ALL, BY_COMMIT = "all", "commit"
_ROOT = Path(__file__).resolve().parents[1]


def part_of(case: str) -> int:
    """The part that a case belongs to: it depends on nothing but the name of the case."""
    return crc32(case.encode()) % PARTS


def part_from(text: str, git: Callable[..., str]) -> int | None:
    """The part that `--part` names; None for all.

    Raises:
        pytest.UsageError: it names none.
    """
    if text == ALL:
        return None
    if text == BY_COMMIT:
        return _turn(git)
    if text.isascii() and text.isdecimal() and int(text) < PARTS:
        return int(text)
    raise pytest.UsageError(f"--part {text}: choose {ALL}, {BY_COMMIT}, or a number from 0 to {PARTS - 1}")


def git(*words: str) -> str:
    """The answer of git about this checkout.

    Raises:
        pytest.UsageError: there is no history to ask for.
    """
    try:
        return subprocess.run(["git", *words], cwd=_ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error.strerror
        raise _no_history(str(reason)) from error


def _no_history(reason: str) -> pytest.UsageError:
    return pytest.UsageError(
        f"--part {BY_COMMIT} needs git and a checkout ({reason}); give --part {ALL} or a number (make slow PART=...)"
    )


def _turn(git: Callable[..., str]) -> int:
    if (other := Path(git("rev-parse", "--show-toplevel"))) != _ROOT:
        raise _no_history(f"{_ROOT} lies in another one, {other}")
    if git("rev-parse", "--is-shallow-repository") == "true":
        return int(git("rev-parse", "HEAD"), 16) % PARTS
    return int(git("rev-list", "--count", "HEAD")) % PARTS


def split(items: Iterable[pytest.Item], part: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those that run, and those that are not due."""
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        is_out = item.get_closest_marker("exhaustive") is not None and part_of(item.nodeid) != part
        (others if is_out else kept).append(item)
    return kept, others


def how_to_repeat(part: int | None, failed: Iterable[str]) -> list[str]:
    """Lines that say how the cases that failed run again, and how their part does when others are due."""
    cases = " ".join(quote(case) for case in dict.fromkeys(failed))
    if not cases:
        return []
    again = f"these again: .venv/bin/python -m pytest {cases}"
    return [again] if part is None else [again, f"the same part at the next commit: make slow PART={part}"]
