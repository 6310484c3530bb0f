"""The console that all commands share: where output goes, and how mistakes of the user are reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tilework.distribution import install_command

console = Console(stderr=True, emoji=False)  # Else "file:100:" shows a hundred-points sign.
"""Console for people: progress, notes, errors. Results go to standard output."""

out = Console(emoji=False)


class UserError(Exception):
    """A mistake that the user can correct; the message says how."""

    def __init__(self, message: object) -> None:
        super().__init__(escape(str(message)))


@contextmanager
def user_errors(*types: type[Exception]) -> Iterator[None]:
    """Turn these exceptions into UserError; their messages name field, value and remedy, those of the system a file."""
    try:
        yield
    except types as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise UserError(f"{error.filename}: {error.strerror}") from error
        raise UserError(error) from error


def missing_serve_packages() -> list[str]:
    """Return the missing ones of the packages without which nothing of the extra `serve` can be imported."""
    return [name for name in ("torch", "diffusers", "transformers", "fastapi", "uvicorn") if find_spec(name) is None]


def require_serve_extra() -> None:
    """Raise UserError if the packages that run models are not installed."""
    if missing := missing_serve_packages():
        raise UserError(f"{', '.join(missing)} not installed; run: {install_command('serve')}")


def print_json(document: Any) -> None:
    print(json.dumps(document, ensure_ascii=False), flush=True)


def progress(quiet: bool = False) -> Progress:
    """Return a progress bar on stderr that goes away when it is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
