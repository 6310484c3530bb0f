"""The command line: `record` with the old code, `record` with the new, `compare`; `live` once with the old."""

from __future__ import annotations

import platform
import sys
import time
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from suite.decisions.cells import CELLS
from suite.decisions.compare import BadRecording, Comparison, Verdict, about_of
from suite.decisions.live import RUNS, record_live
from suite.decisions.names import NAMES, read_names
from suite.decisions.record import LIVE, OutTaken, Recorder
from suite.decisions.result import result, summary
from suite.decisions.subject import Subject

RESULTS = Path(__file__).parents[2] / "results"
_NamesFile = Annotated[Path, typer.Option(help="What was renamed.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.command()
def record(
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    seeds: Annotated[int, typer.Option(min=0, help="Scenarios of fuzzing.")] = 2600,
    first: Annotated[int, typer.Option(min=0, help="The first of their seeds.")] = 0,
    cells: Annotated[str, typer.Option(help="Only the cells whose names match, as names of files do.")] = "*",
    names: _NamesFile = NAMES,
) -> None:
    """Record schedules and scenarios with the Tilework that is importable: PYTHONPATH says which."""
    recorder = Recorder(subject=Subject(names=read_names(names)), out=out, note=_note)
    chosen = [cell for cell in CELLS if fnmatchcase(cell.name, cells)]
    try:
        recorder.record(chosen, range(first, first + seeds))
    except OutTaken as error:
        _note(f"error: {error}")
        raise typer.Exit(2) from error
    _note(f"{recorder.num_logs} logs, {recorder.num_events} events, {len(recorder.failures)} failures")


@app.command()
def live(
    out: Annotated[Path, typer.Argument(help="Directory of the recording.")],
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(run.name for run in RUNS)}.")] = None,
) -> None:
    """Record live servers with real workers, which takes about six minutes; only the old code's logs are compared."""
    record_live(out / LIVE, tuple(run for run in RUNS if only is None or run.name in only))


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="What the old code decided.")],
    new: Annotated[Path, typer.Argument(help="What the new code decided.")],
    every: Annotated[
        bool, typer.Option("--all", help="Print a line for each log, also where nothing differs.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write bench/results/decisions_YYYYMM.md.")] = False,
    names: _NamesFile = NAMES,
) -> None:
    """Compare two recordings, and replay the old one's live logs with the Tilework that is importable.

    Cells and seeds that the new one was not asked to record are left out. Exit status 1 if anything differs.
    """
    began_s = time.monotonic()
    table = read_names(names)
    subject = Subject(names=table)
    verdicts: list[Verdict] = []
    try:
        for one in Comparison(old=old, new=new, names=table, subject=subject).verdicts():
            verdicts.append(one)
            if every:
                print(f"{one.part} {one.group} {one.name}: {one.difference or f'same, {one.num_events} events'}")
    except BadRecording as error:
        _note(f"error: {error}")
        raise typer.Exit(2) from error
    print(summary(verdicts))
    if write:
        now = datetime.now(UTC)
        facts = _facts(about_of(old), about_of(new), subject) | {"date": now.strftime("%Y-%m-%d")}
        place = RESULTS / f"decisions_{now:%Y%m}.md"
        place.write_text(
            result(verdicts, facts | {"seconds": round(time.monotonic() - began_s)}, table.deliberate), "utf-8"
        )
        _note(f"written: {place.name}")
    if any(one.difference for one in verdicts):
        raise typer.Exit(1)


def _facts(old: dict[str, Any], new: dict[str, Any], subject: Subject) -> dict[str, Any]:
    told = {
        title: f"{about['revision']}, {about['logs']:,} logs, {about['events']:,} events, {about['seconds']} s"
        for title, about in (("old", old), ("new", new))
    }
    command = "python bench/decisions.py record OUT, with either; python bench/decisions.py compare OLD NEW --write"
    return {"command": f"`{command}`", **told, "replayed by": subject.revision, "python": platform.python_version()}


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
