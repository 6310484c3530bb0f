"""Runs a command of the command line in this process."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from tilework.cli.app import app


def invoke(*arguments: object) -> Result:
    """Run a command that must succeed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result
