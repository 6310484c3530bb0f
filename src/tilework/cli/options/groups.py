"""Options in groups: a command takes dataclasses, each field of which is an option."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_type_hints

from typer.core import TyperCommand


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` as typer calls it: a parameter that is a group becomes the options that are its fields.

    A group is a frozen dataclass whose annotations are as typer reads them. Its `heading` (a ClassVar) stands over its
    options in the help of a `GroupedCommand`.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        one = parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
        parameters += _options_of(groups[name]) if name in groups else [one]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=_default(field), annotation=_under(group.heading, hint))
        for field in fields(group)
        if (hint := hints[field.name])
    ]


def _default(field: Field[Any]) -> Any:
    return Parameter.empty if field.default is MISSING else field.default


def _under(heading: str, hint: Any) -> Any:
    """Return the same option, below a heading of the help."""
    kind, option = get_args(hint)
    option = copy(option)
    option.rich_help_panel = heading
    return Annotated[kind, option]


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each group of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
