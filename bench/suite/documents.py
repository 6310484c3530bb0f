"""The commands that the pages show: their `console` blocks, and Python that calls a server, in a reader's order.

A block that not every machine can run says in its title what it needs, where the reader sees it:

    ```console title="needs a GPU"
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = (
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "lab" / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "bench/README", "lab/README", "tests/README")),
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

ADDRESS = "http://127.0.0.1:8000"
_HEAD = re.compile(r"^#+ ", re.MULTILINE)
_FENCE = re.compile(r'^ *```(\w*)(?: title="([^"\n]*)")?\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`commands` are whole: lines that end in a backslash are joined. `title` is empty where nothing is needed.

    `section` is the number of the heading above it. Python is one command.
    """

    page: Path
    section: int = 0
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
        commands = tuple(_commands(language, dedent(body)))
        if commands:
            line = text.count("\n", 0, match.start()) + 1
            section = len(_HEAD.findall(_FENCE.sub("", text[: match.start()])))
            yield Block(page=page, line=line, section=section, title=title, commands=commands)


def files_of(page: Path) -> dict[str, str]:
    """The blocks that begin with a comment of a file's name."""
    bodies = [dedent(match[3]) for match in _FENCE.finditer(page.read_text("utf-8"))]
    return {match[1]: body for body in bodies if (match := re.match(r"# (\w+\.(?:toml|py))\b", body))}


def _commands(language: str, body: str) -> Iterator[str]:
    """Each line of a console, and Python that calls a server as one."""
    if language == "python" and ADDRESS in body:
        yield f"python -c {shlex.quote(body)}"
    if language == "console":
        lines = (line.strip() for line in re.sub(r"\\\n\s*", "", body).splitlines())
        yield from (line for line in lines if line and not line.startswith("#"))
