"""Reads the index of a model before loading it: where it is, and which adapter serves it.

Imports no torch, so that a server can refuse a model before it starts workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import httpx

from tilework.core.model import ModelSource
from tilework.pipelines.component_files import check_components, read_object
from tilework.pipelines.defaults import read_overrides
from tilework.pipelines.errors import ModelError, ModelNotFound, UnsupportedModel
from tilework.pipelines.modular.index import MODULAR_INDEX, is_modular, read_components
from tilework.pipelines.support.record import reason_against, served_classes
from tilework.pipelines.workflow.source import is_workflow, pipeline_path, read_workflow, workflow_location

SHIPPED = ("shapes", "shapes-motion")
"""Models that come with Tilework: one draws images, one draws clips."""
INDEX = "model_index.json"
ADAPTERS = {
    "FluxPipeline": "tilework.pipelines.families.flux:Flux",
    "StableDiffusion3Pipeline": "tilework.pipelines.families.sd3:StableDiffusion3",
    "StableDiffusionPipeline": "tilework.pipelines.families.sd:StableDiffusion",
    "StableDiffusionXLPipeline": "tilework.pipelines.families.sdxl:StableDiffusionXL",
}
"""Adapter by class name of the stock pipeline; called with (pipeline, name, overrides, library)."""
STOCK = "tilework.pipelines.stock.stock_pipeline:StockPipeline"
"""Adapter of all other classes. By default it serves those of `served_classes`, and any other if it is named."""
_UNSEEDED = ("CosineDPMSolverMultistepScheduler", "DPMSolverSDEScheduler")
"""Samplers that draw from a Brownian tree (of the package torchsde), which takes no generator and cannot be moved."""
_CHECKPOINTS = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
_HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIndex:
    """A model that can be served as far as its files show. `directory` is None for a hub id.

    `components` is the contents of `model_index.json`: the pipeline's class name, and (library, class) by component;
    for a modular pipeline (`is_modular`), that of `modular_model_index.json` in the same form. `variant` is that of
    `from_pretrained`.
    """

    path: str
    directory: Path | None
    components: Mapping[str, Any]
    adapter: str
    variant: str | None = None

    @property
    def is_modular(self) -> bool:
        return is_modular(self.components)

    @property
    def file(self) -> str:
        """Name of the file that it was read from."""
        return MODULAR_INDEX if self.is_modular else INDEX


def read_model_index(path: str, adapter: str | None = None, in_files: Collection[str] = ()) -> ModelIndex:
    """Return the index of a model, given as in `ModelSource.path`, if its class is supported and its files are sound.

    A named `adapter` serves whatever class it can. The weights of the components `in_files` are in their own files; ""
    stands for those of diffusers. A model that has both indices is a classic pipeline.

    Raises:
        ModelNotFound: there is no such directory and no such model on the hub, or it has no readable index.
        IncompleteModel: `check_components` finds that files are missing or damaged.
        UnsupportedModel: no adapter serves pipelines of its class, or its sampler draws noise that no seed decides; or
            it is a modular pipeline that brings code (`modular.index.read_components`).
        UnsafeWeights: some weights of the directory are there only in pickled form.
    """
    if is_workflow(path):
        raise UnsupportedModel(
            f"{path} is a workflow, which has no stock pipeline and cannot be added later; name it when the server is "
            "started"
        )
    directory = model_directory(path)
    contents = _hub_index(path) if directory is None else _read(path, _index_file(directory))
    file = MODULAR_INDEX if is_modular(contents) else INDEX
    name = contents.get("_class_name")
    adapters = dict.fromkeys(served_classes(), STOCK) | ADAPTERS
    adapter = adapter or (adapters.get(name) if isinstance(name, str) else None)
    if adapter is None:
        reason = reason_against(name) if isinstance(name, str) else "no name of a class"
        raise UnsupportedModel(
            f"{path}: {file} names the pipeline class {name!r}, which is not served ({reason}); `tilework classes` "
            "lists those that are"
        )
    components = read_components(path, directory, contents) if is_modular(contents) else contents
    match components.get("scheduler"):
        case [_, str(sampler)] if sampler in _UNSEEDED:
            raise UnsupportedModel(
                f"{path}: {file} names the sampler {sampler}, which draws noise that no seed decides; choose another"
            )
    variant = None if directory is None else check_components(directory, components, in_files)
    return ModelIndex(path=path, directory=directory, components=components, adapter=adapter, variant=variant)


def read_contents(directory: Path) -> dict[str, Any]:
    """Return the contents of a classic pipeline's index, unchecked. Raises ModelNotFound if it cannot be read."""
    return _read(str(directory), directory / INDEX)


def check_model(path: str, adapter: str | None = None, in_files: Collection[str] = ()) -> None:
    """Check a model as far as its files show, a workflow with all its pipelines.

    Raises:
        ModelError: as `read_model_index`; or as `read_workflow`, which runs the file of a workflow.
    """
    if not is_workflow(path):
        read_model_index(path, adapter, in_files)
        return
    for pipeline in read_workflow(path, adapter).pipelines:
        read_model_index(pipeline_path(path, pipeline.path), pipeline.adapter, in_files)


def _index_file(directory: Path) -> Path:
    """Return the index of a directory: that of a classic pipeline, unless there is only that of a modular one."""
    classic, modular = directory / INDEX, directory / MODULAR_INDEX
    return modular if modular.is_file() and not classic.is_file() else classic


def model_directory(path: str) -> Path | None:
    """Return the model's directory; None if `path` is a hub id. Raises ModelNotFound if it is neither, or a file."""
    if path in SHIPPED:
        return shipped_directory(path)
    place = Path(path)
    if place.is_dir():
        return place
    if place.exists():
        raise ModelNotFound(f"path is {path!r}, which is {_file_remedy(place)}")
    if place.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelNotFound(f"path is {path!r}, which does not exist; give a directory that holds {INDEX}, or a hub id")
    return None


def _file_remedy(file: Path) -> str:
    """Return what kind of file it is, and what to give instead of it."""
    suffix = file.suffix.lower()
    if file.name in (INDEX, MODULAR_INDEX):
        return f"the index of a model; give its directory, {str(file.parent)!r}"
    if suffix == ".py":
        return f"a file of Python; if it defines a workflow, give {file}:NAME"
    if suffix in _CHECKPOINTS:
        return (
            "a checkpoint in a single file, which Tilework does not load; give a directory in diffusers' layout "
            f"({INDEX} and a folder for each component): diffusers' from_single_file reads such a file, and "
            "save_pretrained writes the directory"
        )
    return f"a file; give a directory that holds {INDEX}, or a hub id"


def name_of(source: ModelSource) -> str:
    """Return the name that `loading.load` gives a model, even one that it cannot load, as far as its files say it."""
    if source.name:
        return source.name
    if is_workflow(source.path):
        return source.path.rpartition(":")[2]
    directory = shipped_directory(source.path) if source.path in SHIPPED else Path(source.path)
    if not directory.is_dir():
        return source.path
    name = directory.resolve().name
    with suppress(ModelError):
        name = str(read_overrides(directory).get("name") or name)
    return name


def location(path: str) -> str:
    """Return the directory or workflow that a source's path names, from the root, or the hub id that it is."""
    if is_workflow(path):
        return workflow_location(path)
    directory = model_directory(path)
    return path if directory is None else str(directory.resolve())


def shipped_directory(name: str = SHIPPED[0]) -> Path:
    """Return where the installed package keeps one of the models SHIPPED."""
    return Path(str(resources.files("tilework"))) / "models" / name


def _hub_index(path: str) -> dict[str, Any]:
    """Return the index of a model on the hub: from the local cache if the hub cannot be reached."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

    _require_hub(path)
    try:
        try:
            return _read(path, Path(hf_hub_download(path, INDEX)))
        except EntryNotFoundError:
            return _read(path, Path(hf_hub_download(path, MODULAR_INDEX)))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ModelNotFound(
            f"path is {path!r}: there is no such directory, and the hub has no such model that you may read; "
            f"give a directory that holds {INDEX}, or a hub id ({_first_line(error)})"
        ) from error
    except EntryNotFoundError as error:
        raise ModelNotFound(
            f"path is {path!r}, but this model of the hub has neither {INDEX} nor {MODULAR_INDEX}; give a model in "
            "diffusers' layout"
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
        if any(isinstance(try_to_load_from_cache(path, name), str) for name in (INDEX, MODULAR_INDEX)):
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
    """Return the contents of an index. Raises ModelNotFound if there is none, IncompleteModel if it is unreadable."""
    if not file.is_file():
        raise ModelNotFound(f"path is {path!r}, which has no {INDEX}; give a diffusers directory or a hub id")
    return read_object(file)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
