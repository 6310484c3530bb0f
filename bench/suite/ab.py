"""One case in two checkouts, in turns: A B A B. Machines are noisy for minutes at a time, ratios in one run are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from suite.environment import environment, hardware_slug
from suite.stats import median

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_RESULTS = Path(__file__).parents[1] / "results"


class Measured(NamedTuple):
    """The number of a check, and which of several is the best: what interferes only makes a run slower."""

    value: float
    best: Callable[[Iterable[float]], float]


@app.command(epilog="Example: python bench/ab.py ../old . controller policytime --pairs 5")
def command(
    old: Annotated[Path, typer.Argument(help="A checkout.", exists=True)],
    new: Annotated[Path, typer.Argument(help="Another checkout.", exists=True)],
    cases: Annotated[list[str], typer.Argument(help="Names of bench/run.py that both checkouts have.")],
    pairs: Annotated[int, typer.Option(min=1, help="How often each runs.")] = 3,
    whole: Annotated[bool, typer.Option("--whole", help="Run whole cases instead of --quick ones.")] = False,
    save: Annotated[bool, typer.Option("--write", help="Write bench/results/ab_<hardware>_<yyyymm>.md.")] = False,
) -> None:
    """Run the same cases of bench/run.py in two checkouts, in turns, with this Python.

    Shows the best number of each check on either side and their ratio, which is the one to trust on a machine that is
    slower for minutes at a time, and the median and range of the ratios of the pairs.
    """
    text = [_facts(old, new, cases, pairs, whole)]
    for case in cases:
        runs: list[tuple[dict[str, Measured], dict[str, Measured]]] = []
        for pair in range(pairs):
            print(f"{case}: pair {pair + 1} of {pairs}", file=sys.stderr, flush=True)
            runs.append((_checks(old, case, whole), _checks(new, case, whole)))
        text.append(_table(case, runs))
        print(text[-1], flush=True)
    if save:
        now = datetime.now(UTC)
        place = _RESULTS / f"ab_{hardware_slug(environment())}_{now:%Y%m}.md"
        place.write_text("\n".join(text), "utf-8")
        print(f"wrote {place.name}", file=sys.stderr)


def _checks(checkout: Path, case: str, whole: bool) -> dict[str, Measured]:
    """What a checkout measures, by the names of its checks. Raises typer.Exit if the case fails."""
    words = [sys.executable, "bench/run.py", case, "--json", *([] if whole else ["--quick"])]
    done = subprocess.run(
        words,
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):  # 1: a goal was missed.
        print(f"error: {case} in {checkout}: {done.stderr.strip()[-2000:]}", file=sys.stderr)
        raise typer.Exit(2)
    result: dict[str, Any] = json.loads(done.stdout)
    return {
        check["what"]: Measured(check["measured"]["value"], max if check["goal"].startswith("≥") else min)
        for check in result["finding"]["checks"]
    }


def _table(case: str, runs: Sequence[tuple[dict[str, Measured], dict[str, Measured]]]) -> str:
    """Checks are matched by their order: a rename of one must not hide it."""
    lines = [
        f"\n## {case}\n",
        "| check | best old | best new | new / old | median of pairs | range of pairs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for index, (name, first) in enumerate(runs[0][0].items()):
        pairs = [(list(before.values())[index].value, list(after.values())[index].value) for before, after in runs]
        old, new = (first.best(pair[side] for pair in pairs) for side in (0, 1))
        ratios = [after / before for before, after in pairs if before]
        compared = (
            f"{new / old:.3f} | {median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f}" if old else "- | - | -"
        )
        lines.append(f"| {name} | {old:.4g} | {new:.4g} | {compared} |")
    return "\n".join(lines)


def _facts(old: Path, new: Path, cases: Sequence[str], pairs: int, whole: bool) -> str:
    options = f"--pairs {pairs}{' --whole' if whole else ''} --write"
    told = {
        "command": f"`python bench/ab.py OLD NEW {' '.join(cases)} {options}`",
        "old": _revision(old),
        "new": _revision(new),
        **environment(),
    }
    return "\n".join(["# Two checkouts in turns", "", *(f"- {name}: {value}" for name, value in told.items())])


def _revision(checkout: Path) -> str:
    words = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "not a git checkout"
