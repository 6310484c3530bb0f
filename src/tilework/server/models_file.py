"""The models of a server, read from a TOML file: their places, other names for clients, and usual deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tilework.core.model import MODEL_NAME
from tilework.core.pools import is_devices, unknown_device
from tilework.pipelines.setup.quantize import begin_at
from tilework.server.config import ConfigError, ModelName
from tilework.server.default_slo import WANTED, DefaultSlo, DefaultSloField
from tilework.server.toml_file import KEY, place, read_toml

_WANTED = {
    "path": 'a diffusers directory or a hub id, path = "./sdxl"',
    "aliases": 'a list of other names, aliases = ["sd-xl"], each of ' + MODEL_NAME,
    "dtype": "float32, bfloat16 or float16",
    "adapter": 'MODULE:CLASS, adapter = "my_model:MyPipeline"',
    "default_slo": WANTED,
    "devices": "a list of workers from 0 that serve it, each once, devices = [0, 1]; without it all do",
    "quantize": 'a scheme of --quantize or a file, quantize = "fp8"',
    "vae_tiling": "true or false",
    "previews": "true or false",
    "loras": 'the directory of its LoRAs, loras = "./loras"',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A table `[models.NAME]`. A relative `path` begins at the directory of the file, and so do those of `loras` and of
    files in `quantize`.

    `default_slo` is the deadline of requests that give none. `loras` is the directory of the LoRAs that requests for
    this model may use. `devices` are the accelerators that serve it, ascending; None: all. `quantize` is as for
    `--quantize`, `vae_tiling` decides whether it decodes in tiles, `previews` whether it draws any; None: the server's
    setting.
    """

    path: str
    aliases: tuple[str, ...] = ()
    dtype: str | None = None
    adapter: str | None = None
    default_slo: DefaultSlo | None = None
    loras: str | None = None
    devices: tuple[int, ...] | None = None
    quantize: str | None = None
    vae_tiling: bool | None = None
    previews: bool | None = None


def _checked_devices(value: Any) -> Any:
    if not is_devices(value):
        raise ValueError
    return value


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    path: str = Field(min_length=1)
    aliases: list[ModelName] = []
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    adapter: str | None = None
    default_slo: DefaultSloField = None
    loras: str | None = Field(None, min_length=1)
    devices: Annotated[Any, AfterValidator(_checked_devices)] = None
    quantize: str | None = Field(None, min_length=1)
    vae_tiling: bool | None = None
    previews: bool | None = None


class _ModelsFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    models: dict[ModelName, _Model] = Field(min_length=1)


def read_models(path: str | None) -> Mapping[str, ModelEntry]:
    """Return the models of a file by name, the first one first; none without a file.

    Raises:
        ConfigError: the file cannot be used; the message names key, value and remedy.
    """
    if path is None:
        return {}
    file = read_toml("models", path, _ModelsFile, _mistake)
    _check_distinct(path, file)
    return {name: _entry(one, Path(path).parent) for name, one in file.models.items()}


def check_workers(path: str, models: Mapping[str, ModelEntry], num_workers: int) -> None:
    """Raise ConfigError if a model of the file at `path` names a worker that does not exist."""
    for name, one in models.items():
        if (unknown := unknown_device(one.devices, num_workers)) is not None:
            raise ConfigError(
                f"{path}: models.{name}.devices has {unknown}, and there are {num_workers} workers, from 0; leave it "
                f"out, or give --workers {unknown + 1}."
            )


def _entry(one: _Model, place: Path) -> ModelEntry:
    return ModelEntry(
        path=str(place / one.path) if (place / one.path).is_dir() else one.path,
        aliases=tuple(one.aliases),
        dtype=one.dtype,
        adapter=one.adapter,
        default_slo=one.default_slo,
        loras=None if one.loras is None else str(place / one.loras),
        devices=None if one.devices is None else tuple(sorted(one.devices)),
        quantize=None if one.quantize is None else begin_at(place, one.quantize),
        vae_tiling=one.vae_tiling,
        previews=one.previews,
    )


def _mistake(error: Any) -> str:
    """Describe a mistake in a value of the file, its place, and the remedy."""
    path, at = place(error)
    if error["loc"][-1] == KEY:
        return f"models.{path[-1]!r} is not a name; use {MODEL_NAME}."
    if error["type"] == "extra_forbidden":
        known = "[models.NAME]" if len(path) < 3 else ", ".join(_WANTED)
        return f"{at} is not known; give {known}, or leave it out."
    if error["type"] in ("missing", "too_short") or len(path) < 3:
        return f'{at} is missing or empty; give [models.NAME] with path = "..." for each model.'
    return f"{at} = {error['input']!r} cannot be used; give {_WANTED[str(path[2])]}."


def _check_distinct(path: str, file: _ModelsFile) -> None:
    """Check that no name means two models. Raises ConfigError."""
    taken = dict.fromkeys(file.models, "")
    for name, one in file.models.items():
        for alias in one.aliases:
            if alias in taken:
                raise ConfigError(
                    f"{path}: models.{name}.aliases has {alias!r}, which names another model; take it out."
                )
            taken[alias] = name
