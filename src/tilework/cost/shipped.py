"""The cost tables in the package; each states its source and its assumptions."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def shipped_names() -> tuple[str, ...]:
    """Return the names of the shipped tables, in alphabetical order."""
    return tuple(sorted(path.stem for path in _directory().glob("*.json")))


def shipped_path(name: str) -> Path | None:
    """Return the file of a shipped table; None if there is none of this name."""
    return _directory() / f"{name}.json" if name in shipped_names() else None


def _directory() -> Path:
    return Path(str(resources.files("tilework"))) / "data" / "cost"
