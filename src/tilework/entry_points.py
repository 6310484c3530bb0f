"""Policies, workloads and commands of other packages, found by the entry points that these packages declare."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from functools import cache
from typing import Any


class NotThere(ValueError):
    """A place, `module:attribute`, cannot be imported, or the module has no such attribute."""


@cache
def declared_places(group: str) -> Mapping[str, str]:
    """Return the places, `module:attribute`, that installed packages declare under this entry point group, by name."""
    found = importlib.metadata.entry_points(group=group)
    return {each.name: each.value for each in sorted(found, key=lambda each: each.name)}


@cache
def load(place: str) -> Any:
    """Import what a place, `module` or `module:attribute`, names.

    Raises NotThere, and whatever the module itself raises.
    """
    module_name, _, path = place.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        remedy = "PYTHONPATH=DIRECTORY adds a folder"
        raise NotThere(f"there is no module {error.name!r} on Python's path; {remedy}") from error
    for name in path.split(".") if path else ():
        if not hasattr(found, name):
            raise NotThere(f"module {module_name!r} has no {path!r}")
        found = getattr(found, name)
    return found
