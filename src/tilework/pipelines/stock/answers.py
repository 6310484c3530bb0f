"""What components answered, as named values: all that another process needs to run a stock call again without them.

Tensors are kept as far as the stock call used them: of the hidden states of a text encoder's thirty layers, the one
that it took. Classes do not travel. What comes back is an `Answer`, which has the same fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})


class TouchedTensors(TorchFunctionMode):
    """While entered, notes every tensor that goes into a function of torch, or that is asked for an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, Tensor] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._tensors

    def note(self, *values: Any) -> None:
        """Note all tensors among these, and in lists, tuples and dicts. (`tree_leaves` takes ten times as long.)"""
        for one in values:
            if isinstance(one, Tensor):
                self._tensors[id(one)] = one
            elif isinstance(one, list | tuple):
                self.note(*one)
            elif isinstance(one, dict):
                self.note(*one.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(args, kwargs)
        return func(*args, **(kwargs or {}))


class Answer:
    """An answer that was recorded: fields by name as attributes or items, or by index among those that are not None."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: str | int | slice) -> Any:
        return self._values[key] if isinstance(key, str) else self.to_tuple()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name: object) -> bool:
        return self._values.get(name) is not None  # type: ignore[call-overload]

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(value for value in self._values.values() if value is not None)


class Unkept:
    """Stands for what was not recorded. It is not None, so that indices count on, and of no use otherwise."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} of {self._what}, which was not recorded: the stock call used none of it before")


def recorded(answer: Any, touched: TouchedTensors | None = None) -> Any:
    """An answer as named values (`serialization`), with the tensors that are `touched`; None: with all.

    An object becomes a dict with one key, its form. Whatever has none of the forms below is not kept, since it is
    code: the cache of a language model, say.
    """

    def node(value: Any) -> Any:
        if isinstance(value, Tensor):
            if touched is not None and value not in touched:
                return {"unkept": "a tensor"}
            # A part of a larger tensor would bring all of it.
            return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
        if isinstance(value, DiagonalGaussianDistribution):
            return {"gaussian": [recorded(value.parameters), value.deterministic]}  # Used by way of its mean.
        if type(value) in _PLAIN:
            return value
        if type(value) is tuple:
            return {"tuple": [node(one) for one in value]}
        if type(value) is list:
            return [node(one) for one in value]
        if type(value) is dict:
            return {"dict": [(name, node(one)) for name, one in value.items()]}
        if is_dataclass(value) and not isinstance(value, type):
            return {"fields": [(one.name, node(getattr(value, one.name))) for one in fields(value)]}
        return {"unkept": f"a {type(value).__name__}"}

    return node(answer)


def hollow(answer: Any) -> Any:
    """The same named values with the shapes of their tensors instead of the numbers."""

    def node(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"zeros": [list(value.shape), value.dtype, value.device]}
        if isinstance(value, dict):
            return {name: node(one) for name, one in value.items()}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(node(one) for one in value)
        return value

    return node(answer)


def rebuilt(values: Any) -> Any:
    """An answer from its named values; where they are hollow, with zeros."""
    if isinstance(values, list):
        return [rebuilt(one) for one in values]
    if not isinstance(values, dict):
        return values
    ((form, content),) = values.items()
    match form:
        case "zeros":
            shape, dtype, device = content
            return torch.zeros(shape, dtype=dtype, device=device)
        case "gaussian":
            parameters, deterministic = content
            return DiagonalGaussianDistribution(rebuilt(parameters), deterministic)
        case "tuple":
            return tuple(rebuilt(one) for one in content)
        case "dict":
            return {name: rebuilt(one) for name, one in content}
        case "fields":
            return Answer({name: rebuilt(one) for name, one in content})
    return Unkept(content)
