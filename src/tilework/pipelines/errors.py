"""What can be wrong with a model before it draws anything. Each message names the field, the value and the remedy."""


class ModelError(Exception):
    """A model cannot be served as asked; the one class to catch around `pipelines.loading.load`."""


class InvalidSource(ModelError):
    """A field of the `ModelSource` has a value that does not exist here."""


class ModelNotFound(ModelError):
    """There is no diffusers model where the source points to."""


class UnsupportedModel(ModelError):
    """The model is a diffusers pipeline, but not one that can be served step by step here."""


class UnsafeWeights(ModelError):
    """The weights are pickled, so that reading them could run anyone's code."""


class InvalidDefaults(ModelError):
    """The model's `tilework.json` is not what it should be."""
