"""What the package says of itself: as it was installed, or in a checkout that never was, as its pyproject.toml does."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

_NAME = "tilework"
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def version() -> str:
    """Such as "0.1.0".

    Raises:
        PackageNotFoundError: neither an installation nor a checkout says it.
    """
    try:
        return importlib.metadata.version(_NAME)
    except importlib.metadata.PackageNotFoundError:
        return str(_project()["version"])


def python_wanted() -> str:
    """The versions of Python that it runs on, such as ">=3.11". Raises PackageNotFoundError."""
    try:
        return importlib.metadata.metadata(_NAME)["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        return str(_project()["requires-python"])


def requirements() -> list[str]:
    """The packages that it asks for, those of an extra with the marker `extra`. Raises PackageNotFoundError."""
    try:
        return importlib.metadata.requires(_NAME) or []
    except importlib.metadata.PackageNotFoundError:
        project = _project()
        extras = project["optional-dependencies"].items()
        return [*project["dependencies"], *(_of_extra(line, extra) for extra, lines in extras for line in lines)]


def _project() -> dict[str, Any]:
    """The table `project`. A folder into which the package was copied may have a pyproject.toml of its own."""
    import tomllib  # Few need it: what is installed has metadata.

    found = tomllib.loads(_PROJECT.read_text("utf-8")) if _PROJECT.is_file() else {}
    project: dict[str, Any] = found.get("project", {})
    if project.get("name") != _NAME:
        raise importlib.metadata.PackageNotFoundError(_NAME)
    return project


def _of_extra(line: str, extra: str) -> str:
    asked, _, marker = line.partition(";")
    condition = f"({marker.strip()}) and " if marker else ""
    return f"{asked.strip()}; {condition}extra == '{extra}'"
