"""Answers of components, as named values: all that another process needs to run a stock call again without them.

Only tensors that the stock call used are kept: of the hidden states of a text encoder's thirty layers, the one that it
took. Classes are not transferred. The restored object is an `RecordedAnswer`, which has the same fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution, IdentityDistribution
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
_DISTRIBUTIONS = frozenset({"gaussian", "identity"})


class TouchedTensors(TorchFunctionMode):
    """Notes, while entered, every tensor that goes into a function of torch, or whose attribute is read."""

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


class RecordedAnswer:
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
    """A stand-in for what was not recorded. It is not None, so that indices stay right, and of no use otherwise."""

    def __init__(self, what: str) -> None:
        self._what = what

    def clear(self) -> None:
        """Do nothing; some calls do this with a cache at their end."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} of {self._what}, which was not recorded: the stock call used none of it before")


def recorded(answer: Any) -> Any:
    """Return an answer as named values (`serialization`), which share its tensors.

    An object becomes a dict with one key, its form. An object that has none of the forms below is not kept, since it is
    code: the cache of a language model, for example. Lists are copied: a stock call may put other things into them.
    """
    if isinstance(answer, DiagonalGaussianDistribution):
        return {"gaussian": [answer.parameters, answer.deterministic]}
    if isinstance(answer, IdentityDistribution):
        return {"identity": answer.parameters}
    if isinstance(answer, Tensor) or type(answer) in _PLAIN:
        return answer
    if type(answer) is tuple:
        return {"tuple": [recorded(one) for one in answer]}
    if type(answer) is list:
        return [recorded(one) for one in answer]
    if type(answer) is dict:
        return {"dict": [(name, recorded(one)) for name, one in answer.items()]}
    if is_dataclass(answer) and not isinstance(answer, type):
        return {"fields": [(one.name, recorded(getattr(answer, one.name))) for one in fields(answer)]}
    return {"unkept": f"a {type(answer).__name__}"}


def has_unkept(values: Any) -> bool:
    """Return whether a part of an answer has none of the forms."""
    if isinstance(values, dict):
        return "unkept" in values or any(map(has_unkept, values.values()))
    return isinstance(values, list | tuple) and any(map(has_unkept, values))


def has_nan(values: Any) -> bool:
    """Return whether a number in a tensor of these is NaN. Waits for the device."""
    floats = [one for one in tree_leaves(values) if isinstance(one, Tensor) and one.is_floating_point()]
    return any(bool(one.isnan().any()) for one in floats)


def kept(values: Any, touched: TouchedTensors | None = None) -> Any:
    """Return named values to keep: with the `touched` tensors only (None: with all), each in its own memory."""
    if isinstance(values, dict) and not _DISTRIBUTIONS.isdisjoint(values):
        touched = None  # The tensors that it is made from are not touched again.
    if isinstance(values, dict):
        return {name: kept(one, touched) for name, one in values.items()}
    if type(values) in (list, tuple):
        return type(values)(kept(one, touched) for one in values)
    if not isinstance(values, Tensor):
        return values
    if touched is not None and values not in touched:
        return {"unkept": "a tensor"}
    # A part of a larger tensor would keep all of it.
    return values.clone() if values.untyped_storage().nbytes() > values.nbytes else values


def hollow(values: Any) -> Any:
    """Return named values with the shapes of their tensors instead of the numbers."""
    if isinstance(values, Tensor):
        return {"hollow": [list(values.shape), values.dtype, values.device]}
    if isinstance(values, dict):
        return {name: hollow(one) for name, one in values.items()}
    if type(values) in (list, tuple):
        return type(values)(map(hollow, values))
    return values


def rebuilt(values: Any) -> Any:
    """Return an answer from its named values; hollow tensors become NaN (integers zero), so that their use shows."""
    if isinstance(values, list):
        return [rebuilt(one) for one in values]
    if not isinstance(values, dict):
        return values
    ((form, content),) = values.items()
    match form:
        case "hollow":
            shape, dtype, device = content
            return torch.full(shape, math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
        case "gaussian":
            parameters, deterministic = content
            return DiagonalGaussianDistribution(rebuilt(parameters), deterministic)
        case "identity":
            return IdentityDistribution(rebuilt(content))
        case "tuple":
            return tuple(rebuilt(one) for one in content)
        case "dict":
            return {name: rebuilt(one) for name, one in content}
        case "fields":
            return RecordedAnswer({name: rebuilt(one) for name, one in content})
    return Unkept(content)
