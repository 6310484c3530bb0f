"""Which parts have been measured on a card, by the files of bench/results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from suite.gpu.parts import PARTS, Part

RESULTS = Path(__file__).parents[2] / "results"
_NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A result: its `file`, the `card`, and the `month`, such as "2026-11"."""

    file: str
    card: str
    month: str


def measured(folder: Path = RESULTS, parts: Sequence[Part] = PARTS) -> dict[str, Measured]:
    """The newest result of each part that has run on a card, by its name."""
    found: dict[str, Measured] = {}
    for part in parts:
        results = [one for path in folder.glob(f"{part.name}_*.md") if (one := _read(path, part.name)) is not None]
        if results:
            found[part.name] = max(results, key=lambda one: (one.month, one.file))
    return found


def _read(path: Path, name: str) -> Measured | None:
    """None of a result of another case, and of one without a card."""
    facts = dict(re.findall(r"^- (\w+): (.+)$", path.read_text("utf-8"), re.MULTILINE))
    is_own = re.fullmatch(rf"{name}_[a-z0-9-]+_\d{{6}}\.md", path.name)
    if not is_own or "gpu" not in facts:
        return None
    return Measured(file=path.name, card=facts["gpu"], month=facts["date"][:7])


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
