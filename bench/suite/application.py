"""The command line of a script that measures cases."""

from __future__ import annotations

import gc
import json as jsonlib
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from suite.case import CaseFailed, Maker
from suite.children import leave_on
from suite.environment import environment
from suite.results import Result, show, write

RESULTS = Path(__file__).parents[1] / "results"
_out = Console(width=None if sys.stdout.isatty() else 160)
_err = Console(stderr=True, soft_wrap=True)

Cases = Mapping[str, tuple[str, Maker]]
"""Title of each case by name, and what makes it."""


def application(cases: Cases, script: str, about: str, example: str, results: Path = RESULTS) -> typer.Typer:
    """The command line of a script that measures these cases."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command(
        help=about + "\n\n" + "\n\n".join(f"{name}: {title}." for name, (title, _) in cases.items()),
        epilog=f"Example: python {script} {example}",
    )
    def command(
        names: Annotated[list[str] | None, typer.Argument(metavar="[CASES]...")] = None,
        quick: Annotated[
            bool, typer.Option("--quick", help="Short and rough, to try the bench itself; cannot be written.")
        ] = False,
        json: Annotated[bool, typer.Option("--json", help="Print one JSON object per case instead of tables.")] = False,
        save: Annotated[bool, typer.Option("--write", help="Write <theme>_<hardware>_<yyyymm>.md.")] = False,
        out: Annotated[
            Path,
            typer.Option(help="With --write, the folder of the files.", show_default="results/ beside the script"),
        ] = results,
    ) -> None:
        chosen = list(dict.fromkeys(names or cases))
        _check(cases, chosen, quick and save)
        leave_on(signal.SIGTERM)  # By which `timeout` ends a run: servers must not outlive it.
        passed, failed = True, list[str]()
        for name in chosen:
            result = _measure(cases, name, quick, _command_line(script, name, quick, save))
            _free_memory()
            if result is None:
                failed.append(name)
                continue
            passed = passed and result.finding.passed
            if json:
                print(jsonlib.dumps(result.to_json(), ensure_ascii=False), flush=True)
            else:
                show(result, _out)
            if save:
                _err.print(f"wrote {write(result, out).name}")
        if failed and len(chosen) > 1:
            _err.print(f"[red]not measured:[/red] {', '.join(failed)}", highlight=False)
        raise typer.Exit(2 if failed else 0 if passed else 1)

    return app


def _check(cases: Cases, names: Sequence[str], keeps_rough: bool) -> None:
    for name in names:
        if name not in cases:
            raise typer.BadParameter(f"{name!r} is no case; choose from {', '.join(cases)}")
    if keeps_rough:
        raise typer.BadParameter("--quick is too rough to be kept; leave it or --write out")


def _measure(cases: Cases, name: str, quick: bool, command_line: str) -> Result | None:
    """The result of a case; None if it failed, which is printed: those after it may be measured all the same."""
    title, kind = cases[name]
    place, start_s = environment(), time.monotonic()

    def note(text: str) -> None:
        _err.print(f"[dim]{time.monotonic() - start_s:6.1f} s  {name}: {escape(text)}[/dim]", highlight=False)

    note("started")
    try:
        case = kind.make(quick)
        assert is_dataclass(case)
        finding = case.measure(note)
    except CaseFailed as error:
        _err.print(f"[red]error:[/red] {name}: {escape(str(error))}", highlight=False)
        return None
    except Exception as error:
        traceback.print_exc()
        _err.print(f"[red]error:[/red] {name}: {type(error).__name__}, as above", highlight=False)
        return None
    return Result(
        theme=name,
        title=title,
        command=command_line,
        config=asdict(case),
        environment=place,
        wall_s=time.monotonic() - start_s,
        quick=quick,
        finding=finding,
    )


def _free_memory() -> None:
    """Give back what a case has left on a GPU, where other processes may need it for the next one."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _command_line(script: str, name: str, quick: bool, save: bool) -> str:
    """The shortest command that measures this case so again."""
    options = [*(["--quick"] if quick else []), *(["--write"] if save else [])]
    return " ".join([f"python {script}", name, *options])
