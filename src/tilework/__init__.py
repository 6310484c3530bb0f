"""Tilework: serving for diffusion models that keeps each request's deadline."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilework.distribution import version

if TYPE_CHECKING:
    from tilework.pipelines.reference import reference
    from tilework.pipelines.workflow.definition import Pipeline, Refused, Workflow, stage

__version__ = version()
_WORKFLOW = "tilework.pipelines.workflow.definition"
_MODULES = {
    "reference": "tilework.pipelines.reference",
    **dict.fromkeys(("Pipeline", "Refused", "Workflow", "stage"), _WORKFLOW),
}
__all__ = ["Pipeline", "Refused", "Workflow", "reference", "stage"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is used first: the base install has no torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
