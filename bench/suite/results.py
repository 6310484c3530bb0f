"""The result of a case, as tables on a terminal, as a JSON object, and as a Markdown file."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from suite.case import Check, Finding, Table
from suite.environment import hardware_slug


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finding with all that is needed to measure it again. `config` are the case's settings, seeds among them."""

    theme: str
    title: str
    command: str
    config: dict[str, Any]
    environment: dict[str, Any]
    wall_s: float
    quick: bool
    finding: Finding

    def to_json(self) -> dict[str, Any]:
        values = asdict(replace(self, finding=replace(self.finding, pictures=())))
        values["finding"] = {
            "passed": self.finding.passed,
            "checks": [check.to_json() for check in self.finding.checks],
            "tables": [asdict(table) for table in self.finding.tables],
            "method": list(self.finding.method),
            "facts": self.finding.facts,
        }
        return values


_COLUMNS = ("what", "goal", "measured", "interval", "verdict")


def show(result: Result, console: Console) -> None:
    console.print(f"[bold]{result.theme}[/bold]: {result.title} ({result.wall_s:.0f} s)", highlight=False)
    for table in (_check_table(result.finding), *result.finding.tables):
        grid = RichTable(*table.columns, title=table.title or None, title_justify="left", box=box.SIMPLE_HEAD)
        for row in table.rows:
            grid.add_row(*map(escape, row))
        console.print(grid)
    for name, value in result.finding.facts.items():
        console.print(f"  {name}: {value}", highlight=False, markup=False)


def write(result: Result, directory: Path) -> Path:
    """Write `<theme>_<hardware>_<yyyymm>.md` and its pictures, over those of the same month."""
    place = result.environment
    month = str(place["date"])[:7].replace("-", "")
    path = directory / f"{result.theme}_{hardware_slug(place)}_{month}.md"
    directory.mkdir(parents=True, exist_ok=True)
    names = {picture.name: f"{path.stem}_{picture.name}.png" for picture in result.finding.pictures}
    path.write_text(_markdown(result, names), encoding="utf-8")
    for picture in result.finding.pictures:
        (directory / names[picture.name]).write_bytes(picture.png)
    return path


def _markdown(result: Result, pictures: Mapping[str, str]) -> str:
    """`pictures` are file names by what they show."""
    finding, place = result.finding, result.environment
    parts = [
        f"# {result.title}",
        _grid(_check_table(finding)),
        "\n".join(textwrap.fill(f"- {line}", 120, subsequent_indent="  ") for line in finding.method),
        *(f"## {table.title}\n\n{_grid(table)}" for table in finding.tables),
    ]
    parts += [f"![{name}]({file})" for name, file in pictures.items()]
    if finding.facts:
        parts.append("\n".join(f"- {name}: {value}" for name, value in finding.facts.items()))
    parts += [
        "## How it was measured",
        f"```text\n{result.command}\n```",
        f"It took {result.wall_s:.0f} s. The resolved configuration, with all seeds:",
        f"```json\n{json.dumps(result.config, indent=2)}\n```",
        "\n".join(f"- {name}: {value}" for name, value in place.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _check_table(finding: Finding) -> Table:
    return Table(title="", columns=_COLUMNS, rows=tuple(_check_row(check) for check in finding.checks))


def _check_row(check: Check) -> tuple[str, ...]:
    unit = f" {check.unit}" if check.unit else ""
    measured = check.measured
    interval = f"{measured.low:.4g} to {measured.high:.4g} ({measured.kind}, n = {measured.count})"
    return check.what, check.goal, f"{measured.value:.4g}{unit}", interval, check.verdict


def _grid(table: Table) -> str:
    lines = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
