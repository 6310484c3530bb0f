"""The commands that the pages show: their `console` blocks, in the order in which a reader types them.

A block that not every machine can run says in its title what it needs, where the reader sees it:

    ```console title="needs a GPU"
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = (
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "api.md"),  # Recorded from a server.
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md", "tests/README.md")),
)
TITLES = (
    "installs packages",
    "needs a GPU",
    "needs a GPU and a model of yours",
    "needs eight GPUs and a model of yours",
    "needs a model of yours",
    "needs a run of yours",
    "needs the code above",
    "needs several machines",
    "needs other services",
    "needs a server with keys",
    "needs a server with traffic",
    "needs Node",
    "needs another revision",
)
"""What a block may need that a machine without all that lacks."""

_FENCE = re.compile(r'^ *```(\w*)(?: title="([^"\n]*)")?\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`commands` are whole: lines that end in a backslash are joined. `title` is empty where nothing is needed."""

    page: Path
    line: int
    title: str
    commands: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for match in _FENCE.finditer(text):
        language, title, body = match.groups(default="")
        if language == "console":
            line = text.count("\n", 0, match.start()) + 1
            yield Block(page=page, line=line, title=title, commands=tuple(_commands(dedent(body))))


def files_of(page: Path) -> dict[str, str]:
    """The blocks that begin with a comment of a file's name."""
    bodies = [dedent(match[3]) for match in _FENCE.finditer(page.read_text("utf-8"))]
    return {match[1]: body for body in bodies if (match := re.match(r"# (\w+\.(?:toml|py))\b", body))}


def _commands(body: str) -> Iterator[str]:
    """Behind `$ ` if the block shows answers, too; else each line."""
    lines = [line.strip() for line in re.sub(r"\\\n\s*", "", body).splitlines()]
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")] or lines
    return (line for line in typed if line and not line.startswith("#"))
