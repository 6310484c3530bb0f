"""Python, the packages that Tilework names with their versions, and what was compiled with it."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tilework.cli.doctor.finding import Finding, error, ok, warning
from tilework.distribution import install_command, python_wanted, requirements

_BASE = ""
_OPTIONAL = ("cluster", "gguf", "nvml", "quantize", "redis", "ucx")
"""Extras that a server can do without."""
_OF_VIDEOS = "av"
"""A server of pictures can do without it, too: `served.videos_finding` is about it."""
_EXTENSION = "tilework.comm.ring._native"


def library_findings() -> Iterator[Finding]:
    """Python, the packages of the base install and of each extra, and the C extension."""
    yield python_finding(platform.python_version(), SpecifierSet(python_wanted()))
    asked = [one for text in requirements() if (one := Requirement(text)).name != _OF_VIDEOS]
    for extra in (_BASE, "serve", *_OPTIONAL):
        if named := _of(asked, extra):
            yield packages_finding(extra, named)
    yield _extension_finding()


def python_finding(present: str, wanted: SpecifierSet) -> Finding:
    if wanted.contains(present, prereleases=True):
        return ok("Python", present)
    return error("Python", f"{present}, and {wanted} is needed", "install tilework into a newer Python")


def packages_finding(extra: str, asked: Sequence[Requirement]) -> Finding:
    """Whether the packages of an extra are there, in the versions that are asked for. The base install is "".

    Of an extra that a server can do without, a part or another version is no error: it may be there for other programs.
    """
    problem = warning if extra in _OPTIONAL else error
    what = f"packages of [{extra}]" if extra else "packages"
    install = install_command(extra)
    installed = {one.name: _version(one.name) for one in asked}
    missing = [one.name for one in asked if installed[one.name] is None]
    if extra in _OPTIONAL and len(missing) == len(asked):
        return ok(what, f"not installed, and optional: {install}")
    if missing:
        return problem(what, f"{', '.join(missing)} not installed", install)
    wrong = [one for one in asked if not one.specifier.contains(installed[one.name] or "", prereleases=True)]
    if wrong:
        found = ", ".join(f"{one.name} {installed[one.name]} is not {one.specifier}" for one in wrong)
        return problem(what, found, "pip install " + " ".join(f"'{one.name}{one.specifier}'" for one in wrong))
    return ok(what, ", ".join(f"{name} {number}" for name, number in installed.items()))


def _of(asked: Iterable[Requirement], extra: str) -> list[Requirement]:
    """Those of one extra alone; of the base install those without any."""
    wanted = (one for one in asked if ("extra" in str(one.marker)) == bool(extra))
    return [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": extra})]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _extension_finding() -> Finding:
    if find_spec(_EXTENSION) is not None:
        return ok("C extension", "compiled")
    return warning(
        "C extension",
        "not compiled, so that messages through shared memory take locks",
        "install a C compiler and the headers of Python, and tilework again: "
        f"{install_command()} --force-reinstall --no-deps",
    )
