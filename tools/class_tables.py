"""The score and the tables of classes of diffusers, for pages.

`python tools/class_tables.py PAGE...` writes today's score into these pages. With `--tables` in place of
pages it prints the page of tables.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tilework.pipelines.support.installed import APART, MODULAR, Score, count_served, score, sentence
from tilework.pipelines.support.record import KINDS, ClassRecord, Record, read_record

_SENTENCE = re.compile(r"\d+ of \d+ pipeline classes of diffusers \d+\.[\d.]*\d")
_TITLE = """\
# Classes

What the tests of this version found of each pipeline class of diffusers: exact alone, interleaved with another request,
and moved to another process after each stage and step. [Models](models.md) says what the columns mean.
"""
_HEAD = (
    "| class | stages | exact | interleaved | moved | batches | devices, also of a cell | inputs | lacks |",
    "|---|---|---|---|---|---|---|---|---|",
)


def updated(page: str, found: Score) -> str:
    """Return a page with the score of today."""
    return _SENTENCE.sub(sentence(found), page)


def tables(found: Score, record: Record) -> str:
    """Return the page of tables: the classes of each kind, and those that are apart from the score with the reason."""
    return "\n".join((_TITLE, *_tables(found, record), ""))


def _tables(found: Score, record: Record) -> Iterator[str]:
    yield from ("| kind | served exactly | classes |", "|---|---|---|")
    for kind in (*KINDS, MODULAR):
        classes = found.of(kind)
        yield f"| {kind} | {count_served(classes)} | {len(classes)} |"
    for kind in (*KINDS, MODULAR):
        yield from _of_kind(kind, found, record)
    yield from ("", "## Apart", "")
    yield from (f"- {one.name}: {one.reason}{'; served' if one.is_served else ''}" for one in found.of(APART))


def _of_kind(kind: str, found: Score, record: Record) -> Iterator[str]:
    yield from ("", f"## {kind.capitalize()}", "")
    classes = found.of(kind)
    served = [one.name for one in classes if one.is_served]
    if served:
        yield from (*_HEAD, *(_row(name, record.classes[name]) for name in served), "")
    yield from (f"- {one.name} is not served: {one.reason}" for one in classes if not one.is_served)


def _row(name: str, one: ClassRecord) -> str:
    flags = ["yes" if flag else "no" for flag in (one.exact, one.interleaved, one.moved, one.batches)]
    named = f"`{name}`" + (f" ({', '.join(one.kinds)})" if len(one.kinds) > 1 else "")
    devices = one.degrees if one.degrees.isdigit() else f"up to {one.degrees}"
    cells = [named, ", ".join(one.stages), *flags, devices, ", ".join(one.inputs), ", ".join(one.limits)]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


if __name__ == "__main__":
    today = score()
    if sys.argv[1:] == ["--tables"]:
        print(tables(today, read_record()), end="")
    else:
        for path in map(Path, sys.argv[1:]):
            path.write_text(updated(path.read_text("utf-8"), today), encoding="utf-8")
