"""The command line that tries the commands of the README on a fresh machine."""

from __future__ import annotations

import json as jsonlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from suite.children import leave_on
from suite.fresh_machine import Machine, Step, index_settings, pip_config, run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_CHECKOUT = Path(__file__).parents[2]
_NEEDED_BYTES = 12 << 30  # Of which Debian and a CUDA build of torch take 6.
_TAIL = 40


class Suite(StrEnum):
    TRIXIE = "trixie"
    SID = "sid"


class Target(StrEnum):
    DEMO = "demo"
    TEST = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """`last` is the last line that the step printed."""

    what: str
    exit_status: int
    seconds: float
    last: str


@app.command(epilog="Example: python bench/fresh.py trixie --only demo --torch torch==2.13.0")
def command(
    suite: Annotated[Suite, typer.Argument(help="A suite of Debian: trixie has Python 3.13, sid 3.14.")],
    only: Annotated[Target | None, typer.Option(help="Run this command alone.")] = None,
    torch: Annotated[str, typer.Option(help="The build of torch, if not that of the Makefile.")] = "",
    torch_index: Annotated[str, typer.Option(help="The index that has it.")] = "",
    mirror: Annotated[str, typer.Option(help="Where Debian's packages are.")] = "http://deb.debian.org/debian",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the machine's folder.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Run `make demo` and `make test` as a new user, in a bare Debian that is made for it. Before a release.

    The machine has Debian's python3, python3-venv, git and make, a clone of the last commit, and no variable but PATH,
    HOME and LANG. It is a folder in the temporary one (TMPDIR) that is removed at the end; 12 GB must be free there.
    You must be root. Takes 10 to 40 minutes and a download of 3 GB, or less with another build of torch. If pip is
    configured here, the machine has the same index. Exit status 1 if a command fails, whose log is left then; 2 if
    there is no machine.
    """
    folder = _folder()
    leave_on(signal.SIGTERM)
    settings = {"TORCH": torch, "TORCH_INDEX": torch_index}
    machine = Machine(
        suite=suite,
        root=folder / "machine",
        checkout=_CHECKOUT,
        mirror=mirror,
        make=tuple(f"{name}={value}" for name, value in settings.items() if value),
    )
    log, passed = folder / "log", False
    print(f"log: {log}", file=sys.stderr)
    try:
        _require(_run(step, log) for step in machine.setup(has_debootstrap=shutil.which("debootstrap") is not None))
        machine.connect(index_settings(pip_config()))
        ended = [_run(machine.types(target), log) for target in ([only] if only else Target)]
        passed = not any(one.exit_status for one in ended)
        _show(machine, ended, json)
    finally:
        if keep:
            print(f"left: {machine.root}; enter it by chroot", file=sys.stderr)
        else:
            shutil.rmtree(machine.root, ignore_errors=True)
            if passed:
                shutil.rmtree(folder)
    raise typer.Exit(0 if passed else 1)


def _folder() -> Path:
    """A new folder. Raises typer.BadParameter if a machine cannot be made there by this user."""
    if os.geteuid() != 0:
        raise typer.BadParameter("only root can make a machine; run it by sudo, or as root of a virtual machine")
    place = Path(tempfile.gettempdir())
    free = shutil.disk_usage(place).free
    if free < _NEEDED_BYTES:
        raise typer.BadParameter(
            f"{place} has {free / 1e9:.0f} GB free, and {_NEEDED_BYTES / 1e9:.0f} are needed; name another by TMPDIR"
        )
    folder = Path(tempfile.mkdtemp(prefix="tilework-fresh-"))
    folder.chmod(0o755)  # Programs of the machine that are not root's must reach what is in it.
    return folder


def _run(step: Step, log: Path) -> Ended:
    print(f"{step.what} ...", file=sys.stderr, flush=True)
    start_s = time.monotonic()
    status = run(step, log)
    seconds = time.monotonic() - start_s
    lines = log.read_text("utf-8", "replace").splitlines()
    if status:
        print(*lines[-_TAIL:], f"exit status {status}; all of it: {log}", sep="\n", file=sys.stderr)
    ended = Ended(what=step.what, exit_status=status, seconds=seconds, last=lines[-1].strip())
    print(f"{step.what}: {'failed' if status else 'passed'}, {_minutes(seconds)}", file=sys.stderr, flush=True)
    return ended


def _require(ended: Iterable[Ended]) -> None:
    for one in ended:
        if one.exit_status:
            raise typer.Exit(2)


def _show(machine: Machine, ended: list[Ended], as_json: bool) -> None:
    python = os.readlink(machine.root / "usr/bin/python3")
    if as_json:
        found = {"suite": machine.suite, "python": python, "revision": _revision(), "commands": [*map(asdict, ended)]}
        print(jsonlib.dumps(found, ensure_ascii=False))
        return
    for one in ended:
        status = f"failed ({one.exit_status})" if one.exit_status else "passed"
        print(f"{machine.suite}, {python}, {_revision()}: {one.what}: {status}, {_minutes(one.seconds)}: {one.last}")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _revision() -> str:
    words = ["git", "-c", "safe.directory=*", "-C", str(_CHECKOUT), "describe", "--always", "--abbrev=10"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
