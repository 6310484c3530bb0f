"""Options of `tilework serve` that exclude each other, each with its reason: all are refused here, in one form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import typer

from tilework.cli.console import UserError
from tilework.cli.options.serve import Backend
from tilework.core.cache import IF_LATE, CacheKind
from tilework.server.config import ServerConfig

_OF_MODELS = (
    *("models_file", "adapter", "loras", "require_all", "no_previews", "dtype", "quantize", "offload", "attention"),
    *("compiles", "cuda_graphs", "copy_stream", "vae_tiling", "weights_memory", "recalibrate", "measure_seconds"),
)
"""Options, by their fields, that say how a model runs, or how it is measured."""
_OF_NODES = ("agents", "least_nodes", "state_copies")


@dataclass(frozen=True, slots=True)
class _Given:
    """The options of a command that differ from their defaults, by the names of their fields."""

    values: dict[str, object]
    flags: dict[str, str]

    @classmethod
    def of(cls, ctx: typer.Context) -> _Given:
        options = {str(one.name): one for one in ctx.command.params}
        values = {name: value for name, value in ctx.params.items() if value not in (options[name].default, [], ())}
        return cls(values, {name: options[name].opts[0] for name in values})

    def has(self, *names: str) -> bool:
        return all(name in self.values for name in names)

    def against(self, name: str, reason: str, remedy: str = "leave one of them out") -> str:
        """Say why an option cannot be."""
        return _refusal(self.flags[name], self.values[name], reason, remedy)


def _refusal(name: str, value: object, reason: str, remedy: str) -> str:
    return f"{name} is {'given' if value is True else value}, and {reason}; {remedy}"


def refuse_options(ctx: typer.Context, config: ServerConfig) -> None:
    """Raise UserError if options of the command, or its settings, exclude each other."""
    given = _Given.of(ctx)
    messages = [*_of_devices(given), *_of_files(given, config), *_of_caches(config)]
    if messages:
        raise UserError(messages[0])


def refuse_in_cells(size: int, config: ServerConfig) -> None:
    """Raise UserError if cells of this size cannot do what the settings ask for."""
    if size == 1:
        return
    if config.exact:
        raise UserError(_refusal("cell", size, "its devices round otherwise than one", "leave out --exact"))
    if "max_batch" in config.model_fields_set and config.max_batch > 1:
        reason = "requests share no forward pass in cells"
        raise UserError(_refusal("max_batch", config.max_batch, reason, "leave it out"))


def _of_devices(given: _Given) -> Iterator[str]:
    if given.values.get("backend") == Backend.MODELLED:
        if given.has("cell"):
            remedy = f"give --cost NAME,cell={given.values['cell']} instead"
            yield given.against("cell", "simulated devices have no weights", remedy)
        for name in filter(given.has, _OF_MODELS):
            remedy = f"leave out {given.flags[name]} or --backend modelled"
            yield given.against(name, "simulated devices run no model", remedy)
    if not given.has("nodes") and not given.has("cluster"):
        for name in filter(given.has, _OF_NODES):
            yield given.against(name, "the server has no nodes", "give --nodes, or leave it out")


def _of_files(given: _Given, config: ServerConfig) -> Iterator[str]:
    if given.has("models", "models_file"):
        yield given.against("models_file", "MODEL names others")
    if given.has("log", "no_log"):
        yield given.against("log", "--no-log wants no event log")
    if given.has("cost", "recalibrate"):
        yield given.against("recalibrate", "--cost says what steps cost, so nothing is measured")
    if given.has("cost", "measure_seconds"):
        yield given.against("measure_seconds", "--cost says what steps cost, so nothing is measured")
    if given.has("standby") and config.durable is None:
        yield given.against("standby", "it waits for the directory of another server", "give it, as --durable DIR")


def _of_caches(config: ServerConfig) -> Iterator[str]:
    cache = config.cache
    if config.exact and cache != "off":
        yield _refusal("cache", cache, "images with it are not exact", "leave out --exact or --cache")
    own = None if cache in ("off", IF_LATE) else CacheKind(cache).setting.name
    if own == "threshold" and config.cache_interval is not None:
        yield _refusal("cache", cache, "it has no interval", "leave out --cache-interval")
    if own == "interval" and config.cache_threshold is not None:
        yield _refusal("cache", cache, "it has no threshold", "leave out --cache-threshold")
