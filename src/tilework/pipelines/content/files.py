"""The files that define a model: two copies of these are the same model, whatever else lies beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tilework.core.model import ModelSource, is_weights_file
from tilework.pipelines.model_index import INDEX, model_directory
from tilework.pipelines.modular.index import MODULAR_INDEX
from tilework.pipelines.workflow.source import is_workflow, workflow_file

_BESIDE_COMPONENTS = (".json", ".py")
_OF_COMPONENTS = (".json", ".txt", ".model", ".jinja", ".py", ".safetensors")


def source_files(source: ModelSource) -> dict[str, Path]:
    """Return the files of a model, by name; none for a model of the hub, which its revision defines.

    A workflow has the file that defines it. Files of quantised weights are included, by their paths.

    Raises:
        ModelNotFound: there is no such model.
    """
    named = {scheme: Path(scheme) for _, scheme in source.quantize if is_weights_file(scheme)}
    if is_workflow(source.path):
        file = workflow_file(source.path)
        return {file.name: file, **named}
    directory = model_directory(source.path)
    return named if directory is None else {**directory_files(directory), **named}


def directory_files(directory: Path) -> dict[str, Path]:
    """Return the files of a model's directory, by their names within it, in order.

    These are the configurations and the code beside its components, and configurations, vocabularies, code and
    safetensors of the components that its index names; without an index those of all folders. Hidden files and folders,
    which download tools leave, do not count, nor do texts for people.
    """
    named = _components(directory)
    folders = sorted(one for one in directory.iterdir() if one.is_dir() and not one.name.startswith("."))
    beside = _OF_COMPONENTS if not named else _BESIDE_COMPONENTS
    found = {path.name: path for path in directory.iterdir() if _counts(path, directory, beside)}
    for folder in [one for one in folders if not named or one.name in named]:
        inside = (path for path in folder.rglob("*") if _counts(path, folder, _OF_COMPONENTS))
        found |= {path.relative_to(directory).as_posix(): path for path in inside}
    return dict(sorted(found.items()))


def _counts(path: Path, directory: Path, suffixes: tuple[str, ...]) -> bool:
    is_hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
    return not is_hidden and path.suffix in suffixes and path.is_file()


def _components(directory: Path) -> set[str]:
    """Return the components that its indices name; none if there is no index that can be read."""
    return {name for index in (INDEX, MODULAR_INDEX) for name in _named(directory / index)}


def _named(index: Path) -> Iterator[str]:
    try:
        contents = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for name, entry in contents.items() if isinstance(contents, dict) else ():
        if isinstance(entry, list) and any(part is not None for part in entry):
            yield name
