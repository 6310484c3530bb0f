"""Facts of the package about itself: as installed, or in a checkout that never was, from its pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_NAME = "tilework"
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def version() -> str:
    """Return the version, such as "0.1.0".

    Raises:
        PackageNotFoundError: neither an installation nor a checkout says it.
    """
    try:
        return importlib.metadata.version(_NAME)
    except importlib.metadata.PackageNotFoundError:
        return str(_project()["version"])


def python_wanted() -> str:
    """Return the versions of Python that it runs on, such as ">=3.11". Raises PackageNotFoundError."""
    try:
        return importlib.metadata.metadata(_NAME)["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        return str(_project()["requires-python"])


def requirements() -> list[str]:
    """Return the packages that it asks for, those of an extra with the marker `extra`. Raises PackageNotFoundError."""
    try:
        return importlib.metadata.requires(_NAME) or []
    except importlib.metadata.PackageNotFoundError:
        project = _project()
        extras = project["optional-dependencies"].items()
        return [*project["dependencies"], *(_of_extra(line, extra) for extra, lines in extras for line in lines)]


def install_command(extra: str = "") -> str:
    """Return the command that installs this Tilework again with an extra, from where it came, into the Python that runs
    it.

    No public registry has it: its name alone finds it only where another index does. Raises PackageNotFoundError.
    """
    place, is_editable = _origin()
    chosen = f"[{extra}]" if extra else ""
    remote = "://" in place
    asked = f"{_NAME}{chosen} @ {place}" if remote else f"{place}{chosen}"
    return f"{shlex.quote(sys.executable)} -m pip install {'-e ' if is_editable else ''}{shlex.quote(asked)}"


def install_lab_command() -> str:
    """Return the command that installs the laboratory of this Tilework, from the repository where it came from.

    No extra names it: anyone could put a package of that name on a public index.
    Raises PackageNotFoundError.
    """
    place, is_editable = _origin()
    if "+" in place.partition("://")[0]:
        what = shlex.quote(f"{_NAME}-lab @ {place}#subdirectory=lab")
    elif (Path(place) / "lab").is_dir():
        what = f"{'-e ' if is_editable else ''}{shlex.quote(str(Path(place) / 'lab'))}"
    else:
        what = "./lab, in a checkout of the same version"
    return f"{shlex.quote(sys.executable)} -m pip install {what}"


def _origin() -> tuple[str, bool]:
    """Return a path, a URL, or the name for what an index had; and whether the package is used where it lies."""
    try:
        found = json.loads(importlib.metadata.distribution(_NAME).read_text("direct_url.json") or "{}")
    except importlib.metadata.PackageNotFoundError:
        _project()
        return str(_PROJECT.parent), False
    url = urlsplit(found.get("url", ""))
    if url.scheme == "file":
        return unquote(url.path), bool(found.get("dir_info", {}).get("editable"))
    vcs = found.get("vcs_info", {})
    if vcs:
        return f"{vcs['vcs']}+{url.geturl()}@{vcs['commit_id']}", False
    return url.geturl() or _NAME, False


def _project() -> dict[str, Any]:
    """Return the table `project`. A folder into which the package was copied may have a pyproject.toml of its own."""
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
