"""Memory that values and states hold, whatever objects their family uses."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, ModularPipeline
from greenlet import greenlet
from torch import Tensor, nn
from transformers.utils import PushToHubMixin

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_OF_THE_MODEL = (nn.Module, DiffusionPipeline, ModularPipeline, PushToHubMixin)
_ITEMS = (list, tuple, set, frozenset)
_CODE = (type, ModuleType, FunctionType, MethodType)
_NOTHING_MORE = (*_PLAIN, *_OF_THE_MODEL, *_CODE)


def held_bytes(*roots: object) -> int:
    """Return the bytes of all tensors and arrays that are reachable from `roots`, each piece of memory counted once.

    They are found in containers, in attributes and in the variables of paused coroutines. Modules, pipelines and
    tokenizers are not visited: they belong to the model.
    """
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    pending: list[Any] = list(roots)
    while pending:
        one = pending.pop()
        if isinstance(one, _NOTHING_MORE) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor | np.ndarray):
            address, size = _memory_of(one)
            sizes[address] = max(size, sizes.get(address, 0))
        else:
            pending += _parts_of(one)
    return sum(sizes.values())


def _memory_of(one: Tensor | np.ndarray) -> tuple[int, int]:
    """Return the address and size of the memory of a tensor or array, also of a part of a larger one."""
    if isinstance(one, np.ndarray):
        while isinstance(one.base, np.ndarray):
            one = one.base
        return one.ctypes.data, one.nbytes
    if type(one) not in (Tensor, nn.Parameter) or one.layout is not torch.strided or one.is_meta:
        return id(one), 0 if one.is_meta else one.numel() * one.element_size()
    storage = one.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _parts_of(one: Any) -> Iterable[Any]:
    """Return what a container or an object refers to: items, attributes, or both."""
    kind: type = type(one)
    items: Iterable[Any] = one.values() if isinstance(one, Mapping) else one if isinstance(one, _ITEMS) else ()
    if kind is dict or kind in _ITEMS:
        return items
    variables = _variables(one.gr_frame) if isinstance(one, greenlet) else ()
    slots = [getattr(one, name, None) for name in _slots(kind)]
    return (*items, *variables, *slots, *getattr(one, "__dict__", {}).values())


@cache
def _slots(kind: type) -> tuple[str, ...]:
    names = [vars(one).get("__slots__", ()) for one in kind.__mro__]
    return tuple(name for found in names for name in ((found,) if isinstance(found, str) else found))


def _variables(frame: FrameType | None) -> Iterator[Any]:
    """Yield the variables of a paused function and of its callers."""
    while frame is not None:
        variables = frame.f_locals
        yield from list(variables.values())
        if isinstance(variables, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            variables.clear()  # Before Python 3.13 the frame keeps this copy, and its old values with it.
        frame = frame.f_back
