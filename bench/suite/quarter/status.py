"""Which parts have been measured on a card, by the pages of their results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from suite.gpu.parts import PARTS, Part

RESULTS = Path(__file__).parents[2] / "results"
_NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A result: its `file`, the `card` (empty: without one), and the `month`, such as "2026-11"."""

    file: str
    card: str
    month: str


def read(name: str, pages: Mapping[str, str]) -> list[Measured]:
    """The results of the part of this name among pages, by the names of their files. Other pages are none."""
    found = []
    for file, page in pages.items():
        if own := re.fullmatch(rf"{name}_[a-z0-9-]+_(\d{{4}})(\d{{2}})\.md", file):
            card = re.search(r"^- gpu: (.+)$", page, re.MULTILINE)
            found.append(Measured(file=file, card=card[1] if card else "", month=f"{own[1]}-{own[2]}"))
    return found


def measured(folder: Path = RESULTS, parts: Sequence[Part] = PARTS) -> dict[str, Measured]:
    """The newest result of each part that has run on a card, by its name."""
    pages = {path.name: path.read_text("utf-8", "replace") for path in folder.glob("*.md") if path.is_file()}
    found: dict[str, Measured] = {}
    for part in parts:
        if results := [one for one in read(part.name, pages) if one.card]:
            found[part.name] = max(results, key=lambda one: (one.month, one.file))
    return found


def table(found: dict[str, Measured], parts: Iterable[Part] = PARTS) -> str:
    """In Markdown, in the order in which a quarter of an hour takes them; links are those of a page in docs."""
    lines = ["| case | | on a card |", "|---|---|---|"]
    for part in parts:
        one = found.get(part.name)
        where = _NEVER if one is None else f"[{one.card}, {one.month}](../bench/results/{one.file})"
        packages = (
            f" ({'more with' if part.can_do_without else 'needs'} {', '.join(part.packages)})" if part.packages else ""
        )
        lines.append(f"| `{part.name}` | {part.answers}{packages} | {where} |")
    return "\n".join(lines)


def as_json(found: dict[str, Measured], parts: Iterable[Part] = PARTS) -> list[dict[str, object]]:
    rows = []
    for part in parts:
        one = found.get(part.name)
        row = {"part": part.name, "answers": part.answers, "limit_s": part.limit_s, "packages": list(part.packages)}
        rows.append(row | {"result": one.file if one else None, "card": one.card if one else None})
    return rows
