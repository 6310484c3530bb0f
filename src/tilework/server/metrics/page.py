"""The table of metrics, written between two marks: `python -m tilework.server.metrics.page docs/operations.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tilework.server.metrics.families import FAMILIES, OPEN_LABELS, Family, Label

BEGIN, END = "<!-- metrics: `make docs` writes this part -->", "<!-- metrics end -->"


def updated(page: str) -> str:
    """Return a page with the present labels and metrics. Raises ValueError if it lacks the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no part between {BEGIN} and {END}")
    return "\n".join([before + BEGIN, "", *_tables(), "", END]) + after


def _tables() -> Iterator[str]:
    yield from ("| label | values |", "|---|---|")
    yield from (f"| `{label.name}` | {label.text} |" for label in OPEN_LABELS)
    yield from ("", "| name | type | labels | meaning |", "|---|---|---|---|")
    yield from map(_row, FAMILIES)


def _row(family: Family) -> str:
    labels = ", ".join(map(_label, family.labels))
    return f"| `{family.name}` | {family.kind} | {labels} | {family.text} |".replace("|  |", "| |")


def _label(label: Label) -> str:
    """Return the name of a label, with its values if these are not described for all metrics."""
    values = ", ".join(f"`{value}`" for value in label.values)
    return f"{label.name} ({values})" if values else label.name


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(updated(path.read_text("utf-8")), encoding="utf-8")
