"""Reads the index of a model before loading it: where it is, and which adapter serves it.

Imports no torch, so that a server can refuse a model before it starts workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import httpx

from tilework.pipelines.component_files import check_components
from tilework.pipelines.errors import ModelNotFound, UnsupportedModel

SHIPPED = "shapes"
INDEX = "model_index.json"
ADAPTERS = {
    "FluxPipeline": "tilework.pipelines.families.flux:Flux",
    "StableDiffusion3Pipeline": "tilework.pipelines.families.sd3:StableDiffusion3",
    "StableDiffusionPipeline": "tilework.pipelines.families.sd:StableDiffusion",
    "StableDiffusionXLPipeline": "tilework.pipelines.families.sdxl:StableDiffusionXL",
}
"""Adapter by class name of the stock pipeline; called with (pipeline, name, overrides, library)."""
STOCK = "tilework.pipelines.stock.stock_pipeline:StockPipeline"
"""The adapter of any class; of itself it serves those of `stock_classes`. Another class is served if it is named."""
_UNSEEDED = ("CosineDPMSolverMultistepScheduler", "DPMSolverSDEScheduler")
"""Samplers that draw from a Brownian tree (of the package torchsde), which takes no generator and cannot be moved."""
_HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIndex:
    """A model that can be served as far as its files show. `directory` is None for a hub id.

    `components` is the contents of `model_index.json`: the pipeline's class name, and (library, class) by component.
    `variant` is that of `from_pretrained`.
    """

    path: str
    directory: Path | None
    components: Mapping[str, Any]
    adapter: str
    variant: str | None = None


def read_model_index(path: str, adapter: str | None = None) -> ModelIndex:
    """The index of a model, given as in `ModelSource.path`, if its class is supported and its files are sound.

    An `adapter` that is named serves whatever class it can.

    Raises:
        ModelNotFound: there is no such directory and no such model on the hub, or it has no readable index; or
            `check_components` finds that files are missing or damaged.
        UnsupportedModel: no adapter serves pipelines of its class, or its sampler draws noise that no seed decides.
        UnsafeWeights: some weights of the directory are there only in pickled form.
    """
    directory = model_directory(path)
    components = _hub_index(path) if directory is None else _read(path, directory / INDEX)
    name = components.get("_class_name")
    adapters = ADAPTERS | dict.fromkeys(stock_classes(), STOCK)
    adapter = adapter or (adapters.get(name) if isinstance(name, str) else None)
    if adapter is None:
        supported = ", ".join(sorted(adapters))
        raise UnsupportedModel(f"{path}: {INDEX} names the pipeline class {name!r}; supported are {supported}")
    match components.get("scheduler"):
        case [_, str(sampler)] if sampler in _UNSEEDED:
            raise UnsupportedModel(
                f"{path}: {INDEX} names the sampler {sampler}, which draws noise that no seed decides; choose another"
            )
    variant = None if directory is None else check_components(directory, components)
    return ModelIndex(path=path, directory=directory, components=components, adapter=adapter, variant=variant)


@cache
def stock_classes() -> Mapping[str, str]:
    """The classes of diffusers that `STOCK` serves, each with its kind; tests hold each of them to be exact."""
    text = (resources.files("tilework") / "data" / "stock_classes.json").read_text("utf-8")
    return {name: kind for kind, names in json.loads(text).items() for name in names}


def model_directory(path: str) -> Path | None:
    """The model's directory; None if `path` is a hub id. Raises ModelNotFound if it can be neither."""
    if path == SHIPPED:
        return shipped_directory()
    if Path(path).is_dir():
        return Path(path)
    if Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelNotFound(f"path is {path!r}, which is no directory; give one that holds {INDEX}, or a hub id")
    return None


def location(path: str) -> str:
    """The directory that a source's path names, from the root, or the hub id that it is."""
    directory = model_directory(path)
    return path if directory is None else str(directory.resolve())


def shipped_directory() -> Path:
    """Where the installed package keeps the model `shapes`."""
    return Path(str(resources.files("tilework"))) / "models" / SHIPPED


def _hub_index(path: str) -> dict[str, Any]:
    """The index of a model on the hub: from the local cache if the hub cannot be reached."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

    _require_hub(path)
    try:
        return _read(path, Path(hf_hub_download(path, INDEX)))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ModelNotFound(
            f"path is {path!r}: there is no such directory, and the hub has no such model that you may read; "
            f"give a directory that holds {INDEX}, or a hub id ({_first_line(error)})"
        ) from error
    except EntryNotFoundError as error:
        raise ModelNotFound(
            f"path is {path!r}, but this model of the hub has no {INDEX}; give a model in diffusers' layout"
        ) from error
    except OSError as error:
        raise ModelNotFound(f"path is {path!r}; its {INDEX} cannot be fetched ({_first_line(error)})") from error


def _require_hub(path: str) -> None:
    """Raise ModelNotFound if the index is not in the local cache and the hub cannot be reached.

    hf_hub_download itself tries six times, which takes 23 s, and then does not name the directory that is missing.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(path, INDEX), str):
            return
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set"
        else:
            httpx.head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
            return
    except HFValidationError:
        return  # hf_hub_download says what is wrong with the name.
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
    raise ModelNotFound(
        f"path is {path!r}: there is no such directory, and the hub ({constants.ENDPOINT}) cannot be reached "
        f"({reason}); give a directory that holds {INDEX}, or a hub id when there is a connection"
    )


def _read(path: str, file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelNotFound(
            f"path is {path!r}, but {file.parent} has no readable {INDEX}; give a diffusers directory or hub id "
            f"({error})"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
