"""Reads the TOML files of a server's settings, and gives the place of a mistake in them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tilework.server.config import ConfigError

File = TypeVar("File", bound=BaseModel)
KEY = "[key]"
"""Mark in the place of a mistake that is in the name of the table before it."""


def read_toml(setting: str, path: str, kind: type[File], explain: Callable[[Any], str]) -> File:
    """Read the file that a setting names. `explain` turns pydantic's first error into what to give instead.

    Raises:
        ConfigError: the file cannot be used; the message names it.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{setting} = {path!r} cannot be read: {error.strerror}. Give a TOML file.") from None
    except ValueError as error:
        raise ConfigError(f"{setting} = {path!r} is not TOML: {error}. Correct it there.") from None
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error.errors()[0])}") from None


def place(error: Any) -> tuple[Sequence[str | int], str]:
    """Return the place of a mistake: its path, and the same as in TOML, `models.a.aliases[0]`."""
    path = [one for one in error["loc"] if one != KEY]
    return path, "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path).lstrip(".")
