"""The workflow that a source names: FILE.py:NAME. Its file is code of the user, which is run.

Imports no torch; the user's file may.
"""

from __future__ import annotations

import re
import sys
import traceback
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from tilework.pipelines.errors import InvalidSource, InvalidWorkflow
from tilework.pipelines.workflow.definition import Workflow

_PATH = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")


def is_workflow(path: str) -> bool:
    """Return whether the path of a source names a workflow. Reads nothing."""
    return _PATH.fullmatch(path) is not None


def workflow_file(path: str) -> Path:
    """Return the file of a workflow, from the root."""
    match = _PATH.fullmatch(path)
    assert match is not None, "it names no workflow"
    return Path(match["file"]).resolve()


def workflow_location(path: str) -> str:
    """Return the path of a workflow, from the root."""
    return f"{workflow_file(path)}:{path.rpartition(':')[2]}"


def read_workflow(path: str, adapter: str | None = None) -> Workflow:
    """Run the file of a workflow, once in a process, and return the workflow in it.

    It can import modules beside the file.

    Raises:
        InvalidSource: an adapter is named as well.
        InvalidWorkflow: there is no such file, it raises an error, or it has no such workflow.
    """
    if adapter is not None:
        raise InvalidSource(f"adapter is {adapter!r}, and {path} is a workflow; give it there, Pipeline(..., adapter=)")
    file = workflow_file(path)
    name = path.rpartition(":")[2]
    found = vars(_module(file)).get(name)
    if not isinstance(found, Workflow):
        known = [name for name, value in vars(_module(file)).items() if isinstance(value, Workflow)]
        has = f"it has {', '.join(known)}" if known else f'write {name} = tilework.Workflow("NAME", ...) there'
        raise InvalidWorkflow(f"path is {path!r}, but {name} is no workflow of {file.name}; {has}")
    return found


def pipeline_path(workflow: str, path: str) -> str:
    """Return the path of a pipeline of a workflow; one that begins with a dot begins at the workflow's file."""
    return str(workflow_file(workflow).parent / path) if path.startswith(".") else path


@cache
def _module(file: Path) -> ModuleType:
    if not file.is_file():
        raise InvalidWorkflow(f"path is {str(file)!r}, and there is no such file; give FILE.py:NAME")
    spec = spec_from_file_location(f"tilework_workflow_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # Dataclasses look their module up.
    if (folder := str(file.parent)) not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except InvalidWorkflow as error:
        raise InvalidWorkflow(f"{file}: {error}") from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        place = f"line {lines[-1]} of {file}" if lines else str(file)
        raise InvalidWorkflow(
            f"{place} raises {type(error).__name__}: {error}; correct it, and try python {file.name}"
        ) from error
    return module
