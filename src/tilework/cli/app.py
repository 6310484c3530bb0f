"""The command `tilework`: its own commands, and those that installed packages declare."""

from __future__ import annotations

import sys

import typer

import tilework
from tilework.cli.commands import (
    agent,
    bench,
    classes,
    cost,
    demo,
    doctor,
    explain,
    fake,
    fuzz,
    generate,
    plan,
    profile,
    quality,
    replay,
    serve,
    simulate,
    timeline,
    verify,
    workload,
)
from tilework.cli.console import UserError, console
from tilework.cli.options.common import examples
from tilework.cli.options.groups import GroupedCommand
from tilework.entry_points import declared_places, load_named

ENTRY_POINTS = "tilework.commands"
"""The group of entry points by which installed packages declare commands."""


def _add_declared(app: typer.Typer) -> None:
    """Add the commands of other packages: modules with `command`, and `EXAMPLE` for the end of its help.

    The list of commands names the package of each. A module that cannot be imported is named on stderr; the other
    commands work.
    """
    for name, place in declared_places(ENTRY_POINTS).items():
        try:
            module = load_named(place)
        except Exception as error:
            console.print(f"tilework {name}: {place} cannot be imported: {error}", markup=False, highlight=False)
            continue
        summary = (module.command.__doc__ or "").partition("\n\n")[0]
        summary = f"({module.__name__.partition('.')[0]}) {summary}"
        app.command(name, epilog=module.EXAMPLE, short_help=summary)(module.command)


app = typer.Typer(
    name="tilework",
    help="Serving for diffusion models that keeps each request's deadline.",
    epilog=examples("tilework serve", "tilework bench --help"),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve", epilog=serve.EXAMPLE, cls=GroupedCommand)(serve.command)
app.command("agent", epilog=agent.EXAMPLE)(agent.command)
app.command("generate", epilog=generate.EXAMPLE)(generate.command)
app.command("simulate", epilog=simulate.EXAMPLE)(simulate.command)
app.command("plan", epilog=plan.EXAMPLE)(plan.command)
app.command("bench", epilog=bench.EXAMPLE)(bench.command)
app.command("replay", epilog=replay.EXAMPLE)(replay.command)
app.command("timeline", epilog=timeline.EXAMPLE)(timeline.command)
app.command("explain", epilog=explain.EXAMPLE)(explain.command)
app.command("fuzz", epilog=fuzz.EXAMPLE)(fuzz.command)
app.command("classes", epilog=classes.EXAMPLE)(classes.command)
app.command("fake", epilog=fake.EXAMPLE)(fake.command)
app.command("profile", epilog=profile.EXAMPLE)(profile.command)
app.command("quality", epilog=quality.EXAMPLE)(quality.command)
app.add_typer(cost.app, name="cost")
app.add_typer(workload.app, name="workload")
app.command("verify", epilog=verify.EXAMPLE)(verify.command)
app.command("doctor", epilog=doctor.EXAMPLE)(doctor.command)
app.command("demo", epilog=demo.EXAMPLE)(demo.command)
_add_declared(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(tilework.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def run() -> None:
    try:
        app()
    except UserError as error:
        console.print(f"[red]error:[/red] {error}", highlight=False, markup=True, soft_wrap=True)
        sys.exit(2)
