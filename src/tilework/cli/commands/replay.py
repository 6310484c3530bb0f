"""`tilework replay`: feed a log's events to a fresh controller and compare what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilework.cli.console import UserError, out, print_json, user_errors
from tilework.cli.logs import read_with_progress
from tilework.cli.options.common import AsJson, examples
from tilework.control.log import Difference
from tilework.control.log import replay as replay_log
from tilework.policy.registry import UnknownPolicy

EXAMPLE = examples(
    "tilework replay out/demo/events.jsonl",
)


def command(
    log: Annotated[Path, typer.Argument(help="An event log, from `tilework serve --log FILE`.")],
    json: AsJson = False,
) -> None:
    """Recompute every decision of a live run from its event log, and compare them byte for byte.

    Exit status 1 if a decision differs.
    """
    with user_errors(UnknownPolicy):
        num_events, difference = read_with_progress(log, replay_log, quiet=json)
    if num_events == 0 and difference is None:
        raise UserError(f"{log} holds no events; was anything served?")
    if json:
        print_json(_document(num_events, difference))
    elif difference is None:
        out.print(f"{num_events} events replayed: every action is the same, byte for byte.")
    else:
        out.print(f"line {difference.line} differs after {num_events} events that agree", style="red")
        out.print(f"logged:   {difference.logged}", markup=False, soft_wrap=True)
        out.print(f"replayed: {difference.replayed}", markup=False, soft_wrap=True)
    if difference is not None:
        raise typer.Exit(1)


def _document(num_events: int, difference: Difference | None) -> dict[str, object]:
    document: dict[str, object] = {"events": num_events, "identical": difference is None}
    if difference is not None:
        document |= {"line": difference.line, "logged": difference.logged, "replayed": difference.replayed}
    return document
