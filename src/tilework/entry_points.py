"""Code of other packages, found by the entry points that they declare, or named as `module:attribute`."""

from __future__ import annotations

import importlib
import importlib.metadata
import traceback
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

_WITH_A_FOLDER = "with its folder in PYTHONPATH"


class NotThere(ValueError):
    """Nothing can be taken from a place, `module:attribute`; the message says why and names the remedy."""


@cache
def declared_places(group: str) -> Mapping[str, str]:
    """Return the places, `module:attribute`, that installed packages declare under this entry point group, by name."""
    found = importlib.metadata.entry_points(group=group)
    return {each.name: each.value for each in sorted(found, key=lambda each: each.name)}


@cache
def load_named(place: str) -> Any:
    """Import what a place, `module` or `module:attribute`, names. Raises NotThere."""
    module_name, _, path = place.partition(":")
    if not module_name or module_name.endswith(".py") or "/" in module_name:
        plain = Path(module_name).stem or "module"
        raise NotThere(f"{module_name!r} is no module; write {plain}:{path or 'Class'}, {_WITH_A_FOLDER}")
    found = _module(module_name)
    for name in path.split(".") if path else ():
        if not hasattr(found, name):
            close = get_close_matches(name, [one for one in dir(found) if not one.startswith("_")], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise NotThere(f"module {module_name!r} has no {path!r}{hint}")
        found = getattr(found, name)
    return found


def cause_of(error: BaseException) -> str:
    """Return an exception in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{at}"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise NotThere(f"there is no module {error.name!r} on Python's path; run it {_WITH_A_FOLDER}") from error
        raise NotThere(f"module {name!r} cannot be imported: it imports {error.name!r}, which is missing") from error
    except Exception as error:
        raise NotThere(f"module {name!r} cannot be imported: {cause_of(error)}") from error
