"""Reads the index of a modular pipeline: its class, and where each of its components is.

Imports no torch, so that a server can refuse a model before it starts workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from tilework.pipelines.errors import ModelNotFound, UnsafeWeights, UnsupportedModel

MODULAR_INDEX = "modular_model_index.json"
BLOCKS = "_blocks_class_name"
_CUSTOM_CODE = "modular_config.json"
_LIBRARIES = ("diffusers", "transformers")
"""Libraries of components; folders of diffusers' `pipelines` are also allowed, by their names alone."""


def is_modular(contents: Mapping[str, Any]) -> bool:
    """Return whether the contents of an index are those of a modular pipeline."""
    return BLOCKS in contents


def read_components(path: str, directory: Path | None, contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a modular index in the form of `model_index.json`: (library, class) by component.

    Components without a place to be loaded from are (None, None).

    Raises:
        ModelNotFound: a component is not in the directory.
        UnsupportedModel: the directory has its own blocks, which are code; or a component is no class of diffusers or
            transformers, or in a folder of another name.
        UnsafeWeights: a component is a single file, which may be pickled.
    """
    if directory is not None and (directory / _CUSTOM_CODE).exists():
        raise UnsupportedModel(
            f"{directory / _CUSTOM_CODE}: names blocks that are Python code beside the weights; no code of a model is "
            "run here: save the pipeline with blocks of diffusers"
        )
    entries = {name: value for name, value in contents.items() if isinstance(value, list) and len(value) == 3}
    plain = {name: value for name, value in contents.items() if not isinstance(value, list)}
    return plain | {name: _component(path, directory, name, value) for name, value in entries.items()}


def _component(path: str, directory: Path | None, name: str, value: list[Any]) -> list[str | None]:
    library, kind, spec = value
    if not isinstance(spec, dict):
        raise ModelNotFound(f"{path}: {MODULAR_INDEX} has no source of {name}; save the pipeline again")
    library, kind = spec.get("type_hint") or (library, kind)
    source = spec.get("pretrained_model_name_or_path") or spec.get("repo")
    if source is None:
        return [None, None]
    if not isinstance(kind, str) or not (library in _LIBRARIES or _is_folder_of_diffusers(library)):
        raise UnsupportedModel(
            f"{path}: {MODULAR_INDEX} names {name} a {kind!r} of {library!r}; components are classes of "
            f"{' or '.join(_LIBRARIES)}"
        )
    if directory is None:
        if "://" in str(source) or PurePosixPath(str(source)).suffix in (".ckpt", ".safetensors", ".bin", ".pt"):
            raise UnsafeWeights(
                f"{path}: {MODULAR_INDEX} takes {name} from the single file {source!r}; components are read from "
                "folders with safetensors"
            )
        return [library, kind]
    folder = spec.get("subfolder") or ""
    if folder != name:
        raise UnsupportedModel(
            f"{path}: {MODULAR_INDEX} has {name} in the folder {folder!r}; save the pipeline again, so that each "
            "component is in a folder of its own name"
        )
    if not (directory / name).is_dir():
        raise ModelNotFound(
            f"{directory / name}: is missing; {MODULAR_INDEX} takes {name} from {source!r}, but a directory is read "
            "without any network: save the whole pipeline with save_pretrained, or fetch that folder to this place"
        )
    return [library, kind]


def _is_folder_of_diffusers(library: object) -> bool:
    """Return whether diffusers has its own components under this name, such as the connectors of ltx2."""
    found = find_spec("diffusers")
    if not isinstance(library, str) or not library.isidentifier() or found is None:
        return False
    return any((Path(place) / "pipelines" / library).is_dir() for place in found.submodule_search_locations or ())
