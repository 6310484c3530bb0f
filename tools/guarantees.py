"""Check that what the pages once promised still stands somewhere: `tools/guarantees/PAGE.jsonl`, one guarantee a line.

Each line has where it stood (`was`), what it said (`said`), where it stands (`now`: a file, or `help: COMMAND`) and the
exact words there (`text`). If it was dropped on purpose, `now` is null and `why` says the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LEAST_TEXT, MOST_SAID = 12, 200
KEYS = frozenset({"was", "said", "now"})


def plain(text: str) -> str:
    """Return a text with one space for each run of white space."""
    return " ".join(text.split())


@cache
def place(now: str) -> str:
    """Return the text of a file, or of the help of a command."""
    if not now.startswith("help: "):
        return plain((ROOT / now).read_text("utf-8"))
    words = [sys.executable, "-m", "tilework", *now.removeprefix("help: ").split(), "--help"]
    return plain(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def mistake(entry: Any) -> str | None:
    """Return the mistake in a guarantee; None if it stands where it says."""
    if not isinstance(entry, dict) or not entry.keys() >= KEYS:
        return f"lacks one of {', '.join(sorted(KEYS))}"
    if len(entry["said"]) > MOST_SAID:
        return f"said has more than {MOST_SAID} characters"
    now, text = entry["now"], plain(entry.get("text", ""))
    if now is None:
        return None if entry.get("why") else "was dropped without a reason (why)"
    if len(text) < LEAST_TEXT:
        return f"text has fewer than {LEAST_TEXT} characters"
    try:
        return None if text in place(now) else f"is not in {now}: {text}"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{now} cannot be read: {error}"


def mistakes(page: Path) -> Iterator[str]:
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        try:
            found = mistake(json.loads(line))
        except ValueError as error:
            found = f"is not JSON: {error}"
        if found is not None:
            yield f"{page.name}:{number}: {found}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that each guarantee of the pages stands where its line says.")
    parser.add_argument("page", type=Path, nargs="*", help="files of guarantees; default: all of tools/guarantees")
    pages = parser.parse_args().page or sorted((ROOT / "tools" / "guarantees").glob("*.jsonl"))
    found = [line for page in pages for line in mistakes(page)]
    print("\n".join(found) or f"all guarantees of {len(pages)} pages stand where they should")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
