"""The files of deploy/, and what they may name: options, settings and metrics of the program."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from tilework.cli.app import app
from tilework.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DRAIN_MARGIN_S = 10
"""How much longer than `drain_s` a stop may take (docs/operations.md)."""


def documents(name: str) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return [one for one in yaml.safe_load_all((DEPLOY / name).read_text("utf-8")) if one is not None]


def of_kind(name: str, kind: str) -> list[dict[str, Any]]:
    return [one for one in documents(name) if one["kind"] == kind]


def check_command(words: list[str]) -> None:
    """Fail if `tilework` has no such command, or the command no such options; `words` begin with the command."""
    command = get_command(app)
    command = command.commands[words[0]]  # type: ignore[attr-defined]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert used <= known, f"{words[0]} has no {used - known}"


def commands_in(text: str) -> Iterator[list[str]]:
    """The commands of `tilework` in a script, without the program's name."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "tilework" in words:
            yield words[words.index("tilework") + 1 :]


def check_variables(names: Mapping[str, object] | list[str]) -> None:
    """Fail if one of these variables begins with TILEWORK_ and is no setting of the server."""
    options = get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    known = {f"TILEWORK_{name.upper()}" for name in ServerConfig.model_fields} | {one.envvar for one in options}
    assert {name for name in names if name.startswith("TILEWORK_")} <= known
