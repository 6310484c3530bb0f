"""Caches of whole steps by diffusers' own hooks, one for each request: no other request reads what its steps keep.

The library puts its hooks on a model, for all callers. Here the hooks are made for a request, taken off again, and
installed only during the request's own calls. So requests that take turns on a model do not interfere, a request
without a cache runs as if there were no hooks, and the kept data ends with the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from diffusers.hooks import (
    FirstBlockCacheConfig,
    HookRegistry,
    TaylorSeerCacheConfig,
    apply_first_block_cache,
    apply_taylorseer_cache,
)
from diffusers.hooks.hooks import CacheContext, StateManager
from torch import nn

from tilework.core.cache import CacheChoice, CacheKind, CacheUse
from tilework.core.wire.spec import Spec

Forward = Callable[..., Any]

COMPUTED_WHOLE = "some steps were computed whole: several devices shared them"


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """Structure of a denoiser: its `lists` of blocks, in their order, and the `last` module behind them, a pattern.

    `first` is True if FirstBlockCache can be used: it knows the blocks of all lists, and all return the same.
    """

    lists: tuple[str, ...] = ("transformer_blocks",)
    last: str = "proj_out"
    first: bool = True


_DOUBLE = StepBlocks(("transformer_blocks", "single_transformer_blocks"))
STEP_BLOCKS: Mapping[str, StepBlocks] = {
    "ChromaTransformer2DModel": StepBlocks(_DOUBLE.lists, first=False),
    "CogVideoXTransformer3DModel": StepBlocks(),
    "CogView4Transformer2DModel": StepBlocks(),
    "Flux2Transformer2DModel": StepBlocks(_DOUBLE.lists, first=False),
    "FluxTransformer2DModel": _DOUBLE,
    "HunyuanVideoTransformer3DModel": _DOUBLE,
    "LTXVideoTransformer3DModel": StepBlocks(),
    "MochiTransformer3DModel": StepBlocks(),
    "PixArtTransformer2DModel": StepBlocks(first=False),
    "QwenImageTransformer2DModel": StepBlocks(),
    "SD3Transformer2DModel": StepBlocks(),
    "SanaTransformer2DModel": StepBlocks(first=False),
    "WanTransformer3DModel": StepBlocks(("blocks",)),
    "ZImageTransformer2DModel": StepBlocks(("layers",), r"all_final_layer\.[^.]+", first=False),
}
"""Structures by class of the denoiser. Classes without a row have no cache of whole steps."""


_KINDS = (CacheKind.FBCACHE, CacheKind.TAYLORSEER)


class StepCaches:
    """The caches of whole steps that requests of some `denoisers` can have."""

    def __init__(self, denoisers: Iterable[nn.Module]) -> None:
        self._denoisers = tuple(denoisers)
        self.is_running = False

    @property
    def kinds(self) -> tuple[CacheKind, ...]:
        """Kinds of caches that all denoisers can have."""
        if not self._denoisers or any(map(_is_bound, self._denoisers)):
            return ()
        return tuple(kind for kind in _KINDS if all(_can(one, kind) for one in self._denoisers))

    def of(self, spec: Spec) -> StepCache | None:
        """Return a new cache for a request; None if it asks for none."""
        return StepCache(self, spec.cache) if spec.cache is not None and spec.cache.kind in self.kinds else None


class StepCache:
    """Data that the calls of a request keep for its later ones, and the effect so far: `use`."""

    def __init__(self, owner: StepCaches, choice: CacheChoice) -> None:
        self._owner = owner
        self._choice = choice
        self._hooked: dict[nn.Module, _HookedModel] = {}
        self.use = CacheUse()

    def call(self, model: nn.Module, context: str, run: Forward, *args: Any, **kwargs: Any) -> Any:
        """Call `run`, which calls this denoiser, with the cache. The calls of one `context` follow each other."""
        hooked = self._hooked.get(model)
        if hooked is None:
            hooked = self._hooked[model] = _HookedModel(model, self._choice)
        self._owner.is_running = True
        try:
            with hooked.in_place(context):
                answer = run(*args, **kwargs)
        except BaseException:
            self._hooked.clear()
            raise
        finally:
            self._owner.is_running = False
        self.use += hooked.take_use()
        return answer

    def forget(self, why: str) -> None:
        """Drop the kept data, as after a step that was made without it."""
        self._hooked.clear()
        self.use += CacheUse(off=why)


@dataclass(slots=True, eq=False)
class CacheSlot:
    """The cache for the present calls of a stock call's denoisers, and the next call's context.

    A context is as the pipeline calls it (`cache_context`), or the number of the call in its iteration.
    """

    cache: StepCache | None = None
    name: str = ""
    num_calls: int = 0

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Name the context of calls while entered."""
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before

    def next_context(self) -> str:
        self.num_calls += 1
        return self.name or f"call {self.num_calls}"

    def end_iteration(self) -> None:
        self.num_calls = 0


class _HookedModel:
    """The hooks of one request on one denoiser, and the data that they keep. They are taken off again at once."""

    def __init__(self, model: nn.Module, choice: CacheChoice) -> None:
        row = STEP_BLOCKS[type(model).__name__]
        blocks = _blocks(model, row)
        self._num_blocks = len(blocks)
        self._num_calls = 0
        self._num_computed = 0
        stock = {module: (vars(module).get("forward"), _hooks(module)) for module in model.modules()}
        for block in blocks:
            block.forward = self._counted(block.forward)
        _apply(model, row, choice)
        self._forwards: dict[nn.Module, Forward] = {}
        self._managers: list[StateManager] = []
        for module, (forward, names) in stock.items():
            for name in _hooks(module) - names:
                registry = HookRegistry.check_if_exists_or_initialize(module)
                self._managers += [one for one in vars(registry.hooks[name]).values() if isinstance(one, StateManager)]
                self._forwards[module] = module.forward
                registry.remove_hook(name, recurse=False)
                _put(module, forward)

    @contextmanager
    def in_place(self, context: str) -> Iterator[None]:
        """Route calls of the model through the hooks while entered."""
        stock = {module: vars(module).get("forward") for module in self._forwards}
        for manager in self._managers:
            manager.set_context(CacheContext(context))
        try:
            for module, forward in self._forwards.items():
                _put(module, forward)
            self._num_calls += 1
            yield
        finally:
            for module, before in stock.items():
                _put(module, before)

    def take_use(self) -> CacheUse:
        """Return the blocks computed and skipped since the last call of this."""
        computed, called = self._num_computed, self._num_calls
        self._num_computed = self._num_calls = 0
        return CacheUse(computed, called * self._num_blocks - computed)

    def _counted(self, forward: Forward) -> Forward:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._num_computed += 1
            output = forward(*args, **kwargs)
            if isinstance(output, tuple) and output[0] is None:
                # SD3's last block returns no text, as nothing reads it. The hooks expect one.
                return (kwargs["encoder_hidden_states"], *output[1:])
            return output

        return run


def _can(model: nn.Module, kind: CacheKind) -> bool:
    row = STEP_BLOCKS.get(type(model).__name__)
    if row is None or kind is CacheKind.TAYLORSEER:
        return row is not None
    return row.first and len(_blocks(model, row)) > 1


def _apply(model: nn.Module, row: StepBlocks, choice: CacheChoice) -> None:
    if choice.kind is CacheKind.FBCACHE:
        apply_first_block_cache(model, FirstBlockCacheConfig(threshold=choice.value))
        return
    config = TaylorSeerCacheConfig(
        cache_interval=int(choice.value),
        taylor_factors_dtype=torch.float32,  # A few tensors of the size of the output.
        skip_predict_identifiers=[rf"{name}\.\d+" for name in row.lists],
        cache_identifiers=[row.last],
    )
    apply_taylorseer_cache(model, config)


def _blocks(model: nn.Module, row: StepBlocks) -> list[nn.Module]:
    return [block for name in row.lists for block in model.get_submodule(name).children()]


def _is_bound(model: nn.Module) -> bool:
    """Return whether its blocks are compiled, or have hooks that need every block to be called."""
    return any(one._compiled_call_impl is not None or _hooks(one) for one in model.modules())


def _hooks(module: nn.Module) -> frozenset[str]:
    """Return the names of the library's hooks on a module."""
    registry = getattr(module, "_diffusers_hook", None)
    return frozenset() if registry is None else frozenset(registry.hooks)


def _put(module: nn.Module, forward: Forward | None) -> None:
    """Give a module this forward; None: that of its class."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward
