"""Settings of the server as options of `tilework serve`, each made from its field: there is no other text about it."""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from tilework.server.config import PREFIX, Option, ServerConfig, bounds_of

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def help_of(name: str) -> str:
    """Return the first paragraph about a setting, in one line."""
    return " ".join(str(ServerConfig.model_fields[name].description).partition("\n\n")[0].split())


def option_of(field: FieldInfo) -> Option | None:
    """Return the mark of a setting that is an option."""
    return next((one for one in field.metadata if isinstance(one, Option)), None)


def flag_of(name: str, option: Option) -> str:
    """Return the option as on the command line."""
    return option.flag or f"--{name.replace('_', '-')}"


def default_of(name: str) -> str:
    """Return the default of a setting with its unit; empty if there is none."""
    value = ServerConfig.model_fields[name].default
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.16g}"
    if name.endswith("_bytes"):
        return next(f"{value // size} {unit}" for unit, size in _UNITS if value % size == 0)
    return "" if value is None else str(value)


def range_of(name: str) -> str:
    """Return the range of a setting; empty if it is no number with one."""
    bounds = bounds_of(ServerConfig.model_fields[name])
    return "" if bounds is None else f"{bounds[0]:.16g}<=x<={bounds[1]:.16g}"


def _hint(name: str, field: FieldInfo, option: Option) -> Any:
    """Return the annotation of the option. Not given it is None: the server itself has environment and default."""
    kind = next(one for one in (*get_args(field.annotation), field.annotation) if one is not type(None))
    flag = flag_of(name, option)
    default = default_of(name)
    metavar = option.metavar
    if get_origin(field.annotation) is Literal:
        kind = str
        metavar = "|".join(get_args(field.annotation))
    if kind is bool:
        flag, default = (f"{flag}/--no-{flag[2:]}", default) if field.default else (flag, "")
    if field.annotation is float and range_of(name) == "":
        kind = str  # Its text may be a word.
    more = (f"env var: {PREFIX}{name.upper()}", f"default: {default}" if default else "", range_of(name))
    text = f"{help_of(name)}  [{'; '.join(filter(None, more))}]"
    return Annotated[(Path if option.is_path else kind) | None, typer.Option(flag, metavar=metavar, help=text)]


_OPTIONS = [
    (name, _hint(name, field, option), None)
    for name, field in ServerConfig.model_fields.items()
    if (option := option_of(field)) is not None
]


class ServerGroup(make_dataclass("ServerGroup", _OPTIONS, frozen=True, kw_only=True)):  # type: ignore[misc]
    """Options of the HTTP server: those of its settings that are marked as options."""

    heading: ClassVar[str] = "Server"

    def settings(self) -> dict[str, object]:
        """Return the settings that are given; a path becomes text."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: str(one) if isinstance(one, Path) else one for name, one in given.items() if one is not None}
