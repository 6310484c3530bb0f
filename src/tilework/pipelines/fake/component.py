"""Parts of a fake model: classes of the libraries and their configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Weights:
    """A component with weights: `library` is "diffusers", "transformers", or a package of `diffusers.pipelines`."""

    library: str
    name: str
    """Name of the class, such as "FluxTransformer2DModel"."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Differences from the defaults of the class, or of the configuration class in transformers."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """A scheduler of diffusers."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Guider:
    """A guider of diffusers."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer of `tilework.pipelines.fake.tokenizers`."""

    make: Callable[[int], Any]
    max_length: int


Component = Weights | Sampler | Guider | Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """A model of real size.

    `source` is the repository on the Hugging Face hub whose configurations it has.
    """

    source: str
    pipeline: str
    """Class of diffusers."""
    components: Mapping[str, Component]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Plain values of model_index.json, such as `boundary_ratio`."""
