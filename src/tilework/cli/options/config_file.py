"""`--config`: a TOML file with the settings of a server, by the names that they have in the environment.

Its keys are those of the options and of the server's settings themselves: there is no other list of them. An option
goes before the environment, that before the file, and that before the default.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from tilework.cli.console import UserError
from tilework.cli.options.logs import LogLevel, ServerLog
from tilework.cli.options.nodes import KEPT, TOKEN, NodeGroup
from tilework.cli.options.serve import DeviceGroup, LogGroup, ModelGroup, SchedulingGroup
from tilework.cli.options.settings import ServerGroup
from tilework.pipelines.setup.quantize import begin_at
from tilework.server.config import PREFIX, SECRETS, ConfigError, ServerConfig, load_config

if TYPE_CHECKING:
    from tilework.server.reload import Reread

MODEL = "model"
"""The key of the models that are named without an option."""
LOG_LEVEL = "log_level"
_GROUPS = (ModelGroup, DeviceGroup, NodeGroup, SchedulingGroup, ServerGroup, LogGroup)
_ITSELF = ("config", "show_config", "help")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, its value, and whether that is from an option, the environment, the file or the default."""

    name: str
    value: object
    source: str


def read_into(ctx: typer.Context, path: Path | None) -> Path | None:
    """Let the options of the command have the values of the file, where they are not given in another way.

    What only the server reads is left to `server_settings`. Raises UserError.
    """
    if path is not None:
        ctx.default_map = {_parameters(ctx)[key].name: value for key, value in _of_command(ctx, path).items()}
    return path


def _of_command(ctx: typer.Context, path: Path) -> dict[str, Any]:
    """Return the file's values of the command's options, by key. Raises UserError, also for other mistakes."""
    table = _read(path)
    parameters = _parameters(ctx)
    known = [*parameters, *ServerConfig.model_fields]
    for key in table:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise UserError(f"{path}: {key} is not a setting; the nearest one is {nearest}. Rename or remove it.")
    return {
        key: _converted(ctx, path, key, parameters[key], value) for key, value in table.items() if key in parameters
    }


def resolved(ctx: typer.Context, path: Path | None, given: Mapping[str, object]) -> ServerConfig:
    """Return the settings of the server, of which the options are `given`. Raises ConfigError, UserError."""
    return load_config(given, file=server_settings(ctx, path), others=variables_of(ctx))


def reader(ctx: typer.Context, path: Path | None, given: Mapping[str, object], log: ServerLog) -> Callable[[], Reread]:
    """Return a function that opens the log anew, and reads settings again. Without a file none has changed.

    The function raises ConfigError.
    """
    from tilework.server.reload import Reread

    before = {} if path is None else _of_command(ctx, path)
    found = {key: ctx.get_parameter_source(one.name) for key, one in _parameters(ctx).items()}
    of_file = [key for key, source in found.items() if source is not None and source.name in ("DEFAULT_MAP", "DEFAULT")]
    level = str(ctx.params[LOG_LEVEL])

    def read() -> Reread:
        log.reopen()
        try:
            now = {} if path is None else _of_command(ctx, path)
            config = resolved(ctx, path, given)
        except UserError as error:
            raise ConfigError(str(error)) from None
        except ConfigError as error:  # Nothing else can have changed than the file.
            raise ConfigError(f"{path}: {error}") from None
        differ = tuple(key for key in of_file if key != LOG_LEVEL and now.get(key) != before.get(key))
        wanted = now.get(LOG_LEVEL, LogLevel.WARNING) if LOG_LEVEL in of_file else level
        return Reread(config=config, differ=differ, apply=partial(log.set_level, str(wanted)))

    return read


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="TILEWORK_CONFIG",
        is_eager=True,
        callback=read_into,
        help="TOML file of settings: any option, or variable of the environment; both go before the file "
        "(docs/operations.md).",
    ),
]
ShowConfig = Annotated[
    bool,
    typer.Option("--show-config", help="Print every setting, its value and the source of the value; start nothing."),
]


def server_settings(ctx: typer.Context, path: Path | None) -> dict[str, object]:
    """Return the file's values of settings that the server reads itself; a path begins at the file.

    Raises UserError.
    """
    if path is None:
        return {}
    own = _parameters(ctx)
    return {
        key: str(path.parent / str(value)) if key in _paths() else value
        for key, value in _read(path).items()
        if key not in own
    }


def variables_of(ctx: typer.Context) -> frozenset[str]:
    """Return the variables, without prefix and in lower case, that the command reads itself."""
    own = (one.envvar.removeprefix(PREFIX).lower() for one in ctx.command.params if isinstance(one.envvar, str))
    return frozenset({*own, *(name.removeprefix(PREFIX).lower() for name in (TOKEN, KEPT))})


def all_settings(ctx: typer.Context, server: Mapping[str, tuple[object, str]]) -> Iterator[Setting]:
    """Yield every setting of the command and of the `server` (value and source by name), in the order of the help."""
    for key, parameter in _parameters(ctx).items():
        found = ctx.get_parameter_source(parameter.name)
        yield Setting(name=key, value=ctx.params[parameter.name], source=_SOURCES[found.name if found else "DEFAULT"])
    for name, (value, source) in server.items():
        if name not in _parameters(ctx):
            is_secret = value is not None and (name in SECRETS or "@" in str(value))  # As in redis://:KEY@HOST.
            yield Setting(name=name, value="(not shown)" if is_secret else value, source=source)


_SOURCES = {
    "COMMANDLINE": "option",
    "ENVIRONMENT": "environment",
    "DEFAULT_MAP": "file",
    "DEFAULT": "default",
    "PROMPT": "option",
}


def _parameters(ctx: typer.Context) -> dict[str, Any]:
    """Return the parameters that the command reads itself, by key: the name of the variable, or their own."""
    left_out = {*_ITSELF, *(field.name for field in fields(ServerGroup))}
    return {_key(one): one for one in ctx.command.params if one.name not in left_out}


def _key(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return MODEL
    variable = parameter.envvar
    return variable.removeprefix(PREFIX).lower() if isinstance(variable, str) else str(parameter.name)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config = {str(path)!r} cannot be read: {error.strerror}. Give a TOML file.") from None
    except ValueError as error:
        raise UserError(f"config = {str(path)!r} is not TOML: {error}. Correct it there.") from None


def _converted(ctx: typer.Context, path: Path, key: str, parameter: Any, value: Any) -> Any:
    """Return a value of the file as the option's text would be. Raises UserError."""
    if isinstance(value, list) != (key == MODEL) or isinstance(value, dict):
        raise UserError(f"{path}: {key} = {value!r} cannot be used; give {'a list' if key == MODEL else 'one value'}.")
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise UserError(f"{path}: {key} = {value!r} cannot be used; give true or false.")
        return value
    if isinstance(value, list):
        return [_model(path, str(one)) for one in value]
    text = _text(path, parameter.name, str(value))
    try:
        parameter.process_value(ctx, text)
    except typer.BadParameter as error:
        raise UserError(f"{path}: {key} = {value!r} cannot be used; {error.message}") from None
    return text


def _text(file: Path, name: str, value: str) -> str:
    """Return a value as on the command line; what is a path, or has some, begins at the file."""
    if name == "quantize":
        return begin_at(file.parent, value)
    return str(file.parent / value) if name in _paths() else value


@cache
def _paths() -> frozenset[str]:
    """Return the names of options that are paths."""
    hints = [(name, hint) for group in _GROUPS for name, hint in get_type_hints(group).items()]
    return frozenset(name for name, hint in hints if Path in get_args(hint))


def _model(file: Path, text: str) -> str:
    """Return a model as on the command line; a path that begins with a dot begins at the file."""
    name, equals, path = text.partition("=")
    name, path = (f"{name}=", path) if equals else ("", text)
    return f"{name}{file.parent / path}" if path.startswith(".") else text
