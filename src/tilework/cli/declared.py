"""Commands of other packages, found by their entry points."""

from __future__ import annotations

import typer

from tilework.cli.console import console
from tilework.entry_points import declared_places, load

ENTRY_POINTS = "tilework.commands"


def add_declared(app: typer.Typer) -> None:
    """Add the commands that installed packages declare: modules with `command`, and `EXAMPLE` for the end of its help.

    One that cannot be imported is named on stderr, and the other commands work.
    """
    for name, place in declared_places(ENTRY_POINTS).items():
        try:
            module = load(place)
        except Exception as error:
            console.print(f"tilework {name}: {place} cannot be imported: {error}", markup=False, highlight=False)
            continue
        app.command(name, epilog=module.EXAMPLE)(module.command)
