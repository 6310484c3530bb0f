"""Runs `tilework compare` in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from tilework.cli.app import app


def invoke(*arguments: object, status: int = 0) -> Result:
    """Run a comparison that must end with this status."""
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    assert result.exit_code == status, (result.output, result.exception)
    return result


def document(*arguments: object) -> Any:
    return json.loads(invoke(*arguments, "--json").stdout)
