"""A card with the memory of the host, and a limit: what torch is told to put there counts, and says that it is there.

Only what is asked of torch by name is seen, as by loading: tensors that kernels make for themselves are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cards import card, with_cards
from tilework.worker.models.pinned import PinnedFiles

CARD = torch.device("cuda", 0)


class EmulatedCard(TorchFunctionMode):
    """While entered, tensors on CUDA are those of this card; more than `limit_bytes` of them is out of memory."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes, self.most_bytes = limit_bytes, 0
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def num_bytes(self) -> int:
        """What lies on the card now."""
        self._there = {key: one for key, one in self._there.items() if not one[0].expired()}
        return sum(size for _, size in self._there.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return CARD if self._has(args[0]) else func(*args)
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._moved(func, args, kwargs)
        asked, kwargs = _without_device(kwargs)
        result = func(*args, **kwargs)
        if (asked is None and any(map(self._has, given))) or (asked is not None and asked.type == CARD.type):
            known = {_key(one) for one in given if _is_plain(one)}
            for one in _tensors(result):
                if _is_plain(one) and _key(one) not in known:
                    self._put(one)
        return result

    def _moved(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Tensor:
        """A copy elsewhere, or of another type where it is; itself, if it is so already."""
        tensor, *others = args
        device, dtype, *_ = (
            torch._C._nn._parse_to(*others, **_known(kwargs)) if func is Tensor.to else (_place(func), None)
        )
        if is_traceable_wrapper_subclass(tensor):
            return self._wrapped(tensor, device)
        is_here = self._has(tensor)
        becomes_here = is_here if device is None else device.type == CARD.type
        typed: Tensor = Tensor.to(tensor, dtype=dtype or tensor.dtype)
        if is_here == becomes_here and typed is tensor:
            return tensor
        copy = typed.clone() if typed is tensor else typed
        if becomes_here:
            self._put(copy)
        return copy

    def _wrapped(self, tensor: Any, device: torch.device | None) -> Any:
        names, context = tensor.__tensor_flatten__()
        inner = {name: self._moved(Tensor.to, (getattr(tensor, name), device), {}) for name in names}
        return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())

    def _has(self, tensor: Any) -> bool:
        if not _is_plain(tensor):
            return any(self._has(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        known = self._there.get(_key(tensor))
        return known is not None and not known[0].expired()

    def _put(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._there[_key(tensor)] = StorageWeakRef(storage), storage.nbytes()
        if (size := self.num_bytes) > self.limit_bytes:
            del self._there[_key(tensor)]
            raise torch.OutOfMemoryError(f"{size} bytes on a card of {self.limit_bytes}")
        self.most_bytes = max(self.most_bytes, size)


def use_emulated_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models for "cuda" be loaded for such a card."""
    monkeypatch.setattr("tilework.pipelines.loading.look", lambda all_cards: with_cards(card()))
    monkeypatch.setattr("tilework.worker.models.describe.describe_hardware", lambda device: "a card")
    monkeypatch.setattr("tilework.worker.process.describe_hardware", lambda device: "a card")
    pinned = partial(PinnedFiles, register=lambda address, num_bytes: True, unregister=lambda address: None)
    monkeypatch.setattr("tilework.worker.models.shared_weights.PinnedFiles", pinned)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CARD.index)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 10**9))


def _place(func: Callable[..., Any]) -> torch.device:
    return torch.device("cpu") if func is Tensor.cpu else CARD


def _known(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name in ("device", "dtype", "non_blocking")}


def _without_device(kwargs: Mapping[str, Any]) -> tuple[torch.device | None, dict[str, Any]]:
    """The device that is asked for; None: it is left to torch. And the rest, on the host if it is for a card."""
    named = kwargs.get("device")
    if named is None:
        return None, dict(kwargs)
    device = torch.device(named)
    return device, {**kwargs, "device": "cpu" if device.type == CARD.type else named}


def _is_plain(tensor: Tensor) -> bool:
    return not is_traceable_wrapper_subclass(tensor)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [one for part in value.values() for one in _tensors(part)]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [one for part in value for one in _tensors(part)]
    return []
