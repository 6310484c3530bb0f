"""Tilework: serving for diffusion models that keeps each request's deadline."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilework.pipelines.reference import reference

__version__ = version("tilework")
__all__ = ["reference"]


def __getattr__(name: str) -> Any:
    """Import `reference` when it is used first: the base install has no torch."""
    if name == "reference":
        from tilework.pipelines.reference import reference

        return reference
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
