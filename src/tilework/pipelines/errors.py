"""Errors of models, raised before anything is drawn. Each message names the field, the value and the remedy."""

from tilework.core.request import Refusal


class ModelError(Exception):
    """A model cannot be served as asked; the one class to catch around `pipelines.loading.load`."""


class InvalidSource(ModelError):
    """A field of the `ModelSource` has a value that does not exist on this machine."""


class ModelNotFound(ModelError):
    """No diffusers model is at the place that the source names."""


class IncompleteModel(ModelNotFound):
    """Files of the model's directory are missing or damaged."""


class UnsupportedModel(ModelError):
    """The model is a diffusers pipeline, but not one that can be served step by step here."""


class LibraryMissing(ModelError):
    """A model needs a package for its output that is not installed; the message has the command."""


class UnsafeWeights(ModelError):
    """The weights are pickled, so that reading them could run arbitrary code."""


class InvalidDefaults(ModelError):
    """The model's `tilework.json` is invalid."""


class InvalidWorkflow(ModelError):
    """A workflow of a user cannot be imported, or its stages do not fit together."""


class RequestRefused(Exception):
    """A pipeline serves a request on no device; the message says why."""

    refusal = Refusal.VALUE


def describe(error: Exception) -> str:
    """Return an error in a line: its class and what it says."""
    return f"{type(error).__name__}: {error}"
